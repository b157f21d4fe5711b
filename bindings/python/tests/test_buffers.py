"""Buffers are rank 0's when torch's DistributedDataParallel makes them so, bit by bit."""

import copy
import os

import pytest
import torch
from cluster import attempt, run
from torch import nn


class Counters(nn.Module):
    """Buffers of several types, which every forward changes, on each rank in another way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("large", torch.tensor(1e8, dtype=torch.float64))
        self.register_buffer("whole", torch.zeros(3, dtype=torch.long))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("odd", torch.tensor([-0.0, float("nan"), float("inf")]))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x):
        rank = int(os.environ["RANK"])
        self.large += 1 + rank
        self.whole += 1 + rank
        self.flags[rank] ^= True
        self.odd = self.odd.roll(1 + rank)
        self.cache = torch.full((len(self.cache) + 1,), float(rank))  # grows, as the caches of rotary embeddings do
        return self.norm(self.linear(x))


def side_by_side(update):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(psd.rank())
    net = Counters()
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ours = psd.DistributedDataParallel(net, update=update)
    if update == "server":
        psd.SGD(ours.parameters(), lr=0.0)

    def train(model, x):
        model.train()
        model(x).sum().backward()
        if model is ours:
            model._note_step()

    def accumulate(model, x):
        with model.no_sync():
            model(x).sum().backward()

    def frozen(model, x):
        model.eval()
        model(x).sum().backward()
        if model is ours:
            model._note_step()

    def evaluate(model, x):
        model.eval()
        with torch.no_grad():
            return model(x)

    def infer(model, x):
        model.eval()
        with torch.inference_mode():
            return model(x).clone()

    course = [infer, train, train, evaluate, evaluate, train, accumulate, accumulate, train, infer, frozen, frozen, evaluate, train]
    for number, step in enumerate(course):
        if number == 5:
            for model in (stock, ours):
                model.module.late = nn.BatchNorm1d(6)
                model.module.late.running_mean.fill_(psd.rank())
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + psd.rank()))
        step(stock, x)
        step(ours, x)
        for (name, mine), theirs in zip(ours.module.named_buffers(), stock.module.buffers()):
            same = mine.shape == theirs.shape and mine.numpy().tobytes() == theirs.numpy().tobytes()
            assert same or "running" in name, f"{name} after {step.__name__}, number {number}: {mine}, stock {theirs}"
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_buffers_of_every_type_are_shared_when_torch_does_it(update):
    run(side_by_side, 2, update=update)


def siamese():
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
    # Without buffers, because torch 2.11 refuses this with them.
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net), broadcast_buffers=False)
    ours = psd.DistributedDataParallel(net)
    for step in range(3):
        a, b = torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(step + 10 * psd.rank()))
        for model in (stock, ours):
            model.zero_grad()
            (model(a) - model(b)).square().mean().backward()
        for p, q in zip(ours.parameters(), stock.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_two_forwards_and_one_backward():
    run(siamese, 2)


def evaluate_on_some(size, evaluators, waits):
    import poseidon.torch as psd

    psd.init()
    net = nn.Sequential(nn.Linear(4, 4))
    net.register_buffer("table", torch.zeros(size))
    model = psd.DistributedDataParallel(net)
    seen = []
    for epoch in range(2):
        for _ in range(2):
            model.module.table += 1 + psd.rank()
            model(torch.ones(2, 4)).sum().backward()
        model.module.table += 1 + psd.rank()
        if psd.rank() in evaluators:
            with torch.no_grad():
                model(torch.ones(2, 4))
                seen.append(model.module.table.unique().tolist())
        if waits and epoch == 0:
            psd.barrier()
    return seen


# A few numbers go from rank 0 to each, many through all ranks.
@pytest.mark.parametrize(
    "size, evaluators, waits", [(10, [0], True), (10, [0, 1], True), (1 << 20, [0], True), (1 << 20, [0, 1], False)]
)
def test_some_ranks_evaluate_while_others_wait_go_on_or_leave(size, evaluators, waits):
    results = run(evaluate_on_some, 3, size=size, evaluators=evaluators, waits=waits)
    for rank, seen in enumerate(results):
        assert seen == ([[3.0], [6.0]] if rank in evaluators else [])


def join_and_evaluate(update):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    model = psd.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), update=update)
    optimizer = (psd if update == "server" else torch.optim).SGD(model.parameters(), lr=0.1)

    def train(steps):
        model.train()
        for step in range(steps):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 10 * psd.rank()))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    def evaluate():
        if psd.rank() == 0:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))

    train(2)
    for _ in range(2):
        evaluate()
        with model.join():
            train(1 + 2 * psd.rank())
            evaluate()
    model.synchronize()
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    psd.shutdown()
    return state


@pytest.mark.parametrize("update", ["worker", "server"])
def test_all_leave_join_with_the_same_buffers(update):
    first, second = run(join_and_evaluate, 2, update=update)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def different_sizes():
    import poseidon
    import poseidon.torch as psd

    psd.init()
    net = nn.Linear(4, 4)
    net.register_buffer("cache", torch.zeros(2))
    model = psd.DistributedDataParallel(net)
    try:
        for step in range(3):
            if step == 2 and psd.rank() == 1:
                net.cache = torch.zeros(3)
            model(torch.ones(2, 4)).sum().backward()
            psd.barrier()
    except poseidon.PoseidonError as error:
        return str(error)


def test_buffers_that_differ_in_size_are_an_error():
    ended = attempt(different_sizes, 2, environment={"POSEIDON_TIMEOUT": "600"})
    words = [result for _, result, _ in ended]
    assert any("8 " in w and "12 " in w for w in words if w), words
