"""Models are copied, saved whole, wrapped again and let go of as with torch's own wrapper."""

import copy
import gc
import io
import os
import weakref

import pytest
import torch
from cluster import run
from torch import nn

UPDATES = ["worker", "server"]


def wrapped(psd, module, update="worker", **settings):
    """A model, and the optimizer that belongs to its way of updating."""
    model = psd.DistributedDataParallel(module, update=update, **settings)
    return model, (psd if update == "server" else torch.optim).SGD(model.parameters(), lr=0.1)


def step(model, optimizer, seed, width=20):
    optimizer.zero_grad()
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


def small():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Sequential(nn.Linear(30, 10)))


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    assert b"poseidon" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def assert_plain(module):
    new = small()
    for got, expected in zip(module.modules(), new.modules()):
        assert got.__dict__.keys() == expected.__dict__.keys()
        assert not got._forward_pre_hooks and not got._state_dict_pre_hooks


def copies_of_modules(update):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(psd.rank())
    model, optimizer = wrapped(psd, small(), update, scheme="sfb")
    for s in range(2):
        step(model, optimizer, 10 * s + psd.rank())
    # With update="server" the last step's parameters are still on their way.
    copies = [copy.deepcopy(model.module), copy.deepcopy(model.module[2])]
    step(model, optimizer, 20 + psd.rank())
    copies.append(saved_and_loaded(model.module))
    assert_plain(copies[0])
    assert_plain(copies[2])
    model.synchronize()
    for mine, saved in zip(model.parameters(), copies[2].parameters()):
        assert torch.equal(mine, saved)
    # They are nobody's: what they learn stays here, and the model goes on.
    if psd.rank() == 0:
        copies[0](torch.ones(1, 20)).sum().backward()
    step(model, optimizer, 30 + psd.rank())
    again, optimizer = wrapped(psd, copies[2], update, scheme="sfb")
    step(again, optimizer, 40 + psd.rank())
    assert {row[2] for row in again.sessions_plan()} == {"sfb"}
    again.synchronize()
    values = [p.detach().clone() for m in (copies[0], copies[1], again) for p in m.parameters()]
    psd.shutdown()
    return values


@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_of_a_module_is_a_plain_module(update):
    first, second = run(copies_of_modules, 2, update=update)
    for mine, theirs in zip(first, second):
        assert torch.equal(mine, theirs)


def wrapped_again(update):
    import poseidon.torch as psd

    psd.init()
    rank, values = psd.rank(), []
    # Who still holds the first wrapper is not the same everywhere.
    for holders in ((), (0,), (0, 1)):
        torch.manual_seed(rank)
        net = small()
        net[0].requires_grad_(False)
        model, optimizer = wrapped(psd, net, update, scheme="sfb")
        step(model, optimizer, rank)
        before = model if rank in holders else None
        del model, optimizer  # with update="server" parameters are still on their way
        net.requires_grad_(True)
        model, optimizer = wrapped(psd, net, update, scheme="sfb")
        for s in range(2):
            step(model, optimizer, 10 * s + rank)
        if before is not None:
            with pytest.raises(RuntimeError, match="wrapped again"):
                before(torch.ones(1, 20))
        model.synchronize()
        assert [row[0] for row in model.sessions_plan()] == ["0.weight", "2.0.weight"]
        values.extend(p.detach().clone() for p in net.parameters())
    psd.shutdown()
    return values


@pytest.mark.parametrize("update", UPDATES)
def test_a_module_is_wrapped_again_when_it_is_unfrozen(update):
    first, second = run(wrapped_again, 2, update=update)
    for mine, theirs in zip(first, second):
        assert torch.equal(mine, theirs)


def let_go(how):
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    for update in UPDATES:
        net = small()
        model, optimizer = wrapped(psd, net, update, scheme="sfb")
        step(model, optimizer, rank)
        loss = model(torch.ones(1 + rank, 20)).sum()
        if how == "close":
            model.close()
            with pytest.raises(RuntimeError, match="closed"):
                model(torch.ones(1, 20))
        del model, optimizer
        assert_plain(net)
        # Its gradients are this worker's own now, of graphs from before as well.
        net.zero_grad()
        loss.backward()
        local = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(torch.ones(1 + rank, 20)).sum().backward()
        for mine, p in zip(local, net.parameters()):
            torch.testing.assert_close(mine, p.grad)
    psd.shutdown()


@pytest.mark.parametrize("how", ["close", "delete"])
def test_a_module_without_its_wrapper_is_plain(how):
    run(let_go, 2, how=how)


