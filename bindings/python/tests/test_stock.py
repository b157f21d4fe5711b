"""Programs that stock DDP trains: Poseidon's wrapper gives the same, or an error in words."""

import copy
import dataclasses
import pickle

import pytest
import torch
from cluster import attempt, run
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """A layer that goes by factors, one that does not, and outputs of several kinds."""

    def __init__(self, gives="tensor"):
        super().__init__()
        self.gives = gives
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x):
        result = self.last(torch.tanh(self.first(x))) * self.scale
        if self.gives == "object":
            return Opaque(result), result.mean()
        if self.gives == "dataclass":
            return Plain(result), result.mean()
        self.kept = result
        return result[:, 1:9]


class Opaque:
    def __init__(self, result):
        self.result = result


@dataclasses.dataclass
class Plain:
    result: torch.Tensor


def batch(step):
    """This worker's samples."""
    seed = 100 * step + torch.distributed.get_rank()
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(seed))


def loss(result):
    return result.square().mean()


# What a program does before each step of its optimizer.


def change_an_output_in_place(model, step):
    result = model(batch(step))
    result += 1
    loss(result).backward()


def use_an_object(model, step):
    model.module.gives = "object"
    result, _ = model(batch(step))
    loss(result.result).backward()


def use_a_dataclass(model, step):
    model.module.gives = "dataclass"
    result, _ = model(batch(step))
    loss(result.result).backward()


def use_what_the_module_kept(model, step):
    model(batch(step))
    loss(model.module.kept).backward()


def accumulate_what_the_module_kept(model, step):
    with model.no_sync():
        model(batch(step))
        loss(model.module.kept).backward()
    use_what_the_module_kept(model, step + 50)


def go_past_the_wrapper_after_a_forward(model, step):
    model(batch(step))
    loss(model.module(batch(step + 50))).backward()


def go_past_the_wrapper_only(model, step):
    model(batch(step))
    loss(model(batch(step))).backward()
    loss(model.module(batch(step + 50))).backward()


def go_forward_without_sync(model, step):
    with model.no_sync():
        value = loss(model(batch(step)))
    value.backward()


def go_backward_without_sync(model, step):
    value = loss(model(batch(step)))
    with model.no_sync():
        value.backward()


def prepare_by_hand(model, step):
    with model.no_sync():
        value = loss(model(batch(step)))
    model.reducer.prepare_for_backward([])
    value.backward()


HABITS = [
    change_an_output_in_place, use_an_object, use_a_dataclass, use_what_the_module_kept, accumulate_what_the_module_kept,
    go_past_the_wrapper_after_a_forward, go_backward_without_sync, prepare_by_hand,
]  # fmt: skip
# Gradients stay each worker's own after them, and so do parameters.
LOCAL = [go_past_the_wrapper_only, go_forward_without_sync]


def same_as_stock(habits, scheme, update="worker"):
    """After three steps of each habit, gradients and parameters are those of stock DDP."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for name in habits:
        torch.manual_seed(0)
        net = Net()
        models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net))]
        models.append(psd.DistributedDataParallel(net, scheme=scheme, update=update))
        for model, where in zip(models, (torch.optim, psd if update == "server" else torch.optim)):
            optimizer = where.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                globals()[name](model, step)
                optimizer.step()
        models[1].synchronize()
        for (key, p), q in zip(net.named_parameters(), models[0].parameters()):
            words = f"{name}, {scheme}, {update}: {key}"
            if update == "worker":
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=lambda why: f"{words}, gradient: {why}")
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=lambda why: f"{words}: {why}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_what_is_synchronised_is_what_torch_synchronises(scheme):
    run(same_as_stock, 2, habits=[habit.__name__ for habit in (*HABITS, *LOCAL)], scheme=scheme)


def test_what_the_shards_step_is_what_torch_synchronises():
    run(same_as_stock, 2, habits=[habit.__name__ for habit in HABITS], scheme="sfb", update="server")


class Deep(nn.Module):
    """Layers whose results are changed in-place, with inputs of one to four dimensions."""

    def __init__(self, bias):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16, bias=bias), nn.ReLU(inplace=True), nn.Linear(16, 10, bias=bias))

    def forward(self, x):
        result = self.layers(x)
        result += 1
        return result


def changes_in_place():
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    generator = torch.Generator().manual_seed(psd.rank())
    for bias in (True, False):
        for shape in ((12,), (3, 12), (2, 3, 12), (2, 0, 12), (2, 1, 3, 12)):
            torch.manual_seed(0)
            net = Deep(bias)
            stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))
            ours = psd.DistributedDataParallel(net, scheme="sfb", batch=6)
            # Layers go by factors from the second step on.
            for _ in range(2):
                x = torch.randn(shape, generator=generator)
                results = [model(x) for model in (stock, ours)]
                torch.testing.assert_close(results[1], results[0])
                for model, result in zip((stock, ours), results):
                    model.zero_grad()
                    result.square().sum().backward()
                assert {row[2] for row in ours.sessions_plan()} == {"sfb"}
                for p, q in zip(ours.parameters(), stock.parameters()):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_results_of_layers_may_be_changed_in_place():
    run(changes_in_place, 2)


def late_rates(setting):
    """What a program is told that changes a setting between backward and step."""
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(8, 8), update="server")
    optimizer = psd.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 + step
        model(torch.ones(2, 8)).square().mean().backward()
        if step == 0:
            optimizer.step()
    optimizer.param_groups[0][setting] = 0.5
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    psd.shutdown()
    return str(error.value)


@pytest.mark.parametrize(
    "setting, words",
    [("lr", ["[1.1]", "[0.5]", "before backward or after step"]), ("momentum", ["momentum=0.5"])],
)
def test_a_setting_changed_between_backward_and_step_is_an_error(setting, words):
    for told in run(late_rates, 2, setting=setting):
        assert all(word in told for word in words), told


def average(model, step, kept):
    """An average of weights, by torch's functions."""
    parameters = list(model.parameters())
    if not kept:
        kept.extend(p.detach().clone() for p in parameters)
    torch._foreach_lerp_(kept, parameters, 0.5)


