"""The protocol every contender of `cargo xtask bench exchange` follows.

Each iteration fills the buffer, passes a barrier, and times one in-place sum over all ranks. The result is
checked element by element outside the timed part. An iteration takes as long as its slowest rank; its CPU
time is the sum over ranks of what the whole process used while the exchange ran, kernel time included.
"""

import argparse
import json
import resource
import time

import numpy as np

# Values stay small integers, so that the sum is exact in float32 whatever the order of addition,
# and differ by position, so that a misplaced piece is noticed.
PATTERN = 1021
WARM_UP = 1


def arguments(description):
    """The command line shared by the peers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--bytes", type=int, required=True, help="size of the buffer, a multiple of 4")
    parser.add_argument("--iters", type=int, required=True, help="timed iterations")
    return parser


def measure(rank, workers, args, link, barrier, bind, gather):
    """Runs the protocol on one rank; prints the JSON object on rank 0.

    `bind(buffer)` returns a function that sums the numpy buffer over all ranks in place.
    `gather(values)` returns the list of every rank's values on rank 0, anything elsewhere.
    """
    if args.bytes <= 0 or args.bytes % 4 or args.iters <= 0:
        raise SystemExit("--bytes must be a positive multiple of 4 and --iters positive")
    pattern = (np.arange(args.bytes // 4) % PATTERN).astype(np.float32)
    buffer = np.empty_like(pattern)
    all_reduce = bind(buffer)
    seconds, cpu = [], []
    for iteration in range(-WARM_UP, args.iters):
        offset = iteration + WARM_UP
        np.add(pattern, 3 * rank + offset, out=buffer)
        barrier()
        cpu_before = cpu_seconds()
        start = time.perf_counter()
        all_reduce()
        end = time.perf_counter()
        cpu_after = cpu_seconds()
        buffer -= pattern * np.float32(workers)
        expected = 3 * sum(range(workers)) + workers * offset
        if buffer.min() != expected or buffer.max() != expected:
            raise SystemExit(f"rank {rank}: wrong sum in iteration {iteration}")
        if iteration >= 0:
            seconds.append(end - start)
            cpu.append(cpu_after - cpu_before)
    ranks = gather((seconds, cpu, peak_rss_bytes()))
    if rank == 0:
        print(json.dumps(report(ranks, workers, args, link)), flush=True)


def report(ranks, workers, args, link):
    """The JSON object, from every rank's (seconds, cpu, peak memory)."""
    slowest = np.max([seconds for seconds, _, _ in ranks], axis=0)
    p10, median, p90 = np.percentile(slowest, [10, 50, 90])
    return {
        "workers": workers,
        "bytes": args.bytes,
        "iters": args.iters,
        "link": link,
        "chunk": None,
        "lanes": None,
        "seconds": {"median": median, "p10": p10, "p90": p90},
        "cpu_seconds_per_iter": float(np.mean(np.sum([cpu for _, cpu, _ in ranks], axis=0))),
        "bytes_sent_per_node": None,
        "peak_rss_bytes": max(peak for _, _, peak in ranks),
    }


def cpu_seconds():
    """User and kernel time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes():
    """Largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
