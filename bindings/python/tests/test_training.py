"""Uneven inputs, checkpoints, clipping, compiled blocks, models that use their parameters in odd ways."""

import copy
import os

import torch
from cluster import run
from models import Cnn, Mlp, batches
from torch import nn
from torch.nn import functional as F


def uneven(update):
    """Rank r has 2 + r batches. Returns the parameters, and those a single process ends with."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = Mlp()
    ours = psd.DistributedDataParallel(copy.deepcopy(alone), update=update, scheme="sfb")
    where = psd if update == "server" else torch.optim
    stepper = where.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    data = list(batches("mlp", 1 + world, 4 * world))
    with ours.join():
        for x, y in data[: 2 + rank]:
            stepper.zero_grad()
            F.cross_entropy(ours(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
            stepper.step()
    parameters = [p.detach().clone() for p in ours.state_dict().values()]
    stepper = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(data):
        stepper.zero_grad()
        for r in range(max(step - 1, 0), world):
            (F.cross_entropy(alone(x[4 * r : 4 * r + 4]), y[4 * r : 4 * r + 4]) / world).backward()
        stepper.step()
    psd.shutdown()
    return parameters, [p.detach().clone() for p in alone.parameters()]


def uneven_norm():
    """The same with batch norm: parameters and buffers at the end."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    ours = psd.DistributedDataParallel(Cnn())
    stepper = torch.optim.SGD(ours.parameters(), lr=0.1)
    with ours.join():
        for x, y in batches("cnn", 1 + rank, 4 * world):
            stepper.zero_grad()
            F.cross_entropy(ours(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
            stepper.step()
    values = [v.clone() for v in ours.state_dict().values() if v.dtype == torch.float32]
    psd.shutdown()
    return values


def through(divide):
    """Gradients of the last step, which only the last rank takes."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    model = psd.DistributedDataParallel(nn.Linear(3, 2))
    with model.join(divide_by_initial_world_size=divide):
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
    gradient = model.module.weight.grad.clone()
    psd.shutdown()
    return gradient


def test_workers_that_are_through_go_along():
    for update in ("worker", "server"):
        ranks = run(uneven, 3, update=update)
        for parameters, alone in ranks:
            for mine, first, expected in zip(parameters, ranks[0][0], alone):
                assert torch.equal(mine, first), f"{update}: replicas differ"
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    first, second = run(uneven_norm, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_means_over_the_workers_that_still_train():
    assert run(through, 2, divide=True)[1].tolist() == [[0.5] * 3] * 2
    assert run(through, 2, divide=False)[1].tolist() == [[1.0] * 3] * 2


def interrupted(folder, update, optimizer):
    """Trains through, and with a checkpoint in between that also torch's optimizer takes up."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    where = psd if update == "server" else torch.optim
    data = list(batches("mlp", 6, 4 * world))

    def begin(seed, kind=where, **settings):
        torch.manual_seed(seed)
        model = psd.DistributedDataParallel(Mlp(), scheme="sfb", deterministic=True, **settings)
        settings = dict(lr=0.05, momentum=0.9) if optimizer == "SGD" else dict(lr=1e-3, eps=1e-4)
        return model, getattr(kind, optimizer)(model.parameters(), **settings)

    def train(model, stepper, steps):
        for x, y in data[steps]:
            stepper.zero_grad()
            F.cross_entropy(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
            stepper.step()
        return [p.detach().clone() for p in model.state_dict().values()]

    model, stepper = begin(0, update=update)
    train(model, stepper, slice(0, 3))
    place = f"{folder}/{update}-{optimizer}"
    psd.save(place, model, stepper, step=3, epoch=7)
    expected = train(model, stepper, slice(3, 6))
    # Into a new model, and back into the one that went on.
    other, other_stepper = begin(1, update=update)
    assert psd.load(place, other, other_stepper) == {"epoch": 7, "step": 3}
    resumed = train(other, other_stepper, slice(3, 6))
    psd.load(place, model, stepper)
    again = train(model, stepper, slice(3, 6))
    # Torch's own optimizer goes on from there, too.
    stock, stock_stepper = begin(2, kind=torch.optim)
    psd.load(place, stock, stock_stepper)
    elsewhere = train(stock, stock_stepper, slice(3, 6))
    for values in zip(expected, resumed, again, elsewhere):
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
        torch.testing.assert_close(values[0], values[3], rtol=1e-4, atol=1e-6)
    psd.shutdown()


def test_training_resumes_bit_by_bit(tmp_path):
    for update in ("worker", "server"):
        for optimizer in ("SGD", "AdamW"):
            run(interrupted, 2, folder=str(tmp_path), update=update, optimizer=optimizer)


def clipped():
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    model = psd.DistributedDataParallel(Mlp())
    x, y = next(batches("mlp", 1, 8))
    F.cross_entropy(model(x), y).backward()
    whole = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
    norm = model.clip_grad_norm_(whole.item() / 2)
    after = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
    torch.testing.assert_close(norm, whole)
    torch.testing.assert_close(after, whole / 2)
    psd.shutdown()


def test_clipping():
    run(clipped, 2)


class Odd(nn.Module):
    """Uses weights without calling their modules, before and after."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.second = nn.Linear(30, 40, bias=False)
        self.attention = nn.MultiheadAttention(40, 4, batch_first=True)
        self.scale = nn.Parameter(torch.ones(40))

    def forward(self, x):
        y = F.linear(torch.tanh(self.first(x)), self.second.weight) * self.scale
        y = y + self.second(torch.tanh(self.first(x)))
        return self.attention(y, y, y)[0] @ self.second.weight


def odd(update, compiled):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank = psd.rank()
    torch.manual_seed(0)
    net = Odd()
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    if compiled == "blocks":
        # Traced and differentiated as a compiler would, without needing one on the machine.
        net.attention.compile(backend="aot_eager")
        net.first.compile(backend="aot_eager")
    ours = psd.DistributedDataParallel(net, scheme="sfb", update=update)
    where = psd if update == "server" else torch.optim
    steppers = [
        (torch.compile(ours, backend="aot_eager") if compiled == "whole" else ours, where.SGD(ours.parameters(), lr=0.1)),
        (stock, torch.optim.SGD(stock.parameters(), lr=0.1)),
    ]
    for step in range(4):
        x = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, stepper in steppers:
            stepper.zero_grad()
            model(x).square().mean().backward()
            stepper.step()
    ours.synchronize()
    for (name, p), q in zip(net.named_parameters(), stock.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_weights_that_are_used_without_their_module():
    for update in ("worker", "server"):
        run(odd, 2, update=update, compiled="no")


def test_compiled_blocks_and_compiled_models():
    for compiled in ("blocks", "whole"):
        for update in ("worker", "server"):
            run(odd, 2, update=update, compiled=compiled)


def many_steps_without_waiting():
    """With update="server" a forward may begin while parameters are on their way."""
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(psd.rank())
    model = psd.DistributedDataParallel(Cnn(), update="server", broadcast_buffers=False)
    stepper = psd.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    losses = []
    for x, y in batches("cnn", 8, 8):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        stepper.step()
        schedule.step()
        losses.append(loss.item())
    assert stepper.param_groups[0]["lr"] == 1e-3 / 16
    values = [p.detach().clone() for p in model.module.state_dict().values()]
    psd.shutdown()
    return values


def test_schedules_and_forwards_that_overtake():
    ranks = run(many_steps_without_waiting, 3)
    assert all(torch.equal(a, b) for other in ranks[1:] for a, b in zip(other[:2], ranks[0][:2]))


def trained_by_factors(without_tiles, steps=3):
    """The parameters that a few steps give; one of the workers may not multiply on AMX."""
    if os.environ["RANK"] == without_tiles:
        os.environ["POSEIDON_AMX"] = "0"
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    model = psd.DistributedDataParallel(nn.Linear(300, 200), scheme="sfb")
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        stepper.zero_grad()
        x = torch.randn(64, 300, generator=torch.Generator().manual_seed(10 * step + psd.rank()))
        model(x).square().mean().backward()
        stepper.step()
    psd.shutdown()
    return [p.detach() for p in model.parameters()]


def test_workers_with_and_without_a_matrix_unit_stay_equal():
    for without_tiles in (None, "0", "1"):
        first, second = run(trained_by_factors, 2, without_tiles=without_tiles)
        assert all(torch.equal(a, b) for a, b in zip(first, second)), without_tiles


class Positioned(nn.Module):
    """With one sample, the position's gradient is a view of what the layers below it read."""

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(64, 512)
        self.position = nn.Parameter(torch.zeros(64, 512))
        self.frozen = nn.Linear(512, 512).requires_grad_(False)
        self.above = nn.Linear(512, 8)

    def forward(self, x):
        return self.above(torch.tanh(self.frozen(self.below(x) + self.position.unsqueeze(0))))


def surprises(folder, update):
    """What a program may do besides forward, backward and step; in eval mode, with gradients."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.manual_seed(0)
    alone = Positioned().eval()
    ours = psd.DistributedDataParallel(copy.deepcopy(alone), update=update, scheme="sfb").eval()
    where = psd if update == "server" else torch.optim
    stepper = where.Adam(ours.parameters(), lr=1e-3, eps=1e-4)
    other = torch.optim.Adam(alone.parameters(), lr=1e-3, eps=1e-4)
    average = None
    for step in range(4):
        x = torch.randn(world, 64, 64, generator=torch.Generator().manual_seed(step))
        mine = x[rank : rank + 1].clone().requires_grad_()
        # The gradient of the input alone is nobody else's business.
        torch.autograd.grad(ours(mine).square().mean(), mine)
        for net, part, optimizer in ((ours, mine, stepper), (alone, x, other)):
            optimizer.zero_grad()
            net(part).square().mean().backward()
            optimizer.step()
        if step == 1:
            ours.synchronize()
            average = copy.deepcopy(ours.module)
            kept = average(x).detach()
            psd.save(f"{folder}/{update}", ours, stepper, step=step)
    ours.synchronize()
    # A copy is a model of its own.
    x = torch.randn(world, 64, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(average(x), kept)
    for (name, p), q in zip(ours.module.named_parameters(), alone.named_parameters()):
        torch.testing.assert_close(p, q[1], rtol=1e-4, atol=1e-6, msg=name)
    psd.load(f"{folder}/{update}", ours, stepper)
    ours(mine).square().mean().backward()
    ours.synchronize()
    psd.shutdown()


def test_gradients_of_inputs_copies_frozen_layers_and_views(tmp_path):
    for update in ("worker", "server"):
        run(surprises, 2, folder=str(tmp_path), update=update)