def average_data(model, step, kept):
    if not kept:
        kept.extend(p.data.clone() for p in model.parameters())
    for average, p in zip(kept, model.parameters()):
        average.mul_(0.5).add_(p.data, alpha=0.5)


def take_norms(model, step, kept):
    kept.extend(p.norm() for p in model.parameters())
    kept.append(nn.utils.parameters_to_vector(model.parameters()).norm())


def copy_all(model, step, kept):
    kept.extend(copy.deepcopy(list(model.parameters())))
    kept.extend(copy.deepcopy(model.module).parameters())
    kept.extend(pickle.loads(pickle.dumps(list(model.parameters()))))
    assert {type(p) for p in kept} == {nn.Parameter}


def take_arrays(model, step, kept):
    kept.extend(torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters())


LOOKS = [average, average_data, take_norms, copy_all, take_arrays]


def looked_at(scheme):
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for look in LOOKS:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 300))
        seen = []
        for wrapper, where in ((nn.parallel.DistributedDataParallel, torch.optim), (psd.DistributedDataParallel, psd)):
            kept = []
            settings = {} if where is torch.optim else dict(scheme=scheme, update="server")
            model = wrapper(copy.deepcopy(net), **settings)
            optimizer = where.SGD(model.parameters(), lr=1.0)
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            for step in range(3):
                optimizer.zero_grad()
                loss(model(torch.randn(2, 300, generator=generator))).backward()
                optimizer.step()
                look(model, step, kept)
            seen.append(kept)
        for theirs, ours in zip(*seen):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda why: f"{look.__name__}: {why}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_parameters_that_are_on_their_way_are_awaited_by_who_looks_at_them(scheme):
    run(looked_at, 2, scheme=scheme)


def clamp(model):
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


def look_before_the_step(model):
    nn.utils.parameters_to_vector(model.parameters())


def meddled(meddle):
    """What a program is told that changes or reads parameters which the shards have."""
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(nn.Linear(8, 8), update="server")
    optimizer = psd.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as error:
        for _ in range(2):
            model(torch.ones(2, 8)).square().mean().backward()
            if meddle is look_before_the_step:
                meddle(model)
            optimizer.step()
            meddle(model)
    return str(error.value)


@pytest.mark.parametrize(
    "meddle, words",
    [(clamp, 'needs update="worker"'), (look_before_the_step, "'weight' was looked at between")],
)
def test_parameters_that_cannot_be_what_torch_has_are_an_error(meddle, words):
    for _, told, errors in attempt(meddled, 2, meddle=meddle):
        assert told is not None and words in told, (told, errors)


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


def prune_a_weight(linear):
    prune.l1_unstructured(linear, "weight", amount=0.5)


def prune_a_bias(linear):
    prune.l1_unstructured(linear, "bias", amount=0.5)


def halve_a_weight(linear):
    parametrize.register_parametrization(linear, "weight", Halved())


