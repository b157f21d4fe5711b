"""Trains a net as one rank of a cluster, synchronised by one of the contenders of `cargo xtask bench torch`.

The rank is told by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each rank prints a line of JSON with the seconds
of every timed step, its CPU seconds and the bytes its network port carried per step, counted around the timed
steps only. With --available it prints the contenders that this Python has instead.
"""

import argparse
import datetime
import inspect
import json
import os
import resource
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

import torch_nets

CONTENDERS = ["alone", "apart", "ddp", "ddp-fp16", "ddp-poseidon", "poseidon", "poseidon-ps", "poseidon-server"]
# So small that nothing diverges on one batch over and over.
RATE = 1e-4
WARM_UP = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--net", choices=torch_nets.NETS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--port", default="eth0", help="the network device whose bytes are counted")
    parser.add_argument("--available", action="store_true", help="print which contenders there are")
    args = parser.parse_args()
    if args.available:
        print(json.dumps([contender for contender in CONTENDERS if is_available(contender)]))
        return
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net, x, y = torch_nets.NETS[args.net]()
    net, optimizer, barrier, leave = prepare(args.contender, net)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    barrier()
    seconds, sent, cpu = [], bytes_carried(args.port), cpu_seconds()
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    cpu, sent_after = cpu_seconds() - cpu, bytes_carried(args.port)
    barrier()
    schemes = [row[2] for row in net.sessions_plan()] if hasattr(net, "sessions_plan") else []
    leave()
    line = {
        "rank": int(os.environ.get("RANK", "0")),
        "seconds": [round(s, 6) for s in seconds],
        "cpu_seconds_per_step": cpu / args.steps,
        "sent_per_step": (sent_after[0] - sent[0]) / args.steps,
        "received_per_step": (sent_after[1] - sent[1]) / args.steps,
        "by_factors": schemes.count("sfb"),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    # One write, so that the lines of several ranks do not mix.
    os.write(1, (json.dumps(line) + "\n").encode())


def is_available(contender):
    """Whether this Python can run it."""
    if contender == "ddp-poseidon":
        import poseidon.torch  # noqa: F401  (makes the backend known, where there is one)

        return dist.is_backend_available("poseidon")
    if contender == "poseidon-server":
        import poseidon.torch as psd

        return "update" in inspect.signature(psd.DistributedDataParallel).parameters
    return True


def prepare(contender, net):
    """The net as it is trained, its optimizer, a barrier, and what to call at the end."""
    if contender == "alone":
        return net, sgd(net), lambda: None, lambda: None
    if contender == "apart":
        # Connected only to start at the same time.
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
        return net, sgd(net), dist.barrier, dist.destroy_process_group
    if contender.startswith("ddp"):
        if contender == "ddp-poseidon":
            import poseidon.torch  # noqa: F401
        backend = "poseidon" if contender == "ddp-poseidon" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=5))
        net = torch.nn.parallel.DistributedDataParallel(net)
        if contender == "ddp-fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            net.register_comm_hook(None, fp16_compress_hook)
        return net, sgd(net), dist.barrier, dist.destroy_process_group
    import poseidon.torch as psd

    psd.init()
    if contender == "poseidon-server":
        net = psd.DistributedDataParallel(net, update="server")
        return net, psd.SGD(net.parameters(), lr=RATE), psd.barrier, psd.shutdown
    net = psd.DistributedDataParallel(net, scheme="ps" if contender == "poseidon-ps" else "auto")
    return net, sgd(net), psd.barrier, psd.shutdown


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=RATE)


def cpu_seconds():
    """User and kernel time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def bytes_carried(port):
    """Bytes that a network device of this namespace has sent and received; nothing if it has no such device."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, counts = line.partition(":")
            if name.strip() == port:
                received, sent = (int(count) for count in (counts.split()[0], counts.split()[8]))
                return sent, received
    return 0, 0


if __name__ == "__main__":
    main()
