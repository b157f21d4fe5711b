"""Parameters of half precision: they travel in their own type, are added in float32 and rounded once."""

import copy

import pytest
import torch
from cluster import run
from torch import nn
from torch.nn import functional as F


class Mixed(nn.Module):
    """Large and small parameters of half precision, and norms in float32 between them."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(64, 256, dtype=dtype)
        self.norm = nn.LayerNorm(256)
        self.second = nn.Linear(256, 256, dtype=dtype)
        self.last = nn.Linear(256, 4, dtype=dtype)
        self.dtype = dtype

    def forward(self, x):
        x = self.norm(F.relu(self.first(x.to(self.dtype))).float())
        return self.last(F.relu(self.second(x.to(self.dtype)))).float()


def data(steps, rank, rows=8):
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(rows, 64, generator=source)
        yield x, torch.randint(0, 4, (rows,), generator=source)


def gradients(dtype, scheme):
    """Two steps beside stock DDP: gradients of both, and bytes a step of ours."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank = psd.rank()
    torch.manual_seed(0)
    net = Mixed(dtype)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ours = psd.DistributedDataParallel(net, scheme=scheme)
    for x, y in data(2, rank):
        for model in (ours, stock):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
    for (name, p), q in zip(net.named_parameters(), stock.parameters()):
        assert p.grad.dtype == p.dtype == q.grad.dtype, name
        worst = (p.grad.float() - q.grad.float()).norm() / q.grad.float().norm()
        assert worst < (1e-5 if p.dtype == torch.float32 else 0.02), f"{name}: {worst}"
    for unit in ours._units:
        assert len({p.dtype for p in unit.parameters}) <= 1, unit.name
    psd.barrier()
    sent, _ = ours.traffic()
    mine = [p.grad.clone() for p in net.parameters()]
    schemes = {row[2] for row in ours.sessions_plan()}
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return mine, sent / 2, schemes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_take_no_more_bytes_than_ddps_and_are_equal_everywhere(dtype):
    workers = 3
    ranks = run(gradients, workers, dtype=dtype, scheme="ps")
    # A ring sends every number on, twice, to all but one.
    tensors = ranks[0][0]
    ring = 2 * (workers - 1) / workers * sum(t.numel() * t.element_size() for t in tensors)
    headers = 40 * 100
    assert sum(sent for _, sent, _ in ranks) < workers * (ring + headers)
    for mine, _, schemes in ranks:
        assert schemes == {"ps"}
        assert all(torch.equal(a, b) for a, b in zip(mine, tensors)), "replicas differ"


def test_factors_travel_in_their_own_type():
    ranks = run(gradients, 2, dtype=torch.bfloat16, scheme="sfb")
    # Rows of three layers, in two bytes; and the norm.
    factors = 8 * (64 + 256 + 256 + 256 + 256 + 4) * 2
    for mine, sent, schemes in ranks:
        assert schemes == {"sfb", "ps"}
        assert factors < sent < factors + 4 * 512 * 2 + 4000, sent
        assert all(torch.equal(a, b) for a, b in zip(mine, ranks[0][0])), "replicas differ"


def rounded_once():
    """The mean of two workers' gradients, against float64."""
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    net = nn.Linear(40, 1000, bias=False, dtype=torch.bfloat16)
    model = psd.DistributedDataParallel(net, scheme="ps")
    rows = torch.stack([torch.linspace(0.1 + r, 3.0 * (r + 1), 40) for r in (0, 1)]).bfloat16()
    model(rows[rank : rank + 1]).sum().backward()
    expected = rows.double().mean(0).to(torch.bfloat16).expand(1000, 40)
    assert torch.equal(net.weight.grad, expected)
    psd.shutdown()


def test_a_mean_is_rounded_once():
    run(rounded_once, 2)


def on_shards(folder, optimizer, dtype, scheme):
    """Trains through, and with a checkpoint in between."""
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    settings = dict(lr=1e-3, momentum=0.9) if optimizer == "SGD" else dict(lr=1e-4)
    if optimizer == "plain":
        settings = dict(lr=1e-3)
    kind = psd.AdamW if optimizer == "AdamW" else psd.SGD
    steps = list(data(6, rank))

    def begin(seed):
        torch.manual_seed(seed)
        model = psd.DistributedDataParallel(Mixed(dtype), update="server", scheme=scheme, deterministic=True)
        return model, kind(model.parameters(), **settings)

    def train(model, stepper, part):
        for x, y in steps[part]:
            F.cross_entropy(model(x), y).backward()
            stepper.step()
        return [p.detach().clone() for p in model.state_dict().values()]

    model, stepper = begin(0)
    before = train(model, stepper, slice(0, 3))
    psd.save(f"{folder}/checkpoint", model, stepper, step=3)
    expected = train(model, stepper, slice(3, 6))
    other, other_stepper = begin(1)
    psd.load(f"{folder}/checkpoint", other, other_stepper)
    saved = other_stepper.state_dict()["state"]
    masters = {index: entry["master"] for index, entry in saved.items() if "master" in entry}
    for index, value in enumerate(before):
        assert (index in masters) == (value.dtype != torch.float32)
        if index in masters:
            assert masters[index].dtype == torch.float32
            assert torch.equal(masters[index].to(value.dtype), value), "the model has the masters, rounded"
            assert not torch.equal(masters[index], value.float()), "masters have more bits"
    resumed = train(other, other_stepper, slice(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed)), "it does not go on where it was"
    # Other values than those that were saved are nobody's masters.
    psd.load(f"{folder}/checkpoint", other)
    with torch.no_grad():
        other.module.first.weight.zero_()
    other._restart()
    train(other, other_stepper, slice(3, 4))
    assert other.module.first.weight.abs().max() < 0.1
    psd.shutdown()
    return expected


@pytest.mark.parametrize(
    "optimizer, scheme", [("SGD", "ps"), ("plain", "ps"), ("AdamW", "ps"), ("AdamW", "sfb")]
)
def test_masters_are_saved_and_a_run_goes_on_from_them_bit_by_bit(tmp_path, optimizer, scheme):
    settings = dict(folder=str(tmp_path), optimizer=optimizer, dtype=torch.bfloat16, scheme=scheme)
    ranks = run(on_shards, 2, **settings)
    assert all(torch.equal(a, b) for a, b in zip(*ranks)), "replicas differ"
