"""Makes the model zoo, *.json beside this file: the layers of well-known nets, their shapes, parameters and FLOPs.

Needs torch and torchvision. The nets that the papers trained in Caffe, and the transformers, are defined here;
the others are torchvision's. How a net is traced is in the Python package (poseidon/describe.py), which is what
`poseidon plan --torch` uses for nets of users.
"""

import pathlib
import sys
import types
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

HERE = pathlib.Path(__file__).resolve().parent
# Only the tracing is wanted, not the native module that importing the package would load.
package = types.ModuleType("poseidon")
package.__path__ = [str(HERE.parents[2] / "bindings/python/python/poseidon")]
sys.modules["poseidon"] = package
from poseidon.describe import describe, dumps  # noqa: E402


def cifar10_quick():
    """Caffe's cifar10_quick, as crates/nn/models/cifar10-quick.toml has it. Caffe rounds the sizes of pooling up."""
    pool = lambda kind: kind(3, 2, ceil_mode=True)  # noqa: E731
    return nn.Sequential(
        OrderedDict(conv1=nn.Conv2d(3, 32, 5, padding=2), pool1=pool(nn.MaxPool2d), relu1=nn.ReLU(),
              conv2=nn.Conv2d(32, 32, 5, padding=2), relu2=nn.ReLU(), pool2=pool(nn.AvgPool2d),
              conv3=nn.Conv2d(32, 64, 5, padding=2), relu3=nn.ReLU(), pool3=pool(nn.AvgPool2d),
              flatten=nn.Flatten(), ip1=nn.Linear(1024, 64), ip2=nn.Linear(64, 10)))


def alexnet():
    """Caffe's bvlc_alexnet, in two groups as it was on two GPUs; torchvision's is the later variant without them."""
    lrn = lambda: nn.LocalResponseNorm(5)  # noqa: E731
    pool = lambda: nn.MaxPool2d(3, 2)  # noqa: E731
    return nn.Sequential(
        OrderedDict(conv1=nn.Conv2d(3, 96, 11, 4), relu1=nn.ReLU(), norm1=lrn(), pool1=pool(),
              conv2=nn.Conv2d(96, 256, 5, padding=2, groups=2), relu2=nn.ReLU(), norm2=lrn(), pool2=pool(),
              conv3=nn.Conv2d(256, 384, 3, padding=1), relu3=nn.ReLU(),
              conv4=nn.Conv2d(384, 384, 3, padding=1, groups=2), relu4=nn.ReLU(),
              conv5=nn.Conv2d(384, 256, 3, padding=1, groups=2), relu5=nn.ReLU(), pool5=pool(),
              flatten=nn.Flatten(), fc6=nn.Linear(9216, 4096), relu6=nn.ReLU(),
              fc7=nn.Linear(4096, 4096), relu7=nn.ReLU(), fc8=nn.Linear(4096, 1000)))


class Inception(nn.Module):
    def __init__(self, inputs, c1, c3r, c3, c5r, c5, proj):
        super().__init__()
        self.c1 = nn.Conv2d(inputs, c1, 1)
        self.c3_reduce, self.c3 = nn.Conv2d(inputs, c3r, 1), nn.Conv2d(c3r, c3, 3, padding=1)
        self.c5_reduce, self.c5 = nn.Conv2d(inputs, c5r, 1), nn.Conv2d(c5r, c5, 5, padding=2)
        self.pool_proj = nn.Conv2d(inputs, proj, 1)

    def forward(self, x):
        pooled = F.max_pool2d(x, 3, 1, 1)
        return torch.cat([self.c1(x), self.c3(self.c3_reduce(x)), self.c5(self.c5_reduce(x)), self.pool_proj(pooled)], 1)


