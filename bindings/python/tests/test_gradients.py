"""Whatever a program does to gradients, the same comes out as with torch's own wrapper, and nothing is lost silently."""

import contextlib
import copy

import pytest
import torch
from cluster import attempt, run
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Net(nn.Module):
    """Two layers that go by factors, of which the second one has no bias, and one parameter that does not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.to(self.scale)))) * self.scale


def batch(step, rows=3):
    """This worker's samples."""
    seed = 100 * step + torch.distributed.get_rank()
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))


def loss(model, step):
    return model(batch(step)).square().mean()


def without_sync(model, step):
    with model.no_sync():
        loss(model, step).backward()


def current(model):
    """The module, whose parameters may be read: with steps on the shards they may be on their way."""
    if hasattr(model, "synchronize"):
        model.synchronize()
    return model.module


def is_first():
    return torch.distributed.get_rank() == 0


def set_by_hand(model, _):
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.distributed.get_rank() + 1.0)
    loss(model, 1).backward()


def set_by_hand_on_one_worker(model, _):
    if is_first():
        model.module.second.weight.grad = torch.ones_like(model.module.second.weight)
    loss(model, 1).backward()


def add_gradients_of_a_second_loss(model, _):
    weight = current(model).first.weight
    (gradient,) = torch.autograd.grad(weight.square().sum() + model.module(batch(7)).sum(), weight)
    weight.grad = gradient
    loss(model, 1).backward()


def fill_zeros_in_place(model, optimizer):
    loss(model, 1).backward()
    optimizer.zero_grad(set_to_none=False)
    loss(model, 2).backward()


def add_up_synchronised_gradients(model, _):
    for step in range(3):
        loss(model, step).backward()


def penalise_without_sync(model, _):
    with model.no_sync():
        (loss(model, 1) + model.module.first.weight.square().sum()).backward()
    loss(model, 2).backward()


def penalise_once_of_three(model, _):
    without_sync(model, 1)
    with model.no_sync():
        (loss(model, 2) + model.module.first.weight.square().sum()).backward()
    without_sync(model, 3)
    loss(model, 4).backward()


def penalise_on_one_worker(model, _):
    with model.no_sync():
        (loss(model, 1) + int(is_first()) * model.module.first.weight.square().sum()).backward()
    loss(model, 2).backward()


def penalise_alone(model, _):
    with model.no_sync():
        current(model).second.weight.abs().sum().backward()
    loss(model, 2).backward()


def penalise_in_a_synchronised_pass(model, _):
    (loss(model, 1) + model.module.first.weight.square().sum()).backward()


def penalise_the_gradient_of_the_input(model, _):
    x = batch(1).requires_grad_()
    value = model(x).square().mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    (value + slope.square().sum()).backward()


def scale_the_data(model, _):
    without_sync(model, 1)
    for p in model.parameters():
        p.grad.data.mul_(3.0)
    loss(model, 2).backward()


def edit_with_numpy(model, _):
    without_sync(model, 1)
    for p in model.parameters():
        p.grad.numpy()[...] *= 0.25
    without_sync(model, 2)
    loss(model, 3).backward()


def edit_one_number_on_one_worker(model, _):
    without_sync(model, 1)
    if not is_first():
        model.module.second.weight.grad.numpy()[3, 4] = 1.0
    loss(model, 2).backward()


def replace_gradients(model, _):
    without_sync(model, 1)
    for p in model.parameters():
        p.grad = p.grad.sign()
    loss(model, 2).backward()


def replace_by_the_same(model, _):
    without_sync(model, 1)
    for p in model.parameters():
        p.grad = p.grad.clone()
    loss(model, 2).backward()


