"""Parameters of half precision whose steps the shards take in float32: nothing is lost by a checkpoint."""

import pytest
import torch
from cluster import run
from models import Mlp, batches
from torch.nn import functional as F


def resumed(folder, kind, optimizer, scheme, way):
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    data = [(x[4 * rank : 4 * rank + 4].to(kind), y[4 * rank : 4 * rank + 4]) for x, y in batches("mlp", 9, 4 * psd.world_size())]

    def begin(seed):
        torch.manual_seed(seed)
        model = psd.DistributedDataParallel(Mlp().to(kind), scheme=scheme, deterministic=True, update="server")
        # So small that a step is lost in half precision, and ten of them are not.
        settings = {"SGD": dict(lr=1e-3), "momentum": dict(lr=1e-4, momentum=0.9), "AdamW": dict(lr=1e-5)}[optimizer]
        return model, getattr(psd, "SGD" if optimizer == "momentum" else optimizer)(model.parameters(), **settings)

    def train(model, stepper, steps):
        for x, y in data[steps]:
            stepper.zero_grad()
            F.cross_entropy(model(x).float(), y).backward()
            stepper.step()

    def values(model, stepper):
        masters = [entry["master"] for entry in stepper.state_dict()["state"].values()]
        return [*model.state_dict().values(), *masters]

    model, stepper = begin(0)
    train(model, stepper, slice(0, 3))
    values_then = {k: v.clone() for k, v in model.module.state_dict().items()}
    if way == "save":
        psd.save(f"{folder}/checkpoint", model, stepper, step=3)
    else:
        state_then = stepper.state_dict()
    train(model, stepper, slice(3, 6))
    expected = values(model, stepper)
    assert any(v.dtype == torch.float32 for v in expected)
    other, other_stepper = begin(1)
    if way == "save":
        psd.load(f"{folder}/checkpoint", other, other_stepper)
    else:
        other.module.load_state_dict(values_then)
        other_stepper.load_state_dict(state_then)
    # Saved again before it goes on, it is the same still.
    again = other_stepper.state_dict()
    train(other, other_stepper, slice(3, 6))
    third, third_stepper = begin(2)
    third.module.load_state_dict(values_then)
    third_stepper.load_state_dict(again)
    train(third, third_stepper, slice(3, 6))
    for a, b, c in zip(expected, values(other, other_stepper), values(third, third_stepper)):
        assert torch.equal(a, b) and torch.equal(a, c)
    # torch's own optimizer of that name takes the state, too.
    stock = getattr(torch.optim, "SGD" if optimizer == "momentum" else optimizer)(third.module.parameters(), **{
        k: v for k, v in stepper.param_groups[0].items() if k in ("lr", "momentum")
    })
    stock.load_state_dict(again)
    for p in third.module.parameters():
        p.grad = torch.ones_like(p)
    stock.step()
    psd.shutdown()


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
def test_half_precision_resumes_bit_by_bit(tmp_path, optimizer):
    run(resumed, 2, folder=str(tmp_path), kind=torch.bfloat16, optimizer=optimizer, scheme="auto", way="save")


def test_half_precision_resumes_bit_by_bit_from_state_dicts(tmp_path):
    run(resumed, 2, folder=str(tmp_path), kind=torch.float16, optimizer="AdamW", scheme="ps", way="state_dict")


def changed_meanwhile():
    """Values that were changed after the state was saved count, not what they were made from."""
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False).bfloat16(), update="server")
    stepper = psd.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        stepper.step()
    state = stepper.state_dict()
    weight = model.module.state_dict()["weight"].clone()
    weight[0] = 3.0
    stepper.load_state_dict(state)
    model.module.load_state_dict({"weight": weight})
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    stepper.step()
    (entry,) = stepper.state_dict()["state"].values()
    expected = state["state"][0]["master"] - 2e-3
    expected[0] = 3.0 - 2e-3
    torch.testing.assert_close(entry["master"], expected, rtol=1e-6, atol=1e-7)
    psd.shutdown()


def test_values_that_were_changed_meanwhile_count():
    run(changed_meanwhile, 2)
