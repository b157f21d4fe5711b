"""Parameter groups, torch's arguments and unused parameters with update="server", beside torch's optimizers."""

import copy

import pytest
import torch
from cluster import run
from models import MODELS, Mlp, batches
from test_ddp import difference
from torch import nn
from torch.nn import functional as F

# By optimizer: the settings of weights, of biases and norms, and of the rest.
GROUPS = {
    "SGD": [dict(momentum=0.9, weight_decay=1e-2), dict(lr=0.02), dict(momentum=0.5, nesterov=True)],
    "Adam": [dict(weight_decay=1e-2), dict(lr=5e-4, betas=(0.8, 0.99)), dict(maximize=True)],
    "AdamW": [dict(weight_decay=0.1), dict(weight_decay=0.0), dict(lr=2e-3, eps=1e-3)],
}
DEFAULTS = {"SGD": dict(lr=0.05), "Adam": dict(lr=1e-3, eps=1e-4), "AdamW": dict(lr=1e-3, eps=1e-4)}


def grouped(net, optimizer):
    """What people do: decay for weights only, and other rates for the first parameters."""
    first, *rest = net.named_parameters()
    weights = [p for _, p in rest if p.dim() > 1]
    others = [p for _, p in rest if p.dim() < 2]
    parts = (weights, others, [first[1]])
    return [dict(params=part, **settings) for part, settings in zip(parts, GROUPS[optimizer]) if part]


def train(net, stepper, data, rank, size, schedule=None):
    device = next(net.parameters()).device
    for x, y in data:
        mine = slice(size * rank, size * rank + size)
        stepper.zero_grad()
        F.cross_entropy(net(x[mine].to(device)), y[mine].to(device)).backward()
        stepper.step()
        if schedule is not None:
            schedule.step()


def side_by_side(model, steps, device="cpu"):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank, world = psd.rank(), psd.world_size()
    data = list(batches(model, steps, 8 * world))
    results = []
    for name, defaults in DEFAULTS.items():
        torch.manual_seed(rank)
        stock = nn.parallel.DistributedDataParallel(MODELS[model]().to(device))
        start = copy.deepcopy(stock.module)

        def factors(epoch):
            return 0.9**epoch

        def fit(net, where):
            stepper = getattr(where, name)(grouped(net, name), **defaults)
            # Each group has a schedule of its own.
            by_group = [factors, lambda epoch: 1.0, factors][: len(stepper.param_groups)]
            schedule = torch.optim.lr_scheduler.LambdaLR(stepper, by_group)
            train(net, stepper, data, rank, 8, schedule)
            return stepper

        expected = fit(stock, torch.optim)
        for scheme in ("ps", "sfb"):
            ours = psd.DistributedDataParallel(copy.deepcopy(start), scheme=scheme, update="server")
            stepper = fit(ours, psd)
            ours.synchronize()
            assert {row[2] for row in ours.sessions_plan()} >= ({"sfb"} if model == "mlp" and scheme == "sfb" else {"ps"})
            state, torchs = stepper.state_dict(), expected.state_dict()
            assert state["state"].keys() == torchs["state"].keys()
            for mine, theirs in zip(state["param_groups"], torchs["param_groups"]):
                assert mine.pop("steps") == steps
                mine.pop("initial_lr"), theirs.pop("initial_lr")
                assert mine == theirs, f"{name}: {mine} and {theirs}"
            for index, entry in torchs["state"].items():
                assert entry.keys() == state["state"][index].keys()
                for key, value in entry.items():
                    ours_value = state["state"][index][key]
                    torch.testing.assert_close(ours_value, value.cpu(), rtol=1e-3, atol=1e-5, msg=f"{name} {key}")
            parameters = [p.detach().cpu().clone() for p in ours.parameters()]
            results.append(((name, scheme), difference(ours, stock), parameters))
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return results


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_groups_equal_torchs(model):
    check_sides(run(side_by_side, 3, timeout=300, model=model, steps=12))


def check_sides(ranks):
    for results in ranks:
        assert len(results) == 6
        for (way, worst, parameters), first in zip(results, ranks[0]):
            # Biases begin at zero and are still small; forgotten decay would be 1e-4 or more.
            assert worst < 3e-5, f"{way}: {worst}"
            assert all(torch.equal(a, b) for a, b in zip(parameters, first[2])), f"{way}: replicas differ"


def resumed(folder):
    """Training goes on from a checkpoint with groups, here and with torch's optimizer."""
    import poseidon.torch as psd

    psd.init()
    for optimizer in DEFAULTS:
        resume(psd, folder, optimizer)
    psd.shutdown()


