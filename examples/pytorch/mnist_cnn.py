"""A small CNN on the Fashion-MNIST images that come with this repository.

    python mnist_cnn.py                                  # one worker
    torchrun --nproc-per-node 2 mnist_cnn.py             # two, as with any launcher:
    poseidon launch -n 2 -- python mnist_cnn.py
    mpirun -n 2 python mnist_cnn.py
"""

import argparse
import gzip
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import poseidon.torch as psd

DATA = Path(__file__).resolve().parents[2] / "crates/nn/data/fashion-mnist-mini"


def images(folder, split):
    """A split of a data set in MNIST's format: gzipped IDX files."""
    read = lambda name, header: torch.frombuffer(
        bytearray(gzip.decompress((folder / f"{split}-{name}-ubyte.gz").read_bytes())[header:]), dtype=torch.uint8
    )
    pixels, labels = read("images-idx3", 16), read("labels-idx1", 8)
    return TensorDataset(pixels.view(-1, 1, 28, 28).float() / 255 - 0.5, labels.long())


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="a folder with MNIST's four files, gzipped")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="end each epoch after so many steps")
    parser.add_argument("--batch", type=int, default=32, help="samples per worker")
    args = parser.parse_args()

    psd.init()
    train, test = images(args.data, "train"), images(args.data, "t10k")
    sampler = DistributedSampler(train, num_replicas=psd.world_size(), rank=psd.rank())
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)

    torch.manual_seed(1)
    model = psd.DistributedDataParallel(cnn())
    # A larger batch in all, a larger rate.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * psd.world_size(), momentum=0.9)
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
                x, y = test.tensors
                accuracy = (model(x).argmax(1) == y).float().mean().item()
            print(f"epoch {epoch}: loss {total / steps:.3f}, accuracy {accuracy:.1%}, {seconds:.1f} s", flush=True)
    psd.shutdown()


if __name__ == "__main__":
    main()
