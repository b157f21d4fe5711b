"""How fast bytes go between the host's memory and the GPU's, each way and both at once.

`pinned` and `pageable` are torch's copies from and to memory that is pinned or not. `ours` is Poseidon's copier, if
this build of the package has one that can be timed: ``poseidon._native.copy_speed(direction, bytes)``, in bytes per
second, for the directions "to device", "to host" and "both". Prints a line of JSON for each direction.
"""

import argparse
import json
import time

import torch

from poseidon import _native

DIRECTIONS = ["to device", "to host", "both"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--copies", type=int, default=20)
    args = parser.parse_args()
    if args.device == "cpu":
        print(json.dumps({"skipped": "there is nothing to copy to without a GPU"}))
        return
    for direction in DIRECTIONS:
        speeds = {kind: torchs(direction, kind == "pinned", args) for kind in ("pinned", "pageable")}
        ours = _native.copy_speed(direction, args.bytes) if hasattr(_native, "copy_speed") else None
        print(json.dumps({"direction": direction, "bytes": args.bytes, **speeds, "ours": ours}), flush=True)


def torchs(direction, is_pinned, args):
    """Bytes per second of torch's copies; of both directions together if both go at once."""
    make = lambda: torch.empty(args.bytes, dtype=torch.uint8, pin_memory=is_pinned).fill_(1)
    device = lambda: torch.empty(args.bytes, dtype=torch.uint8, device="cuda").fill_(1)
    ways = []
    if direction != "to host":
        ways.append((device(), make(), torch.cuda.Stream()))
    if direction != "to device":
        ways.append((make(), device(), torch.cuda.Stream()))

    def copy(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            for into, source, stream in ways:
                with torch.cuda.stream(stream):
                    into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    copy(2)
    return args.copies * args.bytes * len(ways) / copy(args.copies)


if __name__ == "__main__":
    main()
