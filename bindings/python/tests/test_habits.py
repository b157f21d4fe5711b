"""What training programs do besides forward, backward and step: the same comes out as with torch's own wrapper."""

import copy

import pytest
import torch
from cluster import attempt, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Two ways through it, of which a step may take one."""

    def __init__(self, way="plain"):
        super().__init__()
        self.way = way
        self.first = nn.Linear(12, 16)
        self.other = nn.Linear(12, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x, through="first"):
        layer = self.first if through == "first" else self.other
        if self.way == "transposed":
            return torch.tanh(layer(input=x)) @ self.last.weight.T + self.last.bias
        if self.way == "plain":
            return self.last(torch.tanh(layer(x)))
        reentrant = self.way == "reentrant"
        hidden = checkpoint(lambda x: torch.tanh(layer(x)), x.requires_grad_(), use_reentrant=reentrant)
        return checkpoint(self.last, hidden, use_reentrant=reentrant)


def batch(step, rows=3):
    """This worker's samples."""
    seed = 100 * step + torch.distributed.get_rank()
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))


def loss(model, step, rows=3, **how):
    return model(batch(step, rows), **how).square().mean()


def accumulate(model, _):
    with model.no_sync():
        loss(model, 1).backward()
    loss(model, 2).backward()


def discard(model, optimizer):
    with model.no_sync():
        loss(model, 1).backward()
    optimizer.zero_grad()
    loss(model, 2).backward()


