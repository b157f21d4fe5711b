"""Workers that do different things: each of them says what, whose fault it was ends first, and nobody waits for a deadline."""

import atexit
import os
import time
from pathlib import Path

import pytest
import torch
from cluster import attempt
from torch import nn


def train(psd, update="worker", buffers=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if buffers else nn.Identity())
    model = psd.DistributedDataParallel(net, update=update)
    where = psd if update == "server" else torch.optim
    optimizer = where.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def alone(call, buffers):
    """Worker 0 makes a call that all workers have to make, while worker 1 trains on."""
    import poseidon.torch as psd

    psd.init()
    model, optimizer, step = train(psd, "server", buffers)
    if psd.rank() == 0:
        {"state_dict": optimizer.state_dict, "barrier": psd.barrier}[call]()
    for _ in range(3):
        step()


@pytest.mark.parametrize("call, named, buffers", [
    ("state_dict", "optimizer.state_dict()", False),
    ("state_dict", "optimizer.state_dict()", True),
    ("barrier", "barrier", False),
])  # fmt: skip
def test_a_call_of_one_worker_alone_is_named_by_all(call, named, buffers):
    ended = attempt(alone, 2, environment={"POSEIDON_TIMEOUT": "60"}, call=call, buffers=buffers)
    for rank, (status, _, errors) in enumerate(ended):
        assert status != 0
        assert f"worker 0 waits for it in '{named}" in errors and "every worker has to make that call" in errors, (rank, errors)


def fails_and_ends_slowly(folder, who, where):
    """Worker ``who`` fails, and takes a while to end. Each worker notes when it does."""
    import poseidon.torch as psd

    def note():
        if psd_rank == who:
            time.sleep(2.0)
        Path(folder, str(psd_rank)).write_text(str(time.time()))

    # Registered first, called last.
    atexit.register(note)
    psd.init()
    psd_rank = psd.rank()
    _, _, step = train(psd)
    if psd_rank == who and where == "program":
        raise ValueError("out of luck")
    for i in range(3):
        if psd_rank == who:
            # A gradient that cannot be sent.
            raise_in_backward()
        step()


def raise_in_backward():
    import poseidon.torch as psd

    model = next(iter(psd._parallel.MODELS))
    output = model(torch.ones(4, 8))
    model.module[0].weight.data = model.module[0].weight.data.to(torch.bfloat16)
    output.sum().backward()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["program", "backward"])
def test_the_worker_whose_error_it_was_ends_first(tmp_path, who, where):
    ended = attempt(fails_and_ends_slowly, 3, environment={"POSEIDON_TIMEOUT": "600"}, folder=str(tmp_path), who=who, where=where)
    assert all(status != 0 for status, _, _ in ended)
    times = {rank: float(Path(tmp_path, str(rank)).read_text()) for rank in range(3)}
    assert min(times, key=times.get) == who, (times, ended)


def different(what):
    import poseidon
    import poseidon.torch as psd

    psd.init()
    mine = psd.rank() == 1
    net, settings, rate = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), {}, 0.1
    if mine:
        if what == "shape":
            net[0] = nn.Linear(8, 5)
        elif what == "type":
            net[0].bfloat16()
        elif what == "more":
            net.append(nn.Linear(4, 4))
        elif what == "less":
            net[0] = nn.Linear(8, 4, bias=False)
        elif what == "frozen":
            net[0].bias.requires_grad_(False)
        elif what == "buffer":
            net[1] = nn.BatchNorm1d(4, track_running_stats=False)
        elif what == "setting":
            settings["scheme"] = "ps"
        elif what == "rate":
            rate = 0.2
    if what == "rate":
        settings["update"] = "server"
    try:
        model = psd.DistributedDataParallel(net, **settings)
        if what == "rate":
            psd.SGD(model.parameters(), lr=rate)
        model(torch.ones(2, 8)).sum().backward()
    except poseidon.ModelMismatchError as error:
        assert isinstance(error, RuntimeError) and isinstance(error, poseidon.PoseidonError)
        return str(error)


@pytest.mark.parametrize("what, words", [
    ("shape", ["parameter '0.weight'", "float32 [4, 8], trained on worker 0", "float32 [5, 8], trained on worker 1"]),
    ("type", ["parameter '0.weight'", "float32 [4, 8], trained on worker 0", "bfloat16 [4, 8], trained on worker 1"]),
    ("more", ["parameter '2.weight' is missing on worker 0 and float32 [4, 4], trained on worker 1"]),
    ("less", ["parameter '0.bias' is float32 [4], trained on worker 0 and missing on worker 1"]),
    ("frozen", ["parameter '0.bias'", "trained on worker 0", "frozen on worker 1"]),
    ("buffer", ["buffer '1.running_mean' is float32 [4] on worker 0 and missing on worker 1"]),
    ("setting", ["scheme is auto on worker 0 and ps on worker 1"]),
    ("rate", ["optimizer of model 1", "learning rate is 0.1 on worker 0 and 0.2 on worker 1"]),
])  # fmt: skip
def test_models_that_differ_are_told_apart(what, words):
    for _, said, errors in attempt(different, 2, what=what, environment={"POSEIDON_TIMEOUT": "600"}):
        assert said is not None and all(word in said for word in words), (said, errors)


def comes_late():
    import poseidon.torch as psd

    if os.environ["RANK"] == "1":
        # Longer than nobody is told about it.
        time.sleep(8)
    psd.init()
    psd.shutdown()


def test_waiting_says_for_whom():
    (_, _, errors), _ = attempt(comes_late, 2)
    assert "waiting for worker 1, 1 of 2 have joined" in errors, errors
