"""Parameters that differ between workers are noticed, and named. Those that may differ are not."""

import warnings

import pytest
import torch
from cluster import attempt, run
from torch import nn

# Every step, so that a few of them are enough.
EVERY_STEP = {"POSEIDON_COMPARE_EVERY": "1"}


class Net(nn.Module):
    """Parameters of several types and shapes, a frozen one, buffers that differ, and one in another order of memory."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.exact = nn.Linear(4, 4, dtype=torch.float64)
        self.brief = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.dropout = nn.Dropout()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = self.norm(self.conv(x)).mean((2, 3))
        y = self.brief(self.exact(y.double()).bfloat16()).float()
        return self.head(self.dropout(y)) * self.scale * self.frozen


def images(rank, step):
    return torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(change=None, accumulates=False, steps=6, action="always", **settings):
    """The warnings of a run in which ``change(net, rank)`` is made after two steps."""
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    # Other random numbers on each worker: for the first values, which become worker 0's, and for the dropout.
    torch.manual_seed(rank)
    net = Net()
    model = psd.DistributedDataParallel(net, **settings)
    with torch.no_grad():
        net.frozen += rank
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter(action, psd.ReplicasDiffer)
        for step in range(steps):
            optimizer.zero_grad()
            if accumulates:
                with model.no_sync():
                    model(images(rank, -step)).square().mean().backward()
            model(images(rank, step)).square().mean().backward()
            optimizer.step()
            if change is not None and step == 1:
                with torch.no_grad():
                    globals()[change](net, rank)
        compared = model._replicas is not None and model._replicas._passes
        psd.shutdown()
    return [str(w.message) for w in told if w.category is psd.ReplicasDiffer], compared


def one_weight(net, rank):
    if rank == 1:
        net.head.weight[2, 3] += 1e-6


def one_exact_weight(net, rank):
    if rank == 1:
        net.exact.bias[0] = -net.exact.bias[0]


@pytest.mark.parametrize("change, name", [("one_weight", "head.weight"), ("one_exact_weight", "exact.bias")])
def test_a_parameter_that_one_worker_changes_is_named(change, name):
    workers = attempt(train, 2, environment=EVERY_STEP, change=change)
    for status, result, errors in workers:
        assert status == 0, errors
        told, _ = result
        assert len(told) == 1, told
        for fact in (f"parameter '{name}'", "after clock 2", "worker 0 has one value, worker 1 another", "learning rate"):
            assert fact in told[0], told


def test_who_asks_for_an_error_gets_one():
    # It comes at a later step than the change, when the comparison is over.
    workers = attempt(train, 2, environment=EVERY_STEP, change="one_weight", steps=10_000, action="error")
    assert any("ReplicasDiffer: parameter 'head.weight'" in errors for _, _, errors in workers), workers
    assert all(status != 0 for status, _, _ in workers), workers


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(accumulates=True), dict(broadcast_buffers=False), dict(find_unused_parameters=True)],
)
def test_what_may_differ_is_not_compared(settings):
    for status, result, errors in attempt(train, 2, environment=EVERY_STEP, **settings):
        assert status == 0, errors
        told, compared = result
        assert told == [] and compared == 6
        assert "Replicas" not in errors, errors


def test_workers_that_begin_as_they_are_may_differ():
    for status, result, errors in attempt(train, 2, environment=EVERY_STEP, init_sync=False):
        assert status == 0, errors
        assert result == ([], False)


def uneven():
    import poseidon.torch as psd

    warnings.simplefilter("error", psd.ReplicasDiffer)
    psd.init()
    rank = psd.rank()
    torch.manual_seed(rank)
    net = nn.Linear(6, 3)
    model = psd.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with model.join():
        for _ in range(2 + 3 * rank):
            step()
    for _ in range(3):
        step()
    passes = model._replicas._passes
    psd.shutdown()
    return passes


def test_a_worker_that_is_through_in_join_may_lag():
    ended = attempt(uneven, 2, environment=EVERY_STEP)
    assert [(status, result) for status, result, _ in ended] == [(0, 6), (0, 6)], ended


def stale():
    import poseidon.torch as psd

    warnings.simplefilter("error", psd.ReplicasDiffer)
    psd.init()
    torch.manual_seed(psd.rank())
    net = nn.Linear(6, 3)
    model = psd.DistributedDataParallel(net, update="server", sync="ssp:2")
    optimizer = psd.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        if step == 5:
            model.step_together()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    psd.shutdown()


def test_workers_that_may_be_apart_are_not_compared():
    for status, _, errors in attempt(stale, 2, environment=EVERY_STEP):
        assert status == 0, errors


class Named:
    """As a member: what turns are made of."""

    def __init__(self, parameter, device="cpu"):
        self.name, self.parameter, self.device = "p", parameter, torch.device(device)


def test_every_row_has_one_turn():
    from poseidon.torch._replicas import _BYTES, _MOST, turns

    shapes = [(7, 3), (), (0,), (1000, 500), (3, _BYTES), (2,), *[(1,)] * 40]
    members = [Named(torch.empty(shape)) for shape in shapes]
    seen = []
    for turn in turns(members):
        size = sum((last - first) * max(m.parameter[:1].numel(), 1) if m.parameter.dim() else 1 for m, first, last in turn)
        assert len(turn) <= _MOST
        assert 4 * size <= _BYTES or len(turn) == 1 and turn[0][2] - turn[0][1] == 1
        seen += [(members.index(m), row) for m, first, last in turn for row in range(first, last)]
    assert seen == [(i, row) for i, shape in enumerate(shapes) for row in range(shape[0] if shape else 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_digests_made_on_a_device_tell_values_and_places(dtype):
    from poseidon.torch._checksum import _bits, _mixed, _places, digests

    def as_on_a_gpu(tensor):
        bits = _bits(tensor.reshape(-1)).to(torch.int32, copy=True)
        return _mixed(bits, _places(bits.numel(), tensor.device)).sum(dtype=torch.int64).item()

    values = torch.randn(50, 20, dtype=dtype)
    for digest in (as_on_a_gpu, lambda tensor: digests([tensor])[0].item()):
        assert digest(values) == digest(values.clone())
        for change in (lambda v: v[3, 4].add_(1), lambda v: v.neg_(), lambda v: v[:2].copy_(v[:2].flip(0))):
            changed = values.clone()
            change(changed)
            assert digest(changed) != digest(values)
