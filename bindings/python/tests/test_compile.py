"""Blocks compiled one by one train as they do uncompiled, and still hand out factors."""

import copy

import pytest
import torch
from cluster import run
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def compiled(wrapped_first):
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = nn.Sequential(Block(), Block(), nn.Linear(64, 10))
    net = copy.deepcopy(alone)
    ours = psd.DistributedDataParallel(net) if wrapped_first else None
    for block in net[:2]:
        # What is tested is how graphs are cut, so that no compiler is needed.
        block.compile(backend="aot_eager")
    ours = ours or psd.DistributedDataParallel(net)
    worst = 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4 * world, 64, generator=generator)
        y = torch.randint(0, 10, (4 * world,), generator=generator)
        mine = slice(4 * rank, 4 * rank + 4)
        for model, part in ((ours, mine), (alone, slice(None))):
            model.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
        for p, q in zip(ours.parameters(), alone.parameters()):
            worst = max(worst, ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item())
    schemes = {name: row[0] for name, _, *row in ours.sessions_plan()}
    psd.shutdown()
    return worst, schemes


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_compiled_blocks(wrapped_first):
    for worst, schemes in run(compiled, 2, wrapped_first=wrapped_first):
        assert worst < 1e-5
        assert schemes["0.up.weight"] == "sfb", schemes
