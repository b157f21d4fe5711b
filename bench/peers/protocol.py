"""The protocol every contender of `cargo xtask bench exchange`, `bench links` and `bench hosts` follows.

Each iteration fills the buffer, passes a barrier, and times one in-place sum over all ranks. The result is
checked element by element outside the timed part. An iteration takes as long as its slowest rank; its CPU
time is the sum over ranks of what the whole process used while the exchange ran, kernel time included.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time

import numpy as np

# Values stay small integers, so that the sum is exact in float32 whatever the order of addition,
# and differ by position, so that a misplaced piece is noticed.
PATTERN = 1021
# The same in bfloat16, where whole numbers up to 256 are exact: up to 32 ranks.
HALF_PATTERN = 6
WARM_UP = 1


def arguments(description):
    """The command line shared by the peers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--bytes", type=sizes, required=True, help="size of the buffer, a multiple of 4; several: 4096,65536"
    )
    parser.add_argument("--iters", type=int, default=10, help="timed iterations")
    parser.add_argument(
        "--busy", type=int, default=0, help="threads per core that compute meanwhile, on the whole machine once"
    )
    parser.add_argument("--poseidon", help="the poseidon command, whose `bench busy` computes for --busy")
    return parser


def sizes(text):
    """The numbers of a list such as 4096,65536."""
    numbers = [int(word) for word in text.split(",")]
    if any(number <= 0 or number % 4 for number in numbers):
        raise argparse.ArgumentTypeError("expected positive multiples of 4")
    return numbers


class Bound:
    """A buffer that a library sums over all ranks.

    `load` brings what was filled into the buffer to where it is summed, and `store` brings the sum back. Neither is
    timed. A library that sums in the buffer itself needs none.
    """

    def __init__(self, all_reduce, load=lambda: None, store=lambda: None):
        self.all_reduce, self.load, self.store = all_reduce, load, store


class Ranks:
    """What the protocol needs of a library, as one rank sees it.

    `bind(buffer)` returns how the numpy buffer is summed over all ranks, which is `Bound`.
    `gather(value)` returns the list of every rank's values on rank 0, anything elsewhere.
    """

    def __init__(self, rank, workers, link, barrier, bind, gather, encoding="f32"):
        self.rank = rank
        self.workers = workers
        self.link = link
        self.barrier = barrier
        self.bind = bind
        self.gather = gather
        self.width, self.pattern = (4, PATTERN) if encoding == "f32" else (2, HALF_PATTERN)


def measure(ranks, args):
    """Measures every size once; rank 0 prints a JSON object for each."""
    if args.iters <= 0:
        raise SystemExit("--iters must be positive")
    for size in args.bytes:
        case = Case(ranks, size)
        with busy(args):
            answer = case.turn(args.iters)
        if ranks.rank == 0:
            print(json.dumps(answer), flush=True)


def take_turns(ranks, args, share):
    """Says `ready`, then measures what is asked for.

    Every line of rank 0's standard input is a turn, `BYTES ITERS`; rank 0 answers with a JSON object on a
    line. It ends when the input does. `share(value)` returns rank 0's value on every rank.
    """
    cases = {size: Case(ranks, size) for size in args.bytes}
    if ranks.rank == 0:
        print("ready", flush=True)
    while True:
        line = share(sys.stdin.readline() if ranks.rank == 0 else None)
        if not line:
            return
        size, iters = (int(word) for word in line.split())
        answer = cases[size].turn(iters)
        if ranks.rank == 0:
            print(json.dumps(answer), flush=True)


class Case:
    """A buffer of one size, and how often it was summed."""

    def __init__(self, ranks, size):
        self.ranks = ranks
        self.size = size
        self.pattern = (np.arange(size // ranks.width) % ranks.pattern).astype(np.float32)
        self.buffer = np.empty_like(self.pattern)
        self.bound = ranks.bind(self.buffer)
        self.iterations = 0

    def turn(self, iters):
        """Some iterations after WARM_UP that are not counted; the JSON object on rank 0."""
        seconds, cpu = [], []
        for iteration in range(-WARM_UP, iters):
            spent = self.iterate()
            if iteration >= 0:
                seconds.append(spent[0])
                cpu.append(spent[1])
        gathered = self.ranks.gather((seconds, cpu, peak_rss_bytes()))
        return self.report(iters, gathered) if self.ranks.rank == 0 else None

    def iterate(self):
        """One iteration: its seconds, and its seconds of CPU."""
        rank, workers = self.ranks.rank, self.ranks.workers
        # What differs by rank and iteration is small where few numbers are exact.
        offsets = [self.offset(other) for other in range(workers)]
        self.iterations += 1
        np.add(self.pattern, offsets[rank], out=self.buffer)
        self.bound.load()
        self.ranks.barrier()
        cpu_before = cpu_seconds()
        start = time.perf_counter()
        self.bound.all_reduce()
        end = time.perf_counter()
        cpu_after = cpu_seconds()
        self.bound.store()
        self.buffer -= self.pattern * np.float32(workers)
        expected = sum(offsets)
        if self.buffer.min() != expected or self.buffer.max() != expected:
            raise SystemExit(f"rank {rank}: wrong sum in iteration {self.iterations}")
        return end - start, cpu_after - cpu_before

    def offset(self, rank):
        if self.ranks.width == 2:
            return (rank + self.iterations) % 2
        return 3 * rank + self.iterations % PATTERN

    def report(self, iters, gathered):
        """The JSON object, from every rank's (seconds, cpu, peak memory)."""
        slowest = np.max([seconds for seconds, _, _ in gathered], axis=0)
        p10, median, p90 = np.percentile(slowest, [10, 50, 90])
        return {
            "workers": self.ranks.workers,
            "bytes": self.size,
            "iters": iters,
            "link": self.ranks.link,
            "chunk": None,
            "lanes": None,
            "seconds": {"mean": float(np.mean(slowest)), "median": median, "p10": p10, "p90": p90},
            "cpu_seconds_per_iter": float(np.mean(np.sum([cpu for _, cpu, _ in gathered], axis=0))),
            "bytes_sent_per_node": None,
            "peak_rss_bytes": max(peak for _, _, peak in gathered),
        }


@contextlib.contextmanager
def busy(args):
    """Has threads compute meanwhile, in a process of their own, whose CPU time counts for nobody.

    Every rank starts the program; one of them computes at a time on a machine.
    """
    if args.busy == 0:
        yield
        return
    if not args.poseidon:
        raise SystemExit("--busy needs --poseidon, the command whose `bench busy` computes")
    threads = args.busy * len(os.sched_getaffinity(0))
    command = [args.poseidon, "bench", "busy", "--threads", str(threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def cpu_seconds():
    """User and kernel time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_rss_bytes():
    """Largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
