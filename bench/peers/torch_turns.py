"""Trains nets as one rank of a cluster; the contenders of `cargo xtask bench gpu` take turns in the same processes.

A process that imports torch and starts CUDA takes ten seconds, so each rank is one process for all nets and
contenders. A contender prepares a copy of the net, warms up, and then waits while the others have their turns.
Every turn begins with a step that is not timed. A step is timed from its zero_grad until the device has done all of
it. Each rank is told by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints lines of JSON: one for each
net, one for each turn with the times of all ranks, and one for each contender that cannot take part.

With --trace FILE one contender trains one net, and rank 0 writes a profiler's trace of a step.
"""

import argparse
import contextlib
import copy
import datetime
import gc
import itertools
import json
import os
import time

import torch
import torch.distributed as dist

import poseidon.torch as psd
import torch_nets
from torch_train import RATE, bytes_carried, cpu_seconds, sgd

CONTENDERS = ["apart", "ddp", "ddp-nccl", "ddp-poseidon", "poseidon", "poseidon-ps", "poseidon-server"]
PRECISIONS = ["fp32", "autocast", "bf16"]
# Allocators, DDP's buckets and cuDNN's choices have settled after twice as many steps. Where a step takes longer than
# SLOW seconds, what they cost is small beside it, and once as many have to do.
WARM_UP = 2
SLOW = 1.0
# A rank that waits longer for another is not going to see it.
PATIENCE = datetime.timedelta(minutes=3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = lambda text: text.split(",")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--nets", type=listed, required=True)
    parser.add_argument("--precisions", type=listed, default=["fp32"])
    parser.add_argument("--contenders", type=listed, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn, at most")
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="a turn has fewer steps if they would take longer")
    parser.add_argument("--port", default="eth0", help="the network device whose bytes are counted")
    parser.add_argument("--trace", help="write a trace of the first net under the first contender to this file")
    args = parser.parse_args()
    ranks = Ranks(args)
    if args.trace:
        with ranks.net(args.nets[0], args.precisions[0]) as net:
            trace(net, args.contenders[0], args.trace)
    else:
        for name, precision in itertools.product(args.nets, args.precisions):
            net, why = ranks.attempt(lambda: ranks.net(name, precision))
            if why is not None:
                # A library is missing, or memory: other nets may do better.
                ranks.say(kind="failed", net=name, precision=precision, contender=None, why=why)
                continue
            with net:
                take_turns(net, args)
    ranks.leave()


class Ranks:
    """This process among the others: one group for agreeing on things, and one for every backend, made when wanted."""

    def __init__(self, args):
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device, self.port = args.device, args.port
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.count))
        torch.backends.cudnn.benchmark = True
        if self.device == "cuda":
            torch.cuda.set_device(0)
        # NCCL refuses two ranks on one GPU of one host, and would not use the network between them.
        os.environ.update(NCCL_HOSTID=f"node{self.rank}", NCCL_SOCKET_IFNAME=args.port)
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1")
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.groups = {"gloo": None}
        if any(contender.startswith("poseidon") for contender in args.contenders):
            psd.init()

    def net(self, name, precision):
        torch.manual_seed(1)  # the same parameters on every rank
        with torch.device(self.device):
            return Net(self, name, precision, *torch_nets.NETS[name]())

    def group(self, backend):
        """The process group of all ranks on this backend."""
        if backend not in self.groups:
            self.groups[backend] = dist.new_group(backend=backend, timeout=PATIENCE)
        return self.groups[backend]

    def gather(self, fact):
        """Everybody's."""
        facts = [None] * self.count
        dist.all_gather_object(facts, fact)
        return facts

    def attempt(self, what):
        """What it returns, and nothing but the reasons if any rank could not do it."""
        result = why = None
        try:
            result = what()
        except Exception as error:
            why = f"rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        whys = [why for why in self.gather(why) if why]
        return (None, whys[0]) if whys else (result, None)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def say(self, **line):
        if self.rank == 0:
            # One write, so that lines do not mix with what libraries print.
            os.write(1, (json.dumps(line) + "\n").encode())

    def leave(self):
        if psd.is_initialized():
            psd.shutdown()
        dist.barrier()
        dist.destroy_process_group()


class Net:
    """A net with its batch. It stays as it is: every contender trains a copy."""

    def __init__(self, ranks, name, precision, net, x, y):
        if precision == "bf16":
            net = net.to(torch.bfloat16)
            x = x.to(torch.bfloat16) if x.is_floating_point() else x
        self.ranks, self.name, self.precision = ranks, name, precision
        self.net, self.x, self.y = net.train(), x, y
        self.trained = {}

    def __enter__(self):
        gradients = [p for p in self.net.parameters() if p.requires_grad]
        self.ranks.say(
            kind="net",
            net=self.name,
            precision=self.precision,
            batch=len(self.x),
            parameters=sum(p.numel() for p in gradients),
            gradient_bytes=sum(p.numel() * p.element_size() for p in gradients),
        )
        return self

    def prepare(self, contender):
        """Whether it takes part from now on."""

        def begin():
            trained = Trained(self, contender)
            return trained, trained.warm_up(WARM_UP)

        result, why = self.ranks.attempt(begin)
        if why is None:
            trained, seconds = result
            trained.estimate(self.ranks.gather([seconds]))
            if trained.seconds < SLOW:
                _, why = self.ranks.attempt(lambda: trained.warm_up(WARM_UP))
        if why is not None:
            self.say(kind="failed", contender=contender, why=why)
            return False
        self.trained[contender] = trained
        return True

    def say(self, **line):
        self.ranks.say(net=self.name, precision=self.precision, **line)

    def __exit__(self, *_):
        for trained in self.trained.values():
            trained.close()
        self.trained.clear()
        self.net = self.x = self.y = None
        gc.collect()
        if self.ranks.device == "cuda":
            torch.cuda.empty_cache()