def clip_each_micro_batch(model, _):
    for step in range(2):
        without_sync(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    loss(model, 2).backward()


def clip_the_mean(model, _):
    without_sync(model, 1)
    loss(model, 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def drop_one_gradient(model, _):
    without_sync(model, 1)
    model.module.first.weight.grad = None
    loss(model, 2).backward()


def go_past_the_wrapper(model, optimizer):
    model.module(batch(5)).square().mean().backward()
    loss(model, 1).backward()
    optimizer.zero_grad()
    loss(model, 2).backward()
    model.module(batch(3)).square().mean().backward()
    loss(model, 4).backward()


def go_past_the_wrapper_on_one_worker(model, _):
    if is_first():
        model.module(batch(5)).square().mean().backward()
    loss(model, 1).backward()


def use_a_parameter_after_forward(model, _):
    """The gradient of what is used outside comes before the pass reaches the outputs."""
    value = model.module.second(torch.tanh(model.module.first(batch(1).to(model.module.scale)))).detach()
    ((value - model(batch(1))).square().mean() + model.module.scale.square().sum()).backward()


HABITS = [
    set_by_hand, set_by_hand_on_one_worker, add_gradients_of_a_second_loss, fill_zeros_in_place,
    add_up_synchronised_gradients, penalise_without_sync, penalise_once_of_three, penalise_on_one_worker, penalise_alone,
    penalise_in_a_synchronised_pass, penalise_the_gradient_of_the_input, scale_the_data,
    edit_with_numpy, edit_one_number_on_one_worker, replace_gradients, replace_by_the_same, clip_each_micro_batch,
    clip_the_mean, drop_one_gradient, go_past_the_wrapper, go_past_the_wrapper_on_one_worker, use_a_parameter_after_forward,
]  # fmt: skip
# With steps on the shards, every synchronised pass is a step.
STEPPED = [
    set_by_hand, set_by_hand_on_one_worker, add_gradients_of_a_second_loss, penalise_without_sync, penalise_once_of_three,
    penalise_on_one_worker, penalise_alone, scale_the_data, edit_with_numpy, edit_one_number_on_one_worker,
    replace_gradients, replace_by_the_same, clip_each_micro_batch, drop_one_gradient, go_past_the_wrapper_on_one_worker,
]  # fmt: skip


@contextlib.contextmanager
def own_stream(is_wanted):
    """What is done within is done on a stream of the program's own."""
    if not is_wanted:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def same_as_stock(habits, scheme, update="worker", rounds=2, kind=torch.float32, device="cpu", beside=False):
    """After a few rounds of each habit, gradients and parameters are those of stock DDP. Returns how layers went.

    ``beside``: on a stream of the program's own.
    """
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    schemes = {}
    for name in habits:
        torch.manual_seed(0)
        net = Net().to(device, kind)
        models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net))]
        models.append(psd.DistributedDataParallel(net, scheme=scheme, update=update))
        for model, where in zip(models, (torch.optim, psd if update == "server" else torch.optim)):
            optimizer = where.SGD(model.parameters(), lr=0.05)
            with own_stream(beside):
                for _ in range(rounds):
                    optimizer.zero_grad()
                    globals()[name](model, optimizer)
                    optimizer.step()
                current(model)
        for (key, p), q in zip(net.named_parameters(), models[0].parameters()):
            words = f"{name}, {scheme}, {update}: {key}"
            # Matrix products of a GPU add in an order that depends on how many rows there are.
            near = dict(rtol=1e-5, atol=1e-7) if device == "cpu" else dict(rtol=1e-4, atol=1e-6)
            if update == "worker":
                torch.testing.assert_close(p.grad, q.grad, msg=lambda why: f"gradient, {words}: {why}", **near)
            torch.testing.assert_close(p, q, msg=lambda why: f"{words}: {why}", **near)
        schemes[name] = [row[2] for row in models[1].sessions_plan()] if models[1]._session is not None else []
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return schemes


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_gradients_are_what_torch_makes_of_them(scheme):
    names = [habit.__name__ for habit in HABITS]
    for schemes in run(same_as_stock, 2, habits=names, scheme=scheme):
        assert all(how and ("sfb" in how) == (scheme == "sfb") for how in schemes.values()), schemes


def test_gradients_are_what_torch_makes_of_them_with_steps_on_the_shards():
    run(same_as_stock, 2, habits=[habit.__name__ for habit in STEPPED], scheme="sfb", update="server")


def test_three_workers_with_different_gradients():
    names = [habit.__name__ for habit in (set_by_hand_on_one_worker, penalise_on_one_worker, scale_the_data)]
    run(same_as_stock, 3, habits=names, scheme="sfb")


def test_gradients_in_float64():
    names = [habit.__name__ for habit in (add_up_synchronised_gradients, clip_the_mean, set_by_hand_on_one_worker)]
    for schemes in run(same_as_stock, 3, habits=names, scheme="auto", kind=torch.float64):
        assert all(how == ["mean"] for how in schemes.values()), schemes


def test_a_layer_that_always_has_more_than_factors_goes_without_them():
    for schemes in run(same_as_stock, 2, habits=["penalise_on_one_worker"], scheme="sfb", rounds=6):
        # The penalised one together with the small parameter; the other stays.
        assert sorted(schemes["penalise_on_one_worker"]) == ["ps", "sfb"], schemes


