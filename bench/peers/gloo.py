"""torch.distributed on Gloo: all_reduce, one thread per rank, on one interface.

With --workers P it starts P processes on the loopback interface. With --in-cluster it is one rank, told by
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, on the interface named by GLOO_SOCKET_IFNAME.
"""

import datetime
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

import protocol

# With --turns, a rank waits as long as another contender measures.
DEADLINE = datetime.timedelta(minutes=30)


def main():
    parser = protocol.arguments("Times torch.distributed.all_reduce on Gloo")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--workers", type=int, help="how many ranks to start on this machine")
    where.add_argument("--in-cluster", action="store_true", help="be one rank, told by the environment")
    parser.add_argument(
        "--turns", action="store_true", help="with --in-cluster: measure what standard input asks for"
    )
    parser.add_argument("--encoding", choices=["f32", "bf16"], default="f32", help="how numbers travel, and are summed")
    args = parser.parse_args()
    if args.turns and not args.in_cluster:
        parser.error("--turns needs --in-cluster")
    if args.in_cluster:
        rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # SystemExit, so that the ranks are ended too when the caller's deadline ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with tempfile.TemporaryDirectory() as folder:
        address = (pathlib.Path(folder) / "rendezvous").as_uri()
        # Forked after the import of torch: importing it once per rank takes longer than the measurement.
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=rank, args=(r, args.workers, address, args), daemon=True)
            for r in range(args.workers)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))


def rank(number, workers, address, args):
    """Runs one rank to its end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=workers, timeout=DEADLINE)

    def bind(buffer):
        values = torch.from_numpy(buffer)
        if args.encoding == "f32":
            return protocol.Bound(lambda: dist.all_reduce(values))
        # Numpy has no such type: it is filled and checked in float32.
        tensor = values.to(torch.bfloat16)
        return protocol.Bound(
            lambda: dist.all_reduce(tensor), lambda: tensor.copy_(values), lambda: values.copy_(tensor)
        )

    def gather(value):
        values = [None] * workers
        dist.all_gather_object(values, value)
        return values

    def share(value):
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    ranks = protocol.Ranks(number, workers, "tcp", dist.barrier, bind, gather, args.encoding)
    if args.turns:
        protocol.take_turns(ranks, args, share)
    else:
        protocol.measure(ranks, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