def googlenet():
    """Caffe's bvlc_googlenet without the two auxiliary classifiers: Poseidon 2017 §5.2 counts one fully connected
    layer. torchvision's has 3x3 kernels for the 5x5 ones, and batch norms."""
    pool = lambda: nn.MaxPool2d(3, 2, ceil_mode=True)  # noqa: E731
    return nn.Sequential(
        OrderedDict(conv1=nn.Conv2d(3, 64, 7, 2, 3), pool1=pool(), conv2_reduce=nn.Conv2d(64, 64, 1),
              conv2=nn.Conv2d(64, 192, 3, padding=1), pool2=pool(),
              inception_3a=Inception(192, 64, 96, 128, 16, 32, 32),
              inception_3b=Inception(256, 128, 128, 192, 32, 96, 64), pool3=pool(),
              inception_4a=Inception(480, 192, 96, 208, 16, 48, 64),
              inception_4b=Inception(512, 160, 112, 224, 24, 64, 64),
              inception_4c=Inception(512, 128, 128, 256, 24, 64, 64),
              inception_4d=Inception(512, 112, 144, 288, 32, 64, 64),
              inception_4e=Inception(528, 256, 160, 320, 32, 128, 128), pool4=pool(),
              inception_5a=Inception(832, 256, 160, 320, 32, 128, 128),
              inception_5b=Inception(832, 384, 192, 384, 48, 128, 128),
              pool5=nn.AvgPool2d(7), flatten=nn.Flatten(), classifier=nn.Linear(1024, 1000)))


class Attention(nn.Module):
    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads = heads
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.query(x), self.key(x), self.value(x))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        # Neither the mask nor the order of norms changes what is computed or sent.
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads, fused):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, fused), nn.LayerNorm(width)
        self.up, self.down, self.norm2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """The encoder with its pooler, as `bert-base-uncased`; no head for a task."""

    def __init__(self, width=768, vocabulary=30522, positions=512, layers=12):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width, 12, False) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.norm(self.words(tokens) + self.positions(place) + self.segments(torch.zeros_like(tokens)))
        for layer in self.layers:
            x = layer(x)
        return self.pooler(x[:, 0]).tanh()


class Gpt2(nn.Module):
    """The small GPT-2; its last product uses the token table again, whose gradient is therefore dense."""

    def __init__(self, width=768, vocabulary=50257, positions=1024, layers=12):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Block(width, 12, True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(place)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.t()


def vision(make, **options):
    return lambda: make(weights=None, **options)


IMAGE = (3, 224, 224)
ZOO = {
    "cifar10-quick": (cifar10_quick, (3, 32, 32)),
    "alexnet": (alexnet, (3, 227, 227)),
    "googlenet": (googlenet, IMAGE),
    # With the auxiliary classifier, which is trained too: the paper's 27M.
    "inception-v3": (vision(models.inception_v3, init_weights=False), (3, 299, 299)),
    "vgg16": (vision(models.vgg16), IMAGE),
    "vgg19": (vision(models.vgg19), IMAGE),
    "vgg19-22k": (vision(models.vgg19, num_classes=21841), IMAGE),
    "resnet50": (vision(models.resnet50), IMAGE),
    "resnet152": (vision(models.resnet152), IMAGE),
    "resnext50": (vision(models.resnext50_32x4d), IMAGE),
    "bert-base": (Bert, (128,)),
    "gpt2-small": (Gpt2, (1024,)),
}


def main():
    for name, (make, shape) in ZOO.items():
        with torch.device("meta"):
            model = make()
            kind = torch.int64 if len(shape) == 1 else torch.float32
            described = describe(model, name, (torch.zeros((2, *shape), dtype=kind),))
        total = sum(layer["parameters"] for layer in described["layers"])
        assert total == sum(p.numel() for p in model.parameters()), name
        flops = sum(layer["forward_flops"] for layer in described["layers"])
        (HERE / f"{name}.json").write_text(dumps(described))
        print(f"{name:14} {len(described['layers']):4} layers {total:12,} parameters {flops / 1e9:8.2f} GFLOP forward")


if __name__ == "__main__":
    main()