def hooked_late(scheme, update, kind):
    """A hook on a weight, registered between two steps: what it saw, and the gradients and weights that came of it."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    results = []
    for name, model in (
        ("stock", nn.parallel.DistributedDataParallel(copy.deepcopy(net))),
        ("ours", psd.DistributedDataParallel(net, scheme=scheme, update=update)),
    ):
        optimizer = (psd if update == "server" and name == "ours" else torch.optim).SGD(model.parameters(), lr=0.05)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            if step == 1 and kind == "gradient":
                # It sees the gradient, and changes it.
                handle = model.module.first.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
            elif step == 1:
                handle = model.module.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            if step == 3:
                handle.remove()
            loss(model, step).backward()
            optimizer.step()
        results.append((seen, [p.detach().clone() for p in current(model).parameters()]))
    torch.distributed.destroy_process_group()
    psd.shutdown()
    (seen, weights), (ours_seen, ours_weights) = results
    assert len(seen) == len(ours_seen) == 2
    for stock, ours in zip([*seen, *weights], [*ours_seen, *ours_weights]):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_that_comes_late_sees_gradients(kind):
    for update in ("worker", "server"):
        run(hooked_late, 2, scheme="sfb", update=update, kind=kind)


def second_gradient_on_the_shards():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(12, 16), scheme="sfb", update="server")
    optimizer = psd.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 12)
    try:
        for penalty in (0.0, 1.0):
            (model(x).square().mean() + penalty * model.module.weight.square().sum()).backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)


def test_a_penalty_that_comes_after_the_factors_on_the_shards_is_an_error():
    for _, words, errors in attempt(second_gradient_on_the_shards, 2):
        assert "'weight'" in words and 'update="worker"' in words, (words, errors)


def whole_gradients_as_factors():
    from poseidon.torch._factors import as_factors

    for shape in ((5, 9), (9, 5), (6, 6)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            linear = nn.Linear(*shape, dtype=dtype)
            linear.weight.grad = torch.randn_like(linear.weight)
            linear.bias.grad = 1e-4 * torch.randn_like(linear.bias)
            # They travel in the layer's type.
            u, v = (factor.to(dtype).float() for factor in as_factors(linear))
            assert len(u) == len(v) == (2 if dtype == torch.float16 else 1) * min(shape) + 1
            assert torch.equal(u.t() @ v, linear.weight.grad.float())
            # In float16 rows of the weight's size cancel out, but for rounding in float32.
            atol = 1e-6 if dtype == torch.float16 else 1e-11
            torch.testing.assert_close(u.sum(0), linear.bias.grad.float(), rtol=1e-6, atol=atol)


def test_a_whole_gradient_as_factors():
    whole_gradients_as_factors()


def test_checksums_see_every_change():
    from poseidon.torch._checksum import Trace, awaited, checksum

    gradient = torch.randn(20, 30)
    # A stand-in for a tensor on a device, whose sums are made there.
    before, sums = checksum([gradient, None]), _sums(gradient)
    assert checksum([None, None]) == 0 != before
    assert checksum([None, gradient]) != before == checksum([gradient.clone(), None])
    # The first one does what is done on a device, where nobody waits for each answer.
    traces = [Trace(torch.device(kind)) for kind in ("cuda", "cpu")]
    for change in (lambda g: g.neg_(), lambda g: g[3, 4].add_(1e-6), lambda g: g[[0, 1]].copy_(g[[1, 0]]), lambda g: g.zero_()):
        other = gradient.clone()
        change(other)
        changed = not torch.equal(other, gradient)
        assert (checksum([other, None]) != before) == changed == (_sums(other) != sums)
        for trace in traces:
            trace.begin()
            trace.leave([gradient, None])
            assert not trace.look([gradient.clone(), None]) and not awaited([trace.changes])[0]
            assert trace.look([None, gradient])
            # What was seen once is not forgotten.
            was_seen = trace.look([other, None])
            trace.leave([other, None])
            assert (trace.look([other, None]) or was_seen or awaited([trace.changes])[0]) == changed
    assert checksum([gradient.t()]) == checksum([gradient.t().contiguous()]) != checksum([gradient])
    # As many signs turn one way as the other.
    even = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert _sums(even) != _sums(-even)
    # All bits turn: in bfloat16, 1.0 becomes -3.984375.
    for kind, bits in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        for shape in ((1,), (1, 1), (3, 4)):
            ones = torch.ones(shape, dtype=kind)
            assert _sums(ones) != _sums((~ones.view(bits)).view(kind)), kind


def test_checksums_are_made_in_blocks(monkeypatch):
    from poseidon.torch import _checksum

    for shape in ((20, 30), (7,), (5, 1), (1, 50), (3, 0), (0,)):
        for kind in (torch.float32, torch.bfloat16):
            values = torch.randn(shape).to(kind)
            whole = _sums(values)
            assert len(whole) == shape[0]
            for block in (1, 31, 64):
                monkeypatch.setattr(_checksum, "_BLOCK", block)
                assert _sums(values) == whole, (shape, kind, block)
            monkeypatch.undo()


def _sums(values):
    from poseidon.torch._checksum import _sums_of_bits

    return _sums_of_bits(values).tolist()


class Waits(TorchFunctionMode):
    """Counts how often a thread would wait for a GPU."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.cpu)
        return function(*args, **(kwargs or {}))


