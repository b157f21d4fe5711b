"""Programs that change torch's default type or device train as others do: memory for the network is of its own type."""

import pytest
import torch
from cluster import run
from torch import nn


def parameters(kind, device):
    """Those of a model after a few steps of every kind, by update and scheme."""
    import poseidon.torch as psd

    torch.set_default_dtype(kind)
    if device is not None:
        torch.set_default_device(device)
    plain = dict(dtype=torch.float32, device="cpu")
    psd.init()
    rank = psd.rank()
    generator = torch.Generator("cpu").manual_seed(rank)
    found = {}
    for update in ("worker", "server"):
        for scheme in ("ps", "sfb"):
            for half in (False, True):
                torch.manual_seed(0)
                net = nn.Sequential(
                    nn.Linear(12, 16, **plain), nn.BatchNorm1d(16, **plain), nn.Linear(16, 10, **plain), nn.Linear(10, 5, **plain)
                )
                net = net.bfloat16() if half else net
                inputs = [torch.randn(4, 12, generator=generator, **plain).to(net[0].weight.dtype) for _ in range(4)]
                model = psd.DistributedDataParallel(net, update=update, scheme=scheme, find_unused_parameters=True)
                optimizer = (psd.AdamW if update == "server" else torch.optim.SGD)(model.parameters(), lr=0.125)
                for x in inputs[:2]:
                    optimizer.zero_grad()
                    if rank == 0:
                        # It goes beside the factors.
                        net[2].weight.grad = torch.ones_like(net[2].weight)
                    model(x).square().mean().backward()
                    optimizer.step()
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
                with model.join():
                    for x in inputs[2 : 3 + rank]:
                        optimizer.zero_grad()
                        model(x).square().mean().backward()
                        optimizer.step()
                model.synchronize()
                found[update, scheme, half] = [p.detach().clone() for p in net.parameters()]
                found[update, scheme, half] += [v for entry in state["state"].values() for v in entry.values() if v is not None]
                model.close()
    psd.shutdown()
    return found


@pytest.fixture(scope="module")
def expected():
    return run(parameters, 2, kind=torch.float32, device=None)


# The meta device has no memory at all: nothing may be made there.
@pytest.mark.parametrize("kind, device", [(torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")])
def test_defaults_change_nothing(expected, kind, device):
    for ours, others in zip(run(parameters, 2, kind=kind, device=device), expected):
        for way, values in others.items():
            assert len(ours[way]) == len(values)
            for mine, theirs in zip(ours[way], values):
                assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), way


@pytest.mark.parametrize(
    "tensor, words",
    [
        (torch.ones(3, dtype=torch.float64), "expected torch.float32 on the CPU, contiguous, got torch.float64 on cpu"),
        (torch.ones(3, device="meta"), "got torch.float32 on meta"),
        (torch.ones(3, 2).t(), "got torch.float32 on cpu, not contiguous"),
    ],
)
def test_other_memory_is_refused(tensor, words):
    from poseidon.torch._job import memory

    with pytest.raises(TypeError, match=words):
        memory(tensor)
    assert memory(torch.ones(3, dtype=torch.bfloat16), torch.bfloat16)[1] == 3