def reshaped(changes, update, when):
    """A layer by factors whose weight or bias is made of another tensor from step ``when`` on."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for change in changes:
        torch.manual_seed(0)
        net = Net()
        models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net))]
        models.append(psd.DistributedDataParallel(net, scheme="sfb", update=update, batch=3))
        for model, where in zip(models, (torch.optim, psd if update == "server" else torch.optim)):
            optimizer = where.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                if step == when:
                    change(model.module.first)
                    if model is models[0] and change is halve_a_weight:
                        # torch's wrapper loses a parameter that gets a parametrization.
                        model = nn.parallel.DistributedDataParallel(model.module)
                optimizer.zero_grad()
                loss(model(batch(step))).backward()
                optimizer.step()
        models[1].synchronize()
        for (key, p), q in zip(net.named_parameters(), models[0].parameters()):
            words = f"{change.__name__}, {update}: {key}"
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=lambda why: f"{words}: {why}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("when", [0, 2])
def test_layers_that_are_pruned_or_parametrized_later(update, when):
    changes = [prune_a_weight, prune_a_bias, halve_a_weight]
    if update == "server" and when > 0:
        # Torch counts a parametrization as a change of the parameter.
        changes.remove(halve_a_weight)
        for _, _, errors in attempt(reshaped, 2, changes=[halve_a_weight], update=update, when=when):
            assert "'first.weight' was changed outside its update rule" in errors
    run(reshaped, 2, changes=changes, update=update, when=when)


def scale(parameter):
    parameter.grad.mul_(torch.distributed.get_rank() + 2)


def replace(parameter):
    parameter.grad = parameter.grad.sign()


def step_at_once(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def accumulated_late(hooks, scheme, update="worker"):
    """Hooks registered after wrapping see, and may change, what this worker's pass has made."""
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    for hook in hooks:
        torch.manual_seed(0)
        # The gradient of the first weight is large enough to go out from its own memory.
        net = nn.Sequential(nn.Linear(12, 2000), nn.Tanh(), nn.Linear(2000, 10))
        models = [nn.parallel.DistributedDataParallel(copy.deepcopy(net))]
        models.append(psd.DistributedDataParallel(net, scheme=scheme, update=update))
        seen = []
        for model, where in zip(models, (torch.optim, psd if update == "server" else torch.optim)):
            optimizer = where.SGD(model.parameters(), lr=0.1)
            own = []
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: own.append(p.grad.clone()))
                p.register_post_accumulate_grad_hook(hook)
            for step in range(3):
                optimizer.zero_grad()
                loss(model(batch(step))).backward()
                if hook is not step_at_once:
                    optimizer.step()
            seen.append(sorted(own, key=torch.Tensor.numel))
        for theirs, ours in zip(*seen):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda why: f"{hook.__name__}: {why}")
        for p, q in zip(net.parameters(), models[0].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=lambda why: f"{hook.__name__}: {why}")
    torch.distributed.destroy_process_group()
    psd.shutdown()


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_hooks_registered_after_wrapping_see_what_they_see_with_torch(scheme):
    run(accumulated_late, 2, hooks=[scale, replace, step_at_once], scheme=scheme)
    run(accumulated_late, 2, hooks=[scale, replace], scheme=scheme, update="server")


def asks_for_repeatable_runs():
    """Rank 0 asks torch, and rank 1 the wrapper. Returns what they are told if they differ."""
    import poseidon
    import poseidon.torch as psd

    psd.init()
    torch.use_deterministic_algorithms(psd.rank() == 0)
    psd.DistributedDataParallel(nn.Linear(3, 3), deterministic=True if psd.rank() == 1 else None)
    with pytest.raises(poseidon.ModelMismatchError) as error:
        psd.DistributedDataParallel(nn.Linear(3, 3))
    psd.shutdown()
    return str(error.value)


def test_what_torch_is_told_of_determinism_holds():
    for told in run(asks_for_repeatable_runs, 2):
        assert "deterministic is True on worker 0 and False on worker 1" in told


def share_a_module():
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    shared = nn.Linear(12, 16)
    first = psd.DistributedDataParallel(nn.Sequential(shared, nn.Linear(16, 3)))
    value = first(torch.ones(2, 12)).sum()
    second = psd.DistributedDataParallel(nn.Sequential(shared, nn.Linear(16, 4)), init_sync=False)
    told = []
    for call in (value.backward, lambda: first(torch.ones(2, 12))):
        with pytest.raises(RuntimeError) as error:
            call()
        told.append(str(error.value))
    # The second one works. The mean of the input is 1.5.
    second.zero_grad()
    second(torch.full((2, 12), psd.rank() + 1.0)).sum().backward()
    torch.testing.assert_close(shared.weight.grad[:, 0], 3 * second.module[1].weight.detach().sum(0))
    psd.shutdown()
    return told


def test_two_wrappers_of_one_module_are_an_error_in_words():
    for told in run(share_a_module, 2):
        assert len(told) == 2 and all("or a part of it, was wrapped again" in words for words in told), told


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 10)

    def forward(self, x):
        hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return Opaque(checkpoint(self.last, hidden, use_reentrant=True))


def reentrant_passes():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(Checkpointed(), find_unused_parameters=True)
    with pytest.raises(RuntimeError) as error:
        loss(model(torch.ones(3, 12)).result).backward()
    return str(error.value)


def test_checkpoints_whose_passes_end_too_early_are_an_error():
    for _, told, errors in attempt(reentrant_passes, 2):
        assert told is not None and "use_reentrant=False" in told, (told, errors)