def resume(psd, folder, optimizer):
    rank, world = psd.rank(), psd.world_size()
    data = list(batches("mlp", 6, 4 * world))

    def begin(seed, where, **settings):
        torch.manual_seed(seed)
        model = psd.DistributedDataParallel(Mlp(), scheme="sfb", deterministic=True, **settings)
        return model, getattr(where, optimizer)(grouped(model, optimizer), **DEFAULTS[optimizer])

    def values(model):
        return [p.detach().clone() for p in model.state_dict().values()]

    model, stepper = begin(0, psd, update="server")
    train(model, stepper, data[:3], rank, 4)
    psd.save(f"{folder}/{optimizer}", model, stepper, step=3)
    train(model, stepper, data[3:], rank, 4)
    expected = values(model)
    other, other_stepper = begin(1, psd, update="server")
    psd.load(f"{folder}/{optimizer}", other, other_stepper)
    train(other, other_stepper, data[3:], rank, 4)
    stock, stock_stepper = begin(2, torch.optim)
    psd.load(f"{folder}/{optimizer}", stock, stock_stepper)
    states = copy.deepcopy((stock.module.state_dict(), stock_stepper.state_dict()))
    train(stock, stock_stepper, data[3:], rank, 4)
    # And back: what torch's optimizer has goes on here.
    back, back_stepper = begin(3, psd, update="server")
    back.module.load_state_dict(states[0])
    back_stepper.load_state_dict(states[1])
    train(back, back_stepper, data[3:], rank, 4)
    for ours, again, theirs, returned in zip(expected, values(other), values(stock), values(back)):
        assert torch.equal(ours, again) and torch.equal(ours, returned)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_groups_resume_bit_by_bit(tmp_path):
    run(resumed, 2, folder=str(tmp_path))


def added():
    """Groups that are added before the first backward, as for fine-tuning, and those that come too late."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    start = Mlp()
    data = list(batches("mlp", 3, 4 * world))
    ours = psd.DistributedDataParallel(copy.deepcopy(start), update="server")
    stepper = psd.SGD(ours.module.layers[4].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="momentum=-1.0: expected 0 or more"):
        stepper.add_param_group(dict(params=ours.module.layers[0].parameters(), momentum=-1.0))
    with pytest.raises(ValueError, match="got others as well"):
        stepper.add_param_group(dict(params=nn.Linear(2, 2).parameters()))
    assert len(stepper.param_groups) == 1
    stepper.add_param_group(dict(params=ours.module.layers[:4].parameters(), lr=0.01, momentum=0.9))
    train(ours, stepper, data, rank, 4)
    with pytest.raises(RuntimeError, match="since the first backward: add parameter groups before it"):
        stepper.add_param_group(dict(params=nn.Linear(2, 2).parameters()))
    ours.synchronize()
    alone = start
    other = torch.optim.SGD(alone.layers[4].parameters(), lr=0.1)
    other.add_param_group(dict(params=alone.layers[:4].parameters(), lr=0.01, momentum=0.9))
    for x, y in data:
        other.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        other.step()
    assert difference(ours, alone) < 1e-5
    uneven(psd, "cpu")
    psd.shutdown()


def uneven_with_groups(device="cpu"):
    import poseidon.torch as psd

    psd.init()
    uneven(psd, device)
    psd.shutdown()


def uneven(psd, device):
    """Workers that are through take the others' steps, at the rates that the others' schedules give each group."""
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = Mlp().to(device)
    ours = psd.DistributedDataParallel(copy.deepcopy(alone), update="server", scheme="sfb")

    def rule(where, net):
        groups = [dict(params=net.layers[0].parameters(), momentum=0.9), dict(params=net.layers[2:].parameters(), lr=0.02)]
        stepper = where.SGD(groups, lr=0.1)
        return stepper, torch.optim.lr_scheduler.LambdaLR(stepper, [lambda epoch: 0.5**epoch, lambda epoch: 1.0])

    data = list(batches("mlp", 1 + world, 4 * world))
    stepper, schedule = rule(psd, ours.module)
    with ours.join():
        train(ours, stepper, data[: 2 + rank], rank, 4, schedule)
    stepper, schedule = rule(torch.optim, alone)
    for step, (x, y) in enumerate(data):
        stepper.zero_grad()
        for r in range(max(step - 1, 0), world):
            part = slice(4 * r, 4 * r + 4)
            (F.cross_entropy(alone(x[part].to(device)), y[part].to(device)) / world).backward()
        stepper.step()
        schedule.step()
    ours.synchronize()
    assert difference(ours, alone) < 1e-5


def test_groups_that_are_added():
    run(added, 2)


def test_three_workers_with_groups_and_different_numbers_of_batches():
    run(uneven_with_groups, 3)


def refused():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(2, 2), update="server")
    for settings in (dict(amsgrad=True), dict(capturable=True), dict(differentiable=True)):
        (name,) = settings
        with pytest.raises(ValueError, match=f"{name}=True: .*update=\"worker\""):
            psd.AdamW(model.parameters(), **settings)
        with pytest.raises(ValueError, match=f"{name}=True"):
            psd.Adam([dict(params=model.parameters(), **settings)])
    with pytest.raises(ValueError, match="differentiable=True"):
        psd.SGD(model.parameters(), differentiable=True)
    # One parameter is in no group.
    psd.SGD([model.module.weight])
    with pytest.raises(ValueError, match="bias missing; freeze them before the model is wrapped"):
        model(torch.ones(1, 2)).sum().backward()
    psd.shutdown()


def test_arguments_that_the_shards_cannot_follow():
    run(refused, 1)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_the_arguments_are_torchs(name):
    import inspect

    import poseidon.torch as psd

    ours = inspect.signature(getattr(psd, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    for argument, parameter in theirs.items():
        assert argument in ours, f"{name} does not take {argument}"
        assert ours[argument].default == parameter.default, argument
        assert ours[argument].kind == parameter.kind, argument


class Branches(nn.Module):
    """Some parameters are used in some steps, by some workers."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(20, 40)
        self.norm = nn.LayerNorm(40)
        self.sometimes = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(40))
        self.never = nn.Linear(40, 40)

    def forward(self, x, branch, scaled):
        x = self.norm(torch.tanh(self.used(x)))
        x = self.sometimes(x) if branch else x
        return x * self.scale if scaled else x