class Trained:
    """A copy of a net under one contender."""

    def __init__(self, source, contender):
        self.ranks, self.source = source.ranks, source
        net, ranks = copy.deepcopy(source.net), source.ranks
        self.seconds = 0.0
        if contender.startswith("poseidon"):
            where = {"update": "server"} if contender == "poseidon-server" else {}
            scheme = "ps" if contender == "poseidon-ps" else "auto"
            self.net = psd.DistributedDataParallel(net, scheme=scheme, **where)
            self.optimizer = psd.SGD(self.net.parameters(), lr=RATE) if where else sgd(self.net)
            return
        if contender != "apart":
            _, _, backend = contender.partition("-")
            group = ranks.group(backend or "gloo")
            net = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
        self.net, self.optimizer = net, sgd(net)

    def step(self):
        """Seconds of a step, until the device is done."""
        source = self.source
        self.ranks.synchronize()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(source):
            loss = torch_nets.loss(self.net, source.x, source.y)
        loss.backward()
        self.optimizer.step()
        self.ranks.synchronize()
        return time.perf_counter() - start

    def warm_up(self, steps):
        """Seconds of the last of some steps."""
        seconds = [self.step() for _ in range(steps)]
        self.settle()
        return seconds[-1]

    def estimate(self, seconds):
        """Takes all ranks' times of steps, so that all come to the same number of steps for the next turn."""
        self.seconds = max(min(rank) for rank in seconds)

    def settle(self):
        """Nothing of it is under way any more."""
        if hasattr(self.net, "sessions_plan"):
            self.net.synchronize()
        self.ranks.synchronize()

    def plan(self):
        """Layers by factors, and the bytes that this rank sends in a step; nothing if that is not planned."""
        if not hasattr(self.net, "sessions_plan"):
            return 0, None
        rows = self.net.sessions_plan()
        return sum(row[2] == "sfb" for row in rows), sum(row[4] for row in rows)

    def close(self):
        if hasattr(self.net, "sessions_plan"):
            self.net.close()
        self.net = self.optimizer = None


def autocast(net):
    if net.precision != "autocast":
        return contextlib.nullcontext()
    return torch.autocast(net.ranks.device, dtype=torch.bfloat16)


def take_turns(net, args):
    ready = [contender for contender in args.contenders if net.prepare(contender)]
    for number in range(1, args.rounds + 1):
        # Whoever is first changes: what a slow moment of the machine costs falls on all.
        first = (number - 1) % max(1, len(ready))
        for contender in ready[first:] + ready[:first]:
            if contender not in net.trained:
                continue
            trained = net.trained[contender]
            steps = max(1, min(args.steps, int(args.turn_seconds / max(trained.seconds, 1e-6))))
            facts, why = net.ranks.attempt(lambda: turn(trained, steps))
            if why is not None:
                net.say(kind="failed", contender=contender, why=why)
                net.trained.pop(contender).close()
                continue
            ranks = net.ranks.gather(facts)
            trained.estimate([rank["seconds"] for rank in ranks])
            net.say(kind="turn", contender=contender, round=number, ranks=ranks)


def turn(trained, steps):
    """What one rank has to tell of a turn."""
    ranks = trained.ranks
    dist.barrier()
    trained.step()
    sent, cpu = bytes_carried(ranks.port), cpu_seconds()
    seconds = [trained.step() for _ in range(steps)]
    cpu, sent_after = cpu_seconds() - cpu, bytes_carried(ranks.port)
    trained.settle()
    by_factors, planned = trained.plan()
    return {
        "rank": ranks.rank,
        "seconds": [round(s, 6) for s in seconds],
        "cpu_seconds_per_step": cpu / steps,
        "sent_per_step": (sent_after[0] - sent[0]) / steps,
        "received_per_step": (sent_after[1] - sent[1]) / steps,
        "by_factors": by_factors,
        "planned_bytes": planned,
    }


def trace(net, contender, path):
    """One step, after one that the profiler warms up with."""
    from torch.profiler import ProfilerActivity, profile, schedule

    if not net.prepare(contender):
        raise SystemExit(f"{contender} cannot train {net.name}")
    trained = net.trained[contender]
    activities = [ProfilerActivity.CPU]
    if net.ranks.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    write = (lambda profiler: profiler.export_chrome_trace(path)) if net.ranks.rank == 0 else None
    dist.barrier()
    # The last step is traced; those before it warm the profiler up.
    once = schedule(wait=0, warmup=2, active=1, repeat=1)
    with profile(activities=activities, schedule=once, on_trace_ready=write) as profiler:
        for _ in range(3):
            seconds = trained.step()
            profiler.step()
    trained.settle()
    seconds = max(net.ranks.gather(seconds))
    net.say(kind="traced", contender=contender, seconds=seconds)


if __name__ == "__main__":
    main()
