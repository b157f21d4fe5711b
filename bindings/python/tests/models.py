"""Small models of the kinds people train.

All smooth: where a ReLU or a maximum turns on the last bit, two exact runs part ways.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.avg_pool2d(F.gelu(self.norm(self.conv1(x))), 2)
        x = F.avg_pool2d(F.gelu(self.conv2(x)), 2)
        return self.fc2(F.gelu(self.fc1(x.flatten(1))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 256, bias=False), nn.GELU(), nn.Linear(256, 10)
        )

    def forward(self, x):
        return self.layers(x.flatten(1))


class Transformer(nn.Module):
    """The output projection is the embedding: one parameter, two uses."""

    def __init__(self, vocabulary=60, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.block(self.embedding(tokens) + self.position[: tokens.shape[1]])
        return self.head(hidden).mean(1)


MODELS = {"cnn": Cnn, "mlp": Mlp, "transformer": Transformer}


def batches(model, steps, size, seed=3):
    """``steps`` batches of ``size`` samples, the same on every worker."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        if model == "transformer":
            x = torch.randint(0, 60, (size, 16), generator=generator)
        else:
            x = torch.randn(size, 1, 28, 28, generator=generator)
        yield x, torch.randint(0, 10, (size,), generator=generator)