def unused(device="cpu"):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for scheme in ("ps", "sfb"):
        for optimizer in DEFAULTS:
            skip_unused(psd, scheme, optimizer, device)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def skip_unused(psd, scheme, optimizer, device):
    rank = psd.rank()
    settings = dict(weight_decay=0.1, **DEFAULTS[optimizer])
    if optimizer == "SGD":
        settings.update(momentum=0.9, dampening=0.5)
    torch.manual_seed(0)
    net = Branches().to(device)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    ours = psd.DistributedDataParallel(net, scheme=scheme, update="server", find_unused_parameters=True)
    pairs = [
        (ours, getattr(psd, optimizer)(ours.parameters(), **settings)),
        (stock, getattr(torch.optim, optimizer)(stock.parameters(), **settings)),
    ]
    for step in range(8):
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        # Everybody takes the branch, or rank 0 alone, or nobody, in turn; likewise for the scale, at other times.
        branch = [True, rank == 0, False, False][step % 4]
        scaled = [False, False, rank == 1, True, False][step % 5]
        for model, stepper in pairs:
            stepper.zero_grad()
            if step == 5:
                # What is used in a pass that does not synchronise is used.
                with model.no_sync():
                    model(x, True, False).square().mean().backward()
            model(x, branch, scaled).square().mean().backward()
            stepper.step()
    ours.synchronize()
    torch.testing.assert_close(list(ours.parameters()), list(stock.parameters()), rtol=1e-4, atol=1e-6)
    state, torchs = (stepper.state_dict()["state"] for _, stepper in pairs)
    assert state.keys() == torchs.keys()
    for index, entry in torchs.items():
        for key, value in entry.items():
            torch.testing.assert_close(state[index][key], value.cpu(), rtol=1e-3, atol=1e-6)
    # Steps that differ from parameter to parameter come back, too.
    pairs[0][1].load_state_dict(pairs[1][1].state_dict())
    x = torch.ones(5, 20, device=device) * (1 + rank)
    for model, stepper in pairs:
        stepper.zero_grad()
        model(x, True, True).square().mean().backward()
        stepper.step()
    ours.synchronize()
    torch.testing.assert_close(list(ours.parameters()), list(stock.parameters()), rtol=1e-4, atol=1e-6)


def test_what_nobody_uses_is_not_stepped():
    run(unused, 3)


def absent():
    """Between backward and step, with update="server": nothing can be done to gradients, and nobody is left in doubt."""
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(Mlp(), update="server", scheme="sfb")
    stepper = psd.SGD(model.parameters(), lr=0.1)
    x, y = next(batches("mlp", 1, 4))
    uses = {
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "log": lambda: [p.grad.norm() for p in model.parameters() if p.grad is not None],
        "scale": lambda: [p.grad.mul_(2.0) for p in model.parameters() if p.grad is not None],
        "data": lambda: [p.grad.data.mul_(2.0) for p in model.parameters() if p.grad is not None],
        "numpy": lambda: [p.grad.numpy() for p in model.parameters() if p.grad is not None],
        "unscale": lambda: unscaled(stepper),
    }
    for name, use in uses.items():
        stepper.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        assert "shards have" in repr(next(model.parameters()).grad)
        with pytest.raises(RuntimeError, match='the shards have the gradients.*update="worker"'):
            use()
        stepper.step()
        assert all(p.grad is None for p in model.parameters()), name
    with pytest.raises(RuntimeError, match="every step would have to wait"):
        model.clip_grad_norm_(1.0)
    # Loops that zero gradients after backward, or keep their memory, or never do it, go on.
    for forget in (stepper.zero_grad, lambda: stepper.zero_grad(set_to_none=False), lambda: None):
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()
        forget()
        stepper.step()
    psd.shutdown()


def unscaled(stepper):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(stepper)


def test_gradients_that_the_shards_have():
    run(absent, 2)