def discard_to_zeros(model, optimizer):
    with model.no_sync():
        loss(model, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    loss(model, 2).backward()


def change_between(model, _):
    for step in (1, 2):
        with model.no_sync():
            loss(model, step).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
    loss(model, 3).backward()


def change_once(model, _):
    with model.no_sync():
        loss(model, 1).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    with model.no_sync():
        loss(model, 2).backward()
    loss(model, 3).backward()


def keep_old_gradients(model, _):
    loss(model, 1).backward()
    with model.no_sync():
        loss(model, 2).backward()
    loss(model, 3).backward()


def reuse_the_input(model, _):
    memory = batch(1).clone()
    with model.no_sync():
        model(memory).square().mean().backward()
    memory.copy_(batch(2))
    model(memory).square().mean().backward()


def take_another_way_without_sync(model, _):
    with model.no_sync():
        loss(model, 1, through="other").backward()
    loss(model, 2).backward()


def zero_before_backward(model, optimizer):
    value = loss(model, 1)
    optimizer.zero_grad()
    value.backward()


def keep_a_graph(model, optimizer):
    first, second = loss(model, 1), loss(model, 2)
    first.backward()
    optimizer.zero_grad()
    (second + loss(model, 3)).backward()


def look_without_backward(model, _):
    loss(model, 1)
    loss(model, 2).backward()


def more_rows_each_time(model, optimizer):
    for rows in (2, 9, 4):
        optimizer.zero_grad()
        loss(model, rows, rows).backward()


def hold_gradients(model, optimizer):
    loss(model, 1).backward()
    held = [p.grad for p in model.parameters() if p.grad is not None]
    values = [gradient.clone() for gradient in held]
    optimizer.zero_grad()
    loss(model, 2).backward()
    assert all(torch.equal(a, b) for a, b in zip(held, values))


def other_weights(model, _):
    state = {name: p + 1 for name, p in model.module.named_parameters()}
    torch.func.functional_call(model.module, {k: v.detach() for k, v in state.items()}, batch(1))
    torch.func.vmap(model.module)(batch(1))
    loss(model, 2).backward()


PLAIN = [
    accumulate, discard, discard_to_zeros, change_between, change_once, keep_old_gradients, reuse_the_input, zero_before_backward,
    keep_a_graph, look_without_backward, more_rows_each_time, hold_gradients, other_weights,
]  # fmt: skip


def same_as_stock(habits, scheme, update="worker", way="plain", unused=True):
    """After three rounds of each habit, parameters are those of stock DDP."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for name in habits:
        torch.manual_seed(0)
        net = Net(way)
        if not unused:
            net.other = None
        models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=unused)]
        models.append(psd.DistributedDataParallel(net, scheme=scheme, update=update, find_unused_parameters=unused))
        for model, where in zip(models, (torch.optim, psd if update == "server" else torch.optim)):
            optimizer = where.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                globals()[name](model, optimizer)
                optimizer.step()
        models[1].synchronize()
        for (key, p), q in zip(net.named_parameters(), models[0].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=f"{name}, {scheme}: {key}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_habits(scheme):
    names = [habit.__name__ for habit in PLAIN]
    run(same_as_stock, 2, habits=[*names, "take_another_way_without_sync"], scheme=scheme)


def test_habits_with_steps_on_the_shards():
    names = [f.__name__ for f in (accumulate, discard, change_between, reuse_the_input, zero_before_backward)]
    run(same_as_stock, 2, habits=names, scheme="sfb", update="server", unused=False)


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
@pytest.mark.parametrize("way", ["checkpointed", "reentrant", "transposed"])
def test_ways_to_use_a_layer(way, scheme):
    updates = ("worker",) if way == "reentrant" else ("worker", "server")
    for update in updates:
        run(same_as_stock, 2, habits=["look_without_backward"], scheme=scheme, update=update, way=way, unused=False)


def uneven_in_eval():
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    model = psd.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))).eval()
    with model.join():
        for _ in range(1 + 2 * psd.rank()):
            model(torch.ones(4, 8)).square().mean().backward()
    psd.shutdown()


def test_uneven_inputs_in_eval_mode():
    run(uneven_in_eval, 2)


def scheduled_momentum():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(8, 8), update="server")
    stepper = psd.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(stepper, 0.1, total_steps=10)
    try:
        for _ in range(3):
            model(torch.ones(4, 8)).square().mean().backward()
            stepper.step()
            schedule.step()
    except RuntimeError as error:
        return str(error)


def test_a_schedule_of_momentum_on_the_shards_is_refused():
    for _, words, _ in attempt(scheduled_momentum, 2):
        assert "momentum=" in words and "cycle_momentum=False" in words, words


def hooked(before):
    """The gradient a hook on a weight sees."""
    import poseidon.torch as psd

    psd.init()
    net, seen = nn.Linear(30, 30), []
    if before:
        net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model = psd.DistributedDataParallel(net, scheme="sfb")
    if not before:
        net.weight.register_hook(lambda gradient: seen.append(gradient))
    F.mse_loss(model(torch.ones(2, 30)), torch.ones(2, 30)).backward()
    psd.shutdown()
    return [None if g is None else g.shape for g in seen]


def test_hooks_on_weights_see_gradients():
    for before in (True, False):
        assert run(hooked, 2, before=before) == [[(30, 30)]] * 2


def loads_a_model_alone(folder):
    """Training goes on with the momentum it had."""
    import poseidon.torch as psd

    psd.init()
    ends = []
    for loads in (False, True):
        torch.manual_seed(0)
        model = psd.DistributedDataParallel(nn.Linear(8, 8), update="server")
        stepper = psd.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            if loads and step == 2:
                psd.save(f"{folder}/model", model, step=step)
                psd.load(f"{folder}/model", model)
            model(torch.ones(4, 8)).square().mean().backward()
            stepper.step()
        ends.append(model.module.state_dict()["weight"].clone())
    psd.shutdown()
    assert torch.equal(*ends)


def test_a_model_loaded_alone_keeps_its_momentum(tmp_path):
    run(loads_a_model_alone, 2, folder=str(tmp_path))


def awaited():
    """The parameters that every forward waits for when it begins."""
    import poseidon.torch as psd

    psd.init()
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 4))
    ours = psd.DistributedDataParallel(net, update="server")
    optimizer = psd.SGD(ours.parameters(), lr=0.1)
    for _ in range(2):
        ours(torch.randn(3, 1, 8)).sum().backward()
        optimizer.step()
    names = [name for name, p in net.named_parameters() if p in ours._used_early]
    psd.shutdown()
    return names


def test_no_forward_waits_for_more_than_its_layer():
    assert run(awaited, 2) == [[], []]


def frozen_early(what):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x = torch.randn(3, 6)
    net(x).sum().backward()
    expected = net[2].weight.grad
    net.zero_grad()
    ours = psd.DistributedDataParallel(net, scheme="sfb", find_unused_parameters=True)
    with ours.no_sync():
        ours(x).sum().backward()
    {"layer": net[0], "bias": net[0].bias}[what].requires_grad_(False)
    ours(x).sum().backward()
    torch.testing.assert_close(net[2].weight.grad, 2 * expected)
    net[0].requires_grad_(True)
    net.zero_grad()
    ours(x).sum().backward()
    torch.testing.assert_close(net[2].weight.grad, expected)
    has_gradients = [p.grad is not None for p in net.parameters()]
    psd.shutdown()
    return has_gradients


@pytest.mark.parametrize("what", ["layer", "bias"])
def test_a_layer_frozen_before_the_first_synchronisation(what):
    assert run(frozen_early, 2, what=what) == [[True] * 4] * 2
