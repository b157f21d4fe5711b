"""What cannot be right is said, on every rank, with the parameter and the rank."""

import torch
from cluster import attempt
from torch import nn


def guarded(work):
    """What went wrong on this rank, in words."""
    import poseidon
    import poseidon.torch as psd

    psd.init()
    try:
        work(psd)
    except (poseidon.PoseidonError, poseidon.ConfigError, poseidon.UsageError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "nothing went wrong"


def step(model, shape=(2, 8)):
    model(torch.ones(*shape)).sum().backward()


def sparse_gradient():
    def work(psd):
        model = psd.DistributedDataParallel(nn.Embedding(10, 4, sparse=psd.rank() == 1))
        model(torch.tensor([1, 2])).sum().backward()

    return guarded(work)


def complex_parameter():
    def work(psd):
        psd.DistributedDataParallel(nn.Linear(4, 4, dtype=torch.complex64))

    return guarded(work)


def different_models():
    def work(psd):
        layers = [nn.Linear(8, 8), nn.Linear(8, 4 + psd.rank())]
        psd.DistributedDataParallel(nn.Sequential(*layers))

    return guarded(work)


def moved():
    def work(psd):
        model = psd.DistributedDataParallel(nn.Linear(8, 8), scheme="ps")
        step(model)
        model.zero_grad()
        if psd.rank() == 1:
            model.module.to(torch.bfloat16)
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        else:
            step(model)

    return guarded(work)


def second_backward():
    def work(psd):
        model = psd.DistributedDataParallel(nn.Linear(8, 8))
        loss = model(torch.ones(2, 8)).sum()
        loss.backward(retain_graph=True)
        if psd.rank() == 1:
            loss.backward()
        else:
            step(model)

    return guarded(work)


def second_backward_before_the_step():
    def work(psd):
        model = psd.DistributedDataParallel(nn.Linear(8, 8), update="server")
        stepper = psd.SGD(model.parameters(), lr=0.1)
        step(model)
        if psd.rank() == 0:
            stepper.step()
        step(model)
        model.synchronize()

    return guarded(work)


def changed_behind_the_shards():
    def work(psd):
        model = psd.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), update="server")
        stepper = psd.SGD(model.parameters(), lr=0.1)
        step(model)
        stepper.step()
        model.synchronize()
        if psd.rank() == 1:
            with torch.no_grad():
                model.module[1].weight.mul_(2.0)
        step(model)
        model.synchronize()

    return guarded(work)


def no_rule():
    def work(psd):
        step(psd.DistributedDataParallel(nn.Linear(8, 8), update="server"))

    return guarded(work)


def check(function, here, where=(0, 1), **arguments):
    """Every rank of ``where`` fails with all of ``here`` in its message."""
    # Nobody finds out by waiting: the deadline is longer than a test may take.
    ended = attempt(function, 2, environment={"POSEIDON_TIMEOUT": "600"}, **arguments)
    for rank in where:
        words = ended[rank][1]
        assert all(expected in words for expected in here), f"rank {rank}: {words}"


def test_a_sparse_gradient():
    check(sparse_gradient, ["'weight'", "sparse", "worker 1"], where=[0])


def test_a_complex_parameter():
    check(complex_parameter, ["'weight'", "complex64"])


def test_models_that_differ():
    check(different_models, ["1.weight", "[4, 8]", "[5, 8]", "worker 1"])


def test_a_parameter_that_moved():
    check(moved, ["'weight'", "float32", "bfloat16"])


def test_a_second_backward():
    check(second_backward, ["worker 1", "second backward"])


def test_a_second_backward_before_the_step():
    check(second_backward_before_the_step, ["worker 1", "second backward before step"])


def test_parameters_changed_behind_the_shards():
    check(changed_behind_the_shards, ["'1.weight'", "outside its update rule"])


def test_shards_without_a_rule():
    check(no_rule, ["poseidon.torch.SGD"])
