"""A small VGG on CIFAR-10, or on made-up images of its size.

    python cifar_vgg.py                                            # made-up images, one worker
    torchrun --nproc-per-node 2 cifar_vgg.py --data DIR            # DIR with data_batch_1.bin and so on
    poseidon launch -n 2 -- python cifar_vgg.py --data DIR
    mpirun -n 2 python cifar_vgg.py --data DIR

Its fully connected layers hold most of the parameters. `--plan` prints how each would be sent.
`poseidon data fetch cifar10` downloads the data.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import poseidon.torch as psd


def cifar10(folder, files):
    """Records of CIFAR-10's binary version: a label, then 3 x 32 x 32 pixels."""
    raw = b"".join((folder / name).read_bytes() for name in files)
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 1 + 3 * 32 * 32)
    return TensorDataset(records[:, 1:].reshape(-1, 3, 32, 32).float() / 128 - 1, records[:, 0].long())


def made_up(count):
    """Images whose class is the brightest of ten stripes: something to learn, and nothing to download."""
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % 10
    for label in range(10):
        x[y == label, :, 3 * label : 3 * label + 3] += 1
    return TensorDataset(x, y)


class Vgg(nn.Module):
    def __init__(self, widths=((32,), (64,), (128, 128)), hidden=1024, classes=10):
        super().__init__()
        layers, below = [], 3
        for stage in widths:
            for width in stage:
                layers += [nn.Conv2d(below, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                below = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(below * 4 * 4, hidden), nn.ReLU(), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x):
        return self.classifier(self.features(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-10's binary version")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="end each epoch after so many steps")
    parser.add_argument("--batch", type=int, default=32, help="samples per worker")
    parser.add_argument("--plan", action="store_true", help="print how each parameter would be sent, and why")
    args = parser.parse_args()

    psd.init()
    if args.data:
        train = cifar10(args.data, [f"data_batch_{i}.bin" for i in range(1, 6)])
        test = cifar10(args.data, ["test_batch.bin"])
    else:
        train, test = made_up(2000), made_up(500)
    sampler = DistributedSampler(train, num_replicas=psd.world_size(), rank=psd.rank())
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    net = Vgg()
    if args.plan and psd.rank() == 0:
        print(psd.plan(net, args.batch), flush=True)
    model = psd.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(1, args.epochs + 1):
        start, total, steps = time.perf_counter(), 0.0, 0
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
            if steps == args.steps:
                break
        if psd.rank() == 0:
            seconds = time.perf_counter() - start
            model.eval()
            with torch.no_grad():
                hits = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, 250))
            print(f"epoch {epoch}: loss {total / steps:.3f}, accuracy {hits / len(test):.1%}, {seconds:.1f} s", flush=True)
    psd.shutdown()


if __name__ == "__main__":
    main()