def freed_at_once(update):
    import poseidon.torch as psd

    psd.init()
    gc.collect()
    gc.disable()
    net = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))
    model, optimizer = wrapped(psd, net, update=update)
    step(model, optimizer, 0)
    held = [weakref.ref(net), weakref.ref(net[0].weight), weakref.ref(model), *map(weakref.ref, model._units)]
    model.close()
    # Whoever waits for others has what it waits with until then.
    psd.shutdown()
    del model, net, optimizer
    return [reference() is None for reference in held]


@pytest.mark.parametrize("update", UPDATES)
def test_memory_does_not_wait_for_garbage_collection(update):
    for gone in run(freed_at_once, 2, update=update):
        assert all(gone), gone


def many_models():
    import poseidon.torch as psd

    psd.init()
    kept, used = [], []
    for number in range(12):
        model, optimizer = wrapped(psd, small(), UPDATES[number % 2])
        step(model, optimizer, psd.rank())
        if number == 5 and psd.rank() == 1:
            kept.append(model)
        used.append([len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")])
    psd.shutdown()
    return used


def test_models_share_connections_and_leave_nothing_behind():
    for used in run(many_models, 2):
        threads, descriptors = zip(*used)
        # The first model starts what torch and its optimizer keep.
        assert descriptors[-1] == descriptors[1], descriptors
        # A model that goes by factors has a thread that rebuilds gradients: one is kept, and one is to be ended by
        # the next.
        assert threads[-1] <= threads[1] + 2, threads


def copies_of_models(update):
    import poseidon.torch as psd

    psd.init()
    rank = psd.rank()
    torch.manual_seed(rank)
    module = nn.Sequential(small(), nn.BatchNorm1d(10))
    model, optimizer = wrapped(psd, module, update, scheme="sfb", find_unused_parameters=update == "worker")
    model.label = "mine"
    step(model, optimizer, rank)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    step(model, optimizer, 10 + rank)
    model.synchronize()
    average.update_parameters(model)
    file = io.BytesIO()
    if rank == 0:  # copies that are only looked at are nobody else's business
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False).requires_grad_(False)
        for mine, theirs in zip(loaded.parameters(), model.parameters()):
            assert torch.equal(mine, theirs)
        with torch.no_grad():
            loaded.eval()(torch.ones(2, 20)), average.eval()(torch.ones(2, 20))
    # The copy trains apart from the model, in the same way.
    assert twin.label == "mine" and twin.find_unused_parameters == model.find_unused_parameters
    if rank == 1:
        with torch.no_grad():
            twin.module[0][0].weight.zero_()  # as rank 0 begins, so do all
    optimizers = optimizer, (psd if update == "server" else torch.optim).SGD(twin.parameters(), lr=0.1)
    for s in range(3):
        for net, stepper in zip((model, twin), optimizers):
            step(net, stepper, 20 + 10 * s + rank)
    assert {row[2] for row in twin.sessions_plan()} == {row[2] for row in model.sessions_plan()}
    for net in (model, twin):
        net.synchronize()
    values = [p.detach().clone() for net in (model, twin, average) for p in net.parameters()]
    psd.shutdown()
    return values


@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_of_a_model_is_a_model_of_its_own(update):
    first, second = run(copies_of_models, 2, update=update)
    third = len(first) // 3
    for mine, theirs in zip(first, second):
        assert torch.equal(mine, theirs)
    for trained, apart in zip(first[:third], first[third : 2 * third]):
        assert not torch.equal(trained, apart)


def arguments():
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    everybody = torch.distributed.new_group([0, 1])
    alone = torch.distributed.new_group([psd.rank()], use_local_synchronization=True)
    net = small()
    for taken in (dict(dim=0, init_sync=True, check_reduction=False, mixed_precision=None), dict(process_group=everybody)):
        psd.DistributedDataParallel(net, **taken)
    with pytest.raises(ValueError, match="process_group has 1 workers"):
        psd.DistributedDataParallel(net, process_group=alone)
    with pytest.raises(ValueError, match="torch.autocast"):
        psd.DistributedDataParallel(net, mixed_precision=object())
    model = psd.DistributedDataParallel(net, update="server")
    for rule in (psd.SGD, psd.Adam, psd.AdamW):
        rule(model.parameters(), lr=0.1, foreach=True, fused=None)
        for setting in (dict(lr=-1), dict(lr=float("nan")), dict(weight_decay=-0.1)):
            with pytest.raises(ValueError, match="expected 0 or more"):
                rule(model.parameters(), **setting)
    with pytest.raises(ValueError, match="nesterov"):
        psd.SGD(model.parameters(), nesterov=True)
    with pytest.raises(ValueError, match="betas"):
        psd.Adam(model.parameters(), betas=(0.9, 1.0))
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_arguments_of_torchs_wrapper_and_optimizers():
    run(arguments, 2)
