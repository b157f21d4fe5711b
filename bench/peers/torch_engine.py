"""Images per second of PyTorch's forward and backward on one thread, without an optimizer.

The peer of `cargo run --release -p poseidon-nn --example speed`: the same nets, batch and measure.
"""

import argparse
import time

import torch
from torch import nn


def cifar10_quick():
    # PyTorch's average pooling divides clipped windows as Caffe does here: there is no padding.
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10),
    )  # fmt: skip


def alexnet_small():
    norm = lambda: nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)
    pool = lambda: nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), norm(), pool(),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), norm(), pool(),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(),
        nn.Conv2d(128, 96, 3, padding=1), nn.ReLU(), pool(), nn.Flatten(),
        nn.Linear(1536, 2048), nn.ReLU(), nn.Dropout(),
        nn.Linear(2048, 2048), nn.ReLU(), nn.Dropout(), nn.Linear(2048, 10),
    )  # fmt: skip


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def fashion_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


NETS = {
    "cifar10-quick": (cifar10_quick, (3, 32, 32)),
    "alexnet-small": (alexnet_small, (3, 32, 32)),
    "lenet": (lenet, (1, 28, 28)),
    "mlp": (mlp, (1, 28, 28)),
    "fashion-cnn": (fashion_cnn, (1, 28, 28)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="cifar10-quick", choices=NETS)
    parser.add_argument("batch", nargs="?", type=int, default=100)
    parser.add_argument("seconds", nargs="?", type=float, default=3.0)
    parser.add_argument("--channels-last", action="store_true", help="images and weights in NHWC")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    build, shape = NETS[args.model]
    net, images = build(), torch.rand(args.batch, *shape) * 2 - 1
    if args.channels_last:
        net = net.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(args.batch) % 10
    steps, end = [], None
    # The first steps choose algorithms and bring caches into their usual state and do not count.
    while end is None or time.perf_counter() < end:
        if len(steps) == 3 and end is None:
            steps, end = [], time.perf_counter() + args.seconds
        start = time.perf_counter()
        net.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(images), labels).backward()
        steps.append(time.perf_counter() - start)
    steps.sort()
    median, best = args.batch / steps[len(steps) // 2], args.batch / steps[0]
    print(f"torch {args.model}: batch {args.batch}, {len(steps)} steps, median {median:.0f} images/s, best {best:.0f}")


if __name__ == "__main__":
    main()