class Owner:
    _members = {}


def test_a_gpu_is_awaited_once_for_all_layers():
    from poseidon.torch._checksum import Trace
    from poseidon.torch._factors import Factored, settle, take_gradients

    torch.manual_seed(0)
    owner = Owner()
    layers = [Factored(owner, nn.Linear(4, 3, bias=bias), "weight") for bias in (True, False, True, True)]
    for layer in layers:
        # What is done on a device.
        layer.trace = Trace(torch.device("cuda"))
    for layer in layers[:3]:
        for _ in range(2):
            layer._keep(torch.randn(2, 3), torch.randn(2, 4))
    layers[1].linear.weight.grad.data.mul_(2.0)
    with Waits() as waits:
        settle(layers)
    # The second one's gradient was changed, and goes itself; the last one has none.
    assert waits.count == 1 and [len(layer.parts) for layer in layers] == [2, 0, 2, 0]
    assert [layer.linear.weight.grad is None for layer in layers] == [True, False, True, True]
    # Zeros are no gradient.
    layers[3].linear.bias.grad = torch.zeros(3)
    with Waits() as waits:
        take_gradients(layers)
    assert waits.count == 1 and [len(layer.parts) for layer in layers] == [2, 1, 2, 0]
    assert all(p.grad is None for layer in layers for p in layer.linear.parameters())
    # Nothing was accumulated, so there is nothing to ask for.
    for layer in layers:
        layer.reset()
    with Waits() as waits:
        settle(layers)
        take_gradients(layers)
    assert waits.count == 0


# Types that a Linear layer of float32 does not take, and some that it does.
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def outcome(model, x, autocast):
    """The type that comes out and a gradient, or what torch says."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            result = model(x)
        result.float().square().mean().backward()
        return result.dtype, model.module.weight.grad.clone()
    except Exception as error:
        return type(error), str(error)


def inputs_of_all_types(update):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(12, 16)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
    ours = psd.DistributedDataParallel(net, scheme="sfb", update=update)
    pairs = []
    inputs = [torch.ones(3, 12).to(kind) for kind in KINDS]
    inputs += [torch.ones(12), torch.tensor(1.0), torch.ones(3, 11), [[1.0] * 12], None, torch.ones(2, 3, 12)]
    for autocast in (False, True):
        for x in inputs:
            pair = []
            for model in (stock, ours):
                model.zero_grad()
                pair.append(outcome(model, x, autocast))
            pairs.append((autocast, getattr(x, "dtype", x), *pair))
    torch.distributed.destroy_process_group()
    psd.shutdown()
    return pairs


def test_a_layer_takes_what_torch_takes_and_refuses_the_rest_in_the_same_words():
    for pairs in run(inputs_of_all_types, 2, update="worker"):
        assert any(isinstance(stock[1], str) for *_, stock, _ in pairs)
        for autocast, x, stock, ours in pairs:
            assert stock[0] == ours[0], (autocast, x, stock, ours)
            if isinstance(stock[1], str):
                assert stock[1] == ours[1], (autocast, x, stock, ours)
            else:
                torch.testing.assert_close(ours[1], stock[1], rtol=0.02 if autocast else 1e-5, atol=1e-6)


def memory_of_gradients(update):
    """Whether large gradients went out from their own memory in every step, and whether the wrapper kept none of them."""
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(200, 300), scheme="ps", update=update)
    doubles = psd.DistributedDataParallel(nn.Linear(20, 30).double())
    optimizer = (psd if update == "server" else torch.optim).SGD(model.parameters(), lr=0.1)
    in_place, kept = [], []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        doubles.zero_grad(set_to_none=False)
        model(torch.ones(3, 200)).square().mean().backward()
        doubles(torch.ones(3, 20, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        model.synchronize()
        (large,) = [unit for unit in model._units if unit.len == 200 * 300]
        in_place.append(large.stage is None)
        kept.append(any(unit.result is not None for unit in (*model._units, *doubles._units)))
    psd.shutdown()
    return in_place, kept


@pytest.mark.parametrize("update", ["worker", "server"])
def test_a_gradient_goes_out_from_its_own_memory_and_is_not_kept(update):
    for in_place, kept in run(memory_of_gradients, 2, update=update):
        assert all(in_place) and not any(kept), (in_place, kept)
