"""Models are copied, saved whole, wrapped again and let go of as with torch's own wrapper."""

import copy
import io

import pytest
import torch
from cluster import run
from torch import nn

UPDATES = ["worker", "server"]


def wrapped(psd, module, update="worker", **settings):
    """A model, and the optimizer that belongs to its way of updating."""
    model = psd.DistributedDataParallel(module, update=update, **settings)
    return model, (psd if update == "server" else torch.optim).SGD(model.parameters(), lr=0.1)


def step(model, optimizer, seed, width=20):
    optimizer.zero_grad()
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


def small():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Sequential(nn.Linear(30, 10)))


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    assert b"poseidon" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_plain(module):
    new = small()
    for got, expected in zip(module.modules(), new.modules()):
        assert got.__dict__.keys() == expected.__dict__.keys()
        assert not got._forward_pre_hooks and not got._state_dict_pre_hooks


def copies_of_modules(update):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(psd.rank())
    model, optimizer = wrapped(psd, small(), update, scheme="sfb")
    for s in range(2):
        step(model, optimizer, 10 * s + psd.rank())
    # With update="server" the last step's parameters are still on their way.
    copies = [copy.deepcopy(model.module), copy.deepcopy(model.module[2])]
    step(model, optimizer, 20 + psd.rank())
    copies.append(saved_and_loaded(model.module))
    assert_plain(copies[0])
    assert_plain(copies[2])
    model.synchronize()
    for mine, saved in zip(model.parameters(), copies[2].parameters()):
        assert torch.equal(mine, saved)
    # They are nobody's: what they learn stays here, and the model goes on.
    if psd.rank() == 0:
        copies[0](torch.ones(1, 20)).sum().backward()
    step(model, optimizer, 30 + psd.rank())
    again, optimizer = wrapped(psd, copies[2], update, scheme="sfb")
    step(again, optimizer, 40 + psd.rank())
    assert {row[2] for row in again.sessions_plan()} == {"sfb"}
    again.synchronize()
    values = [p.detach().clone() for m in (copies[0], copies[1], again) for p in m.parameters()]
    psd.shutdown()
    return values


@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_of_a_module_is_a_plain_module(update):
    first, second = run(copies_of_modules, 2, update=update)
    for mine, theirs in zip(first, second):
        assert torch.equal(mine, theirs)
