"""Parameter groups, float64, unused parameters and whatever a program does to gradients, together."""

import copy

import torch
from cluster import attempt, run
from models import Mlp, batches
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Layers that go by factors, of which one is not always used, and a parameter in float64."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 10)
        self.other = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.ones(10, dtype=torch.float64))

    def forward(self, x, both=True):
        hidden = torch.tanh(self.first(x))
        result = self.second(hidden) * self.scale
        return result + self.other(hidden) if both else result


def loss(model, step, **how):
    seed = 100 * step + torch.distributed.get_rank()
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(seed))
    return model(x, **how).square().mean()


def decayed(net):
    """Weights have another rule than biases, so that a layer's two parameters go apart."""
    named = list(net.named_parameters())
    weights, others = [p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() < 2]
    return [dict(params=weights, weight_decay=0.1), dict(params=others, lr=0.01)]


def compared(steps, train, **settings):
    """The largest difference between parameters that ``train`` has made of torch's wrapper and of ours."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    if settings.get("update") == "server":
        net = net.float()
    unused = dict(find_unused_parameters=True)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net), **unused)
    ours = psd.DistributedDataParallel(net, scheme="sfb", **unused, **settings)
    where = psd if settings.get("update") == "server" else torch.optim
    steppers = [torch.optim.SGD(decayed(stock), lr=0.1), where.SGD(decayed(ours), lr=0.1)]
    for step in range(steps):
        for model, stepper in zip((stock, ours), steppers):
            train(model, step)
            stepper.step()
            stepper.zero_grad()
        if step == 0:
            assert "sfb" in {row[2] for row in ours.sessions_plan()}
    ours.synchronize()
    worst = max((p - q).abs().max().item() for p, q in zip(ours.module.parameters(), stock.module.parameters()))
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return worst


def accumulate(model, step):
    for part in range(2):
        with model.no_sync():
            loss(model, 10 * step + part).backward()
    loss(model, 10 * step + 2).backward()


def accumulate_then_change(model, step):
    """What is changed is in a layer that the synchronised pass does not use."""
    with model.no_sync():
        loss(model, 10 * step).backward()
    other = model.module.other
    for p in other.parameters():
        p.grad.data.mul_(torch.distributed.get_rank() + 2.0)
    loss(model, 10 * step + 1, both=False).backward()


def change_before_the_first_backward():
    return compared(5, accumulate_then_change)


def accumulate_on_the_shards():
    return compared(3, accumulate, update="server")


def accumulate_then_change_on_the_shards():
    return compared(3, accumulate_then_change, update="server")


def test_gradients_that_were_changed_count_where_the_last_pass_has_no_use_for_them():
    # After three steps the layer goes without factors: the last ones are in another session.
    assert max(run(change_before_the_first_backward, 2)) < 1e-6


def test_biases_of_another_group_are_accumulated_before_the_first_synchronisation():
    assert max(run(accumulate_on_the_shards, 2)) < 1e-6


def test_changed_gradients_of_several_groups_are_stepped_by_the_shards():
    assert max(run(accumulate_then_change_on_the_shards, 2)) < 1e-6


def masters_of_groups():
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    data = [(x[4 * rank : 4 * rank + 4].bfloat16(), y[4 * rank : 4 * rank + 4]) for x, y in batches("mlp", 6, 8)]

    def begin(seed):
        torch.manual_seed(seed)
        model = psd.DistributedDataParallel(Mlp().bfloat16(), deterministic=True, update="server")
        return model, psd.AdamW(decayed(model), lr=1e-5)

    def train(model, stepper, steps):
        for x, y in data[steps]:
            stepper.zero_grad()
            F.cross_entropy(model(x).float(), y).backward()
            stepper.step()

    model, stepper = begin(0)
    train(model, stepper, slice(0, 3))
    values = {name: value.clone() for name, value in model.module.state_dict().items()}
    state = stepper.state_dict()
    parameters = [p for group in stepper.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        master = state["state"][index]["master"]
        assert master.shape == parameter.shape and torch.equal(master.bfloat16(), parameter)
    train(model, stepper, slice(3, 6))
    other, other_stepper = begin(1)
    other.module.load_state_dict(values)
    other_stepper.load_state_dict(state)
    train(other, other_stepper, slice(3, 6))
    expected, got = stepper.state_dict()["state"], other_stepper.state_dict()["state"]
    assert expected.keys() == got.keys()
    for index, entry in expected.items():
        assert all(torch.equal(value, got[index][name]) for name, value in entry.items()), index
    psd.shutdown()


def test_masters_of_several_groups_resume_bit_by_bit():
    run(masters_of_groups, 2)


def different_groups():
    import poseidon
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), update="server")
    first, second = model.module
    groups = [dict(params=first.parameters()), dict(params=second.parameters(), lr=0.2)]
    if psd.rank() == 1:
        groups = [dict(params=[*first.parameters(), second.weight]), dict(params=[second.bias], lr=0.3)]
    psd.SGD(groups, lr=0.1)
    try:
        model(torch.ones(2, 8)).sum().backward()
    except poseidon.ModelMismatchError as error:
        return str(error)


def test_workers_whose_groups_differ_are_told():
    words = [
        "learning rate of group 1 is 0.2 on worker 0 and 0.3 on worker 1",
        "parameter '1.weight' is in group 1, stepped 0 times on worker 0 and in group 0, stepped 0 times on worker 1",
    ]
    for _, said, errors in attempt(different_groups, 2, environment={"POSEIDON_TIMEOUT": "600"}):
        assert said is not None and all(word in said for word in words), (said, errors)
