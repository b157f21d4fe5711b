"""What comes out equals what torch's own DistributedDataParallel over Gloo gives."""

import copy
import os

import pytest
import torch
from cluster import attempt, run
from models import MODELS, Mlp, batches
from torch import nn
from torch.nn import functional as F

# With the usual eps of 1e-8 a gradient of nearly zero moves a parameter as far as any other, and its
# sign is rounding.
OPTIMIZERS = {
    "SGD": dict(lr=0.05, momentum=0.9, weight_decay=1e-4),
    "AdamW": dict(lr=1e-3, eps=1e-4),
}
SCHEMES = ["ps", "sfb", "auto"]
UPDATES = ["worker", "server"]


def difference(a, b):
    """The largest difference of two sets of parameters, relative to the largest value of each."""
    worst = 0.0
    for x, y in zip(a.parameters(), b.parameters()):
        worst = max(worst, ((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item())
    return worst


def train_side_by_side(model, steps):
    """Trains on Gloo once with each optimizer, and on Poseidon in every way there is."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank, world = psd.rank(), psd.world_size()

    def train(net, stepper):
        for x, y in batches(model, steps, 8 * world):
            mine = slice(8 * rank, 8 * rank + 8)
            stepper.zero_grad()
            F.cross_entropy(net(x[mine]), y[mine]).backward()
            stepper.step()

    results = []
    for name, settings in OPTIMIZERS.items():
        torch.manual_seed(rank)  # as rank 0 begins, so do all
        stock = nn.parallel.DistributedDataParallel(MODELS[model]())
        start = copy.deepcopy(stock.module)
        train(stock, getattr(torch.optim, name)(stock.parameters(), **settings))
        for update in UPDATES:
            for scheme in SCHEMES:
                ours = psd.DistributedDataParallel(copy.deepcopy(start), scheme=scheme, update=update)
                where = psd if update == "server" else torch.optim
                train(ours, getattr(where, name)(ours.parameters(), **settings))
                assert list(ours.state_dict()) == list(stock.state_dict())
                schemes = {row[2] for row in ours.sessions_plan()}
                parameters = [p.detach().clone() for p in ours.parameters()]
                results.append(((name, update, scheme), difference(ours, stock), schemes, parameters))
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return results


@pytest.mark.parametrize("model", ["cnn", "mlp", "transformer"])
def test_parameters_equal_stock_ddp_after_50_steps(model):
    ranks = run(train_side_by_side, 4, timeout=300, model=model, steps=50)
    for results in ranks:
        assert len(results) == len(OPTIMIZERS) * len(SCHEMES) * len(UPDATES)
        for (way, worst, schemes, parameters), first in zip(results, ranks[0]):
            assert worst < 1e-5, f"{way}: {worst} with {schemes}"
            for mine, theirs in zip(parameters, first[3]):
                assert torch.equal(mine, theirs), f"{way}: replicas differ"
            if model == "mlp":
                assert schemes == {"ps": {"ps"}, "sfb": {"sfb"}, "auto": {"ps", "sfb"}}[way[2]]


def accumulate(scheme):
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = Mlp()
    ours = psd.DistributedDataParallel(copy.deepcopy(alone), scheme=scheme)
    worst = 0.0
    data = batches("mlp", 6, 4 * world)
    for _ in range(2):
        for net in (ours, alone):
            net.zero_grad()
        for micro in range(3):
            x, y = next(data)
            mine = slice(4 * rank, 4 * rank + 4)
            if micro < 2:
                with ours.no_sync():
                    F.cross_entropy(ours(x[mine]), y[mine]).backward()
            else:
                F.cross_entropy(ours(x[mine]), y[mine]).backward()
            F.cross_entropy(alone(x), y).backward()
        for p, q in zip(ours.parameters(), alone.parameters()):
            worst = max(worst, ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item())
    psd.shutdown()
    return worst


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_no_sync_accumulates_until_the_next_backward(scheme):
    assert max(run(accumulate, 3, scheme=scheme)) < 1e-5


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(20, 40)
        self.sometimes = nn.Linear(40, 40)
        self.never = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 40)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(40, 40)

    def forward(self, x, branch):
        x = self.frozen(torch.relu(self.used(x)))
        x = self.twice(torch.relu(self.twice(x)))
        return self.sometimes(x) if branch else x


def branches(scheme, find):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank = psd.rank()
    torch.manual_seed(0)
    net = Branches()
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=True)
    ours = psd.DistributedDataParallel(net, scheme=scheme, find_unused_parameters=find)
    for step in range(4):
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        for model in (ours, stock):
            model.zero_grad()
            # In step 2 only rank 0 takes the branch, in step 3 nobody.
            model(x, step < 2 or (step == 2 and rank == 0)).square().mean().backward()
        for (name, p), q in zip(net.named_parameters(), stock.parameters()):
            if q.grad is None:
                assert p.grad is None, f"{name} has a gradient in step {step}"
                continue
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=f"{name} in step {step}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_unused_frozen_and_repeated_layers(scheme):
    run(branches, 3, scheme=scheme, find=True)


def test_unused_parameters_are_named():
    ended = attempt(branches, 2, scheme="ps", find=False)
    assert all(status != 0 for status, _, _ in ended)
    errors = "".join(errors for _, _, errors in ended)
    assert "never.weight" in errors and "find_unused_parameters=True" in errors


def half(dtype):
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = Mlp().to(dtype)
    ours = psd.DistributedDataParallel(copy.deepcopy(alone))
    (x, y) = next(batches("mlp", 1, 4 * world))
    x = x.to(dtype)
    F.cross_entropy(ours(x[4 * rank : 4 * rank + 4]).float(), y[4 * rank : 4 * rank + 4]).backward()
    F.cross_entropy(alone(x).float(), y).backward()
    worst = 0.0
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert p.grad.dtype == dtype
        worst = max(worst, ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item())
    psd.shutdown()
    return worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(dtype):
    assert max(run(half, 2, dtype=dtype)) < 0.03


def autocast():
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank = psd.rank()
    torch.manual_seed(0)
    net = Mlp()
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ours = psd.DistributedDataParallel(net)
    x, y = next(batches("mlp", 1, 8))
    mine = slice(4 * rank, 4 * rank + 4)
    for model in (ours, stock):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
    for p, q in zip(ours.parameters(), stock.parameters()):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-4)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_autocast():
    run(autocast, 2)


def two_models():
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(psd.rank())
    first = psd.DistributedDataParallel(nn.Linear(30, 20))
    second = psd.DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)))
    for step in range(3):
        x = torch.randn(6, 30, generator=torch.Generator().manual_seed(step * 7 + psd.rank()))
        (second(first(x)) - x).square().mean().backward()
    values = [p.grad.clone() for m in (first, second) for p in m.parameters()]
    values += [b.clone() for b in second.buffers()]
    psd.barrier()
    psd.shutdown()
    return values


def test_several_models_and_their_buffers():
    results = run(two_models, 3)
    for mine in results[1:]:
        # Buffers are rank 0's before each forward; what the last forward added is each worker's own.
        for a, b in zip(mine[:4], results[0][:4]):
            assert torch.equal(a, b)


def die(how):
    import poseidon
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(8, 8))
    for step in range(3):
        if step == 2 and psd.rank() == 1:
            if how == "exit":
                os._exit(7)
            raise ValueError("out of luck")
        try:
            model(torch.ones(2, 8)).sum().backward()
        except poseidon.PoseidonError as error:
            return type(error).__name__, error.node, str(error)
    return None


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_worker_that_dies_is_named(how):
    ended = attempt(die, 3, how=how, environment={"POSEIDON_TIMEOUT": "10"})
    assert ended[1][0] != 0
    for rank in (0, 2):
        name, node, words = ended[rank][1]
        assert name in ("LostError", "AbortedError") and "worker" in node, words


def test_a_job_of_one_worker_needs_no_launcher():
    (loss,) = run(alone, 1)
    assert loss < 1.0


def alone():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        loss = (model(torch.eye(4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    psd.shutdown()
    return loss.item()
