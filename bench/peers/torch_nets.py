"""The nets of `cargo xtask bench torch` and `bench gpu`, each with a batch to train on.

A net's answer has a class per row, and its last dimension is the classes.
"""

import math
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 32


class VirtualVgg(nn.Module):
    """VGG19 at 1/8 of its size whose computing is slept, so that eight of them fit on two cores.

    Both dimensions of every layer are divided by sqrt(8): 18.0M parameters. Each layer sleeps its
    share, by operations, of 1/6 s forward and 1/3 s backward. Convolutions have weights and gradients
    but compute nothing; the Linear layers are torch's own, because their factors are exchanged, but
    their products are skipped.
    """

    FORWARD, BACKWARD = 1 / 6, 1 / 3
    STAGES = [(224, [64, 64]), (112, [128, 128]), (56, [256] * 4), (28, [512] * 4), (14, [512] * 4)]
    FC = [512 * 7 * 7, 4096, 4096, 1000]

    def __init__(self):
        super().__init__()
        scaled = lambda channels: round(channels / math.sqrt(8))
        self.work, convs, below = [], [], 3
        for side, channels in self.STAGES:
            for above in channels:
                convs.append(VirtualConv(below if below == 3 else scaled(below), scaled(above)))
                self.work.append(9 * below * above * side * side)
                below = above
        self.convs = nn.ModuleList(convs)
        self.fc = nn.ModuleList(nn.Linear(scaled(n), scaled(m)) for n, m in zip(self.FC, self.FC[1:]))
        self.work += [n * m for n, m in zip(self.FC, self.FC[1:])]
        self.features = torch.rand(BATCH, self.fc[0].in_features)
        self.no_products = NoProducts()

    def forward(self, x):
        share = [work / sum(self.work) for work in self.work]
        for conv, part in zip(self.convs, share):
            x = conv(x, self.FORWARD * part, self.BACKWARD * part)
        x = Flatten.apply(x, self.features)
        for fc, part in zip(self.fc, share[len(self.convs) :]):
            x = F.relu(fc(Pause.apply(x, self.FORWARD * part, self.BACKWARD * part)))
        return x


class VirtualConv(nn.Module):
    def __init__(self, below, above):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(above, below, 3, 3) * 0.01)
        self.bias = nn.Parameter(torch.zeros(above))
        self.gradients = (torch.randn_like(self.weight) * 1e-3, torch.randn_like(self.bias) * 1e-3)

    def forward(self, x, forward, backward):
        return _VirtualConv.apply(x, self.weight, self.bias, self.gradients, forward, backward)


class _VirtualConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gradients, forward, backward):
        ctx.gradients, ctx.backward = gradients, backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward)
        # A real backward makes new memory as well.
        weight, bias = (made.clone() for made in ctx.gradients)
        return gradient.clone(), weight, bias, None, None, None


class NoProducts:
    """While one is kept, a product of matrices is numbers of the right shape: the time it takes is slept already.

    Other kernels for two operators, because a dispatch mode would cost some 30 us of Python for each operator of every
    kind, and more of them the more a contender does.
    """

    def __init__(self):
        self.made = {}
        self.kernels = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for product in ("mm", "addmm"):
                self.kernels.impl(product, self.product, "CPU")

    def product(self, *args, **_):
        shape = args[-2].shape[0], args[-1].shape[1]
        if shape not in self.made:
            self.made[shape] = torch.randn(shape) * 1e-3
        # A real product makes new memory as well.
        return self.made[shape].clone()


class Pause(torch.autograd.Function):
    """Passes on what it gets, and takes its time."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward)
        return gradient, None, None


class Flatten(torch.autograd.Function):
    """From the slim tensor that passes through the convolutions to the features of the first Linear."""

    @staticmethod
    def forward(ctx, x, features):
        ctx.shape = x.shape
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(ctx.shape), None


def vgg():
    return VirtualVgg(), torch.rand(BATCH, 1), torch.arange(BATCH) % 10


def fc():
    """37.8M parameters, nearly all of them in three Linear layers."""
    net = nn.Sequential(
        nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip
    return net, torch.rand(BATCH, 3072), torch.arange(BATCH) % 10


def cnn():
    """CIFAR-10 quick, as in Caffe."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10),
    )  # fmt: skip
    return net, torch.rand(BATCH, 3, 32, 32), torch.arange(BATCH) % 10


class Transformer(nn.Module):
    """Its Linear layers see more rows (batch x length) than they have outputs or inputs to save by."""

    def __init__(self, vocabulary=2000, width=256, length=128, blocks=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens) + self.position)).mean(1)


def transformer():
    return Transformer(), torch.randint(0, 2000, (4, 128)), torch.arange(4) % 10


def deep():
    """Many small parameters: what a contender does for each of them shows."""
    width = 64
    blocks = ([nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()] for _ in range(100))
    return nn.Sequential(*(module for block in blocks for module in block)), torch.rand(8, width), torch.arange(8) % 10


class WithoutComputing(nn.Module):
    """Parameters of these shapes, and nothing that is computed with them: what synchronising them takes shows."""

    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x):
        for layer in self.layers:
            x = _Touch.apply(x, layer)
        return x


class _Touch(torch.autograd.Function):
    """Passes on what it gets. The layer's gradient is the same number everywhere."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.like = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full_like(ctx.like, 1e-3)


def convnext_layers():
    """The shapes of ConvNeXt-Tiny: 28.6M parameters in 182 tensors, small and large ones in turn."""
    widths, depths = [96, 192, 384, 768], [3, 3, 9, 3]
    shapes = [(96, 3, 4, 4), (96,), (96,), (96,)]
    for stage, (width, depth) in enumerate(zip(widths, depths)):
        if stage > 0:
            below = widths[stage - 1]
            shapes += [(below,), (below,), (width, below, 2, 2), (width,)]
        block = [(width, 1, 1), (width, 1, 7, 7), (width,), (width,), (width,)]
        shapes += depth * [*block, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes += [(768,), (768,), (1000, 768), (1000,)]
    return WithoutComputing(shapes), torch.zeros(1, 2, requires_grad=True), torch.zeros(1, dtype=torch.int64)


def images(net, batch):
    return net, torch.rand(batch, 3, 224, 224), torch.arange(batch) % 1000


def resnet50():
    from torchvision import models

    return images(models.resnet50(), 32)


def convnext_tiny():
    from torchvision import models

    return images(models.convnext_tiny(), 16)


def vgg19():
    from torchvision import models

    return images(models.vgg19(), 32)


class Gpt2(nn.Module):
    """GPT-2 with 124M parameters and random weights: nothing is downloaded. It answers with logits alone."""

    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.lm = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))

    def forward(self, tokens):
        return self.lm(input_ids=tokens).logits


def gpt2():
    net = Gpt2()
    tokens = torch.randint(0, net.lm.config.vocab_size, (4, 257))
    return net, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def tiny():
    """So small that everything about it can be tried on a CPU. Its first Linear layer goes by factors."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip
    return net, torch.rand(8, 3, 32, 32), torch.arange(8) % 10


NETS = {"vgg": vgg, "fc": fc, "cnn": cnn, "transformer": transformer, "deep": deep, "tiny": tiny,
        "convnext-layers": convnext_layers}  # fmt: skip
# As people train them, on a GPU.
NETS.update(resnet50=resnet50, convnext_tiny=convnext_tiny, vgg19=vgg19, gpt2=gpt2)


def loss(net, x, y):
    """The mean over all rows."""
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())
