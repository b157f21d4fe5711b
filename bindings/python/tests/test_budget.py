"""What a process may send can be changed while it runs."""

import pytest
import torch
from cluster import run
from torch import nn

TCP = {"POSEIDON_LINK": "tcp", "POSEIDON_BANDWIDTH_BUDGET": "40mbit"}


def train():
    import poseidon
    import poseidon.torch as psd
    from poseidon.torch._job import Job

    psd.init()
    torch.manual_seed(1)
    model = psd.DistributedDataParallel(nn.Linear(200, 100))
    budgets = [Job.get().bandwidth_budget]
    for rate in ["8mbit", None]:
        poseidon.set_bandwidth_budget(rate)
        budgets.append(Job.get().bandwidth_budget)
        model(torch.full((2, 200), float(psd.rank()))).sum().backward()
    with pytest.raises(ValueError, match="bandwidth budget 'fast'"):
        poseidon.set_bandwidth_budget("fast")
    return budgets, model.module.weight.grad


def sums():
    import poseidon
    import torch.distributed as dist

    with pytest.raises(RuntimeError, match="POSEIDON_BANDWIDTH_BUDGET"):
        poseidon.set_bandwidth_budget(None)
    dist.init_process_group("poseidon")
    from poseidon import _c10d

    (operations,) = _c10d._groups
    budgets = [operations.group().bandwidth_budget]
    poseidon.set_bandwidth_budget("20mbit")
    budgets.append(operations.group().bandwidth_budget)
    tensor = torch.full((50_000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return budgets, bool((tensor == 1).all())


def test_the_job_of_a_model(monkeypatch):
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    (budgets, grad), (others, same) = run(train, 2)
    assert budgets == others == [40_000_000, 8_000_000, None]
    # Two steps, of rows of zeros and of ones.
    assert torch.equal(grad, same) and (grad == 2).all()


def test_a_process_group(monkeypatch):
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    assert run(sums, 2) == [([40_000_000, 20_000_000], True)] * 2
