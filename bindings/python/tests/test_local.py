"""Steps that a worker takes on its GPU, here with tensors of the CPU: those of layers by factors with update="server"."""

import copy

import pytest
import torch
from cluster import run
from models import Mlp, batches
from torch import nn
from torch.nn import functional as F

SETTINGS = {
    "SGD": [dict(momentum=0.9, dampening=0.1, weight_decay=0.1), dict(momentum=0.9, nesterov=True, maximize=True)],
    "Adam": [dict(weight_decay=0.1, betas=(0.8, 0.99)), dict(weight_decay=0.1, decoupled_weight_decay=True, eps=1e-3)],
    "AdamW": [dict(weight_decay=0.1), dict(maximize=True)],
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_steps_are_torchs(name):
    from poseidon.torch._local import LocalRule

    for settings in SETTINGS[name]:
        torch.manual_seed(0)
        theirs = nn.Parameter(torch.randn(50))
        optimizer = getattr(torch.optim, name)([theirs], lr=0.125, **settings)
        # What schedulers and programs put into a group is no setting of a rule.
        group = dict(optimizer.param_groups[0], name="head", initial_lr=0.1, max_lr=1.0, min_lr=0.0, steps=3)
        values = theirs.detach().clone()
        rule = LocalRule(group, ("momentum_buffer",) if name == "SGD" else ("exp_avg", "exp_avg_sq"), values)
        for rate in (0.125, 0.25, 0.5):
            gradient = torch.randn(50)
            rule.rate = optimizer.param_groups[0]["lr"] = rate
            theirs.grad = gradient.clone()
            rule.step(gradient)
            optimizer.step()
        torch.testing.assert_close(values, theirs.detach(), msg=f"{name} {settings}")


def loaded():
    """By the optimizer: the decay after the state of another kind was loaded."""
    import poseidon.torch as psd

    psd.init()
    kinds = {}
    for mine, theirs in ((psd.Adam, torch.optim.AdamW), (psd.AdamW, torch.optim.Adam)):
        model = psd.DistributedDataParallel(nn.Linear(12, 16), update="server", scheme="sfb")
        optimizer = mine(model.parameters(), weight_decay=0.1)
        other = theirs(nn.Linear(12, 16).parameters(), weight_decay=0.1)
        optimizer.load_state_dict(other.state_dict())
        model(torch.ones(3, 12)).sum().backward()
        optimizer.step()
        model.synchronize()
        (unit,) = [unit for unit in model._units if unit.members]
        kinds[mine.__name__] = type(optimizer.local(unit)._optimizer).__name__
        model.close()
    psd.shutdown()
    return kinds


def test_decay_is_what_was_loaded():
    for kinds in run(loaded, 1):
        assert kinds == {"Adam": "AdamW", "AdamW": "Adam"}


class Rates:
    """In the place of a rule: notes the rates it is given."""

    def __init__(self, unit):
        self.unit = unit
        self.seen = []

    @property
    def rate(self):
        return self.seen[-1]

    @rate.setter
    def rate(self, rate):
        self.seen.append(rate)


def joined():
    """The learning rates of layers by factors, step by step, on a worker with fewer batches than the others."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    model = psd.DistributedDataParallel(Mlp(), update="server", scheme="sfb")
    groups = [dict(params=model.module.layers[0].parameters()), dict(params=model.module.layers[2:].parameters(), lr=2.0)]
    stepper = psd.SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, [lambda epoch: 0.5**epoch, lambda epoch: 0.25**epoch])
    local = []
    with model.join():
        for x, y in list(batches("mlp", 2 + 2 * rank, 4 * world)):
            stepper.zero_grad()
            F.cross_entropy(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
            stepper.step()
            schedule.step()
            if not local:
                local = [Rates(unit) for unit in model._units if unit.fc is not None]
                for rates in local:
                    rates.unit.local = rates
    model.synchronize()
    seen = {rates.unit.name: rates.seen for rates in local}
    for rates in local:
        rates.unit.local = None
    psd.shutdown()
    return copy.deepcopy(seen)


def test_a_worker_that_is_through_steps_at_the_rates_of_those_that_train():
    # The first step was taken before the rates are noted.
    first, rest = [0.5**step for step in (1, 2, 3)], [2.0 * 0.25**step for step in (1, 2, 3)]
    for seen in run(joined, 2):
        assert seen == {"layers.0.weight": first, "layers.2.weight": rest, "layers.4.weight": rest}
