"""all_reduce and stock DistributedDataParallel on the backend `poseidon` beside Gloo, in turns on one machine.

Both backends are process groups of the same processes and take turns, so that whatever else the machine does befalls
both. Prints, per size, the median times of the slowest rank and the median of their ratios: above 1, Poseidon is faster.
"""

import argparse
import datetime
import multiprocessing
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch._dynamo  # noqa: F401  imported by DDP: once here rather than in every rank
from poseidon._c10d_register import register
from torch.nn.parallel import DistributedDataParallel

DEADLINE = datetime.timedelta(minutes=5)
BACKENDS = ("poseidon", "gloo")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 4096, 65536, 1 << 20, 16 << 20, 100_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register()
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            # Forked after the import of torch, which takes longer than the measurement.
            fork = multiprocessing.get_context("fork")
            ranks = [
                fork.Process(target=measure, args=(rank, workers, f"{folder}/store", args), daemon=True)
                for rank in range(workers)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


def measure(rank, workers, path, args):
    """Runs one rank to its end."""
    torch.set_num_threads(1)
    store = dist.FileStore(path, workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=DEADLINE)
    groups = {"gloo": dist.group.WORLD, "poseidon": dist.new_group(backend="poseidon", timeout=DEADLINE)}
    for size in args.bytes:
        tensor = torch.ones(size // 4)
        count = max(3, min(200, 20_000_000 // (size + 1)))
        compare(
            f"P={workers} all_reduce {size} B", groups, args.rounds, count,
            lambda name: dist.all_reduce(tensor.fill_(1), group=groups[name]),
        )
    torch.manual_seed(rank)
    for label, layers in (("mlp 21 MB", [1024, 2048, 1024, 1024]), ("mlp 0.5 MB", [256, 256, 256])):
        nets = {}
        for name, group in groups.items():
            parts = []
            for m, n in zip(layers, layers[1:]):
                parts += [torch.nn.Linear(m, n), torch.nn.ReLU()]
            nets[name] = DistributedDataParallel(torch.nn.Sequential(*parts), process_group=group)
        batch = torch.randn(16, layers[0])
        compare(
            f"P={workers} DDP step, {label}", groups, args.rounds, 5,
            lambda name: nets[name](batch).sum().backward(),
        )
    dist.destroy_process_group()


def compare(label, groups, rounds, count, act):
    """Times `count` calls a round on each backend in turn."""
    times = {name: [] for name in BACKENDS}
    for name in BACKENDS:
        act(name)
    for _ in range(rounds):
        for name in BACKENDS:
            dist.barrier(group=groups[name])
            begun = time.perf_counter()
            for _ in range(count):
                act(name)
            spent = torch.tensor([(time.perf_counter() - begun) / count])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item())
    if dist.get_rank() == 0:
        ours, stock = (statistics.median(times[name]) * 1e3 for name in BACKENDS)
        ratio = statistics.median(g / p for p, g in zip(times["poseidon"], times["gloo"]))
        print(f"{label}: poseidon {ours:.3f} ms, gloo {stock:.3f} ms, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
