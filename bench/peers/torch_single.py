"""What poseidon.torch costs a single process: it and plain PyTorch train the same net in turns.

Both are in this one process, so whatever else the machine does falls on both alike. Each pair of turns gives a
ratio of their speeds; the median of these is the answer, with the interval it lies in with 95% confidence.
Prints one JSON object.
"""

import argparse
import copy
import json
import time

import torch

import poseidon.torch as psd
import torch_nets

WARM_UP = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=torch_nets.NETS, required=True)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of turns to measure")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Both train copies of one net: cuDNN tries its algorithms once for both.
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    with torch.device(args.device):
        net, x, y = torch_nets.NETS[args.net]()
    psd.init()
    nets = {"plain": copy.deepcopy(net), "poseidon": psd.DistributedDataParallel(net)}
    turns = {name: turn(net, x, y, args) for name, net in nets.items()}
    pairs = []
    for pair in range(WARM_UP + args.pairs):
        # Every other pair in the other order: being first falls on both alike.
        order = ["plain", "poseidon"] if pair % 2 else ["poseidon", "plain"]
        seconds = {name: turns[name]() for name in order}
        if pair >= WARM_UP:
            pairs.append(seconds)
    psd.shutdown()
    middle, low, high = median([pair["plain"] / pair["poseidon"] for pair in pairs])
    samples = len(x) * args.steps
    print(
        json.dumps(
            {
                "net": args.net,
                "batch": len(x),
                "pairs": args.pairs,
                "steps_per_turn": args.steps,
                "samples_per_second": {
                    name: samples / median([pair[name] for pair in pairs])[0] for name in nets
                },
                "ratio": {"median": middle, "low": low, "high": high},
                "turns": [{name: round(s, 6) for name, s in pair.items()} for pair in pairs],
            }
        )
    )


def turn(net, x, y, args):
    """A function that trains for some steps and returns the seconds they took, until the device was done."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def take():
        start = time.perf_counter()
        for _ in range(args.steps):
            optimizer.zero_grad()
            torch_nets.loss(net, x, y).backward()
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return take


def median(values):
    """The median, and the values as far from the middle as heads are from half in as many throws of a coin."""
    values = sorted(values)
    last = len(values) - 1
    reach = 0.98 * len(values) ** 0.5
    at = lambda position: values[min(max(round(position), 0), last)]
    return (values[last // 2] + values[len(values) // 2]) / 2, at(last / 2 - reach), at(last / 2 + reach)


if __name__ == "__main__":
    main()
