"""Steps of VGG19/8 around checkpoints of `psd.save(..., wait=False)`, for `cargo xtask bench resume`.

One rank of a cluster, told by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. It prints one line of JSON: the seconds of
all steps, and of every checkpoint the seconds that `save` kept the training and the seconds until it was complete.
"""

import argparse
import json
import threading
import time

import torch
from torch.nn import functional as F

import poseidon.torch as psd
import torch_nets

RATE = 1e-4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", default="vgg", choices=torch_nets.NETS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--update", default="worker", choices=["worker", "server"])
    parser.add_argument("--slower", type=float, default=1.0, help="so many times as long, VGG19/8 sleeps")
    parser.add_argument("--checkpoint", help="where checkpoints go")
    parser.add_argument("--every", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    psd.init()
    torch.manual_seed(1)
    torch_nets.VirtualVgg.FORWARD *= args.slower
    torch_nets.VirtualVgg.BACKWARD *= args.slower
    net, x, y = torch_nets.NETS[args.net]()
    model = psd.DistributedDataParallel(net, update=args.update)
    rules = psd if args.update == "server" else torch.optim
    optimizer = rules.SGD(model.parameters(), lr=RATE, momentum=0.9)
    begun, made = [], []
    for step in range(1, args.steps + 1):
        begun.append(time.perf_counter())
        if args.checkpoint and step % args.every == 0:
            # Of the state before this step, so that this step and the ones after it show what it costs.
            made.append(Made(step, lambda: psd.save(
                args.checkpoint, model, optimizer, step=step - 1, keep=1, wait=False
            )))  # fmt: skip
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.synchronize()
    begun.append(time.perf_counter())
    checkpoints = [one.told() for one in made]
    steps = [after - before for before, after in zip(begun, begun[1:])]
    psd.shutdown()
    print(json.dumps({"steps": steps, "checkpoints": checkpoints}), flush=True)


class Made:
    """A checkpoint that is being made, and what was seen of it."""

    def __init__(self, step, save):
        self.step, asked = step, time.perf_counter()
        self.saving = save()
        self.returned = time.perf_counter()
        self.begin = self.returned - asked
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()

    def watch(self):
        self.saving.result()
        self.complete = time.perf_counter()

    def told(self):
        self.watcher.join()
        return {"step": self.step, "begin": self.begin, "writing": self.complete - self.returned}


if __name__ == "__main__":
    main()
