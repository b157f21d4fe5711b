"""However a worker leaves, the others learn of it at once, and nobody waits for a deadline."""

import os
import sys

import pytest
import torch
from cluster import attempt, run
from torch import nn

# Longer than a test may take: whoever waits for it hangs.
PATIENT = {"POSEIDON_TIMEOUT": "600", "POSEIDON_CONNECT_TIMEOUT": "600"}


def start(**settings):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(0)
    return psd, psd.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), **settings)


def step(model):
    model(torch.randn(4, 8)).sum().backward()


def leave(how, where, who):
    import poseidon

    psd, model = start()
    other = psd.DistributedDataParallel(nn.Linear(8, 8))
    waits = {"model": lambda: step(model), "other model": lambda: step(other), "barrier": psd.barrier}
    try:
        if where != "first step":
            step(model)
            step(other)
        if psd.rank() != who:
            waits.get(where, waits["model"])()
            return "nothing went wrong"
    except poseidon.PoseidonError as error:
        return str(error)
    if how == "exit":
        sys.exit(3)
    try:
        raise ValueError("out of luck")
    finally:
        if how == "shutdown":
            psd.shutdown()


@pytest.mark.parametrize(
    "how, where, who",
    [
        ("raise", "model", 0),
        ("raise", "model", 1),
        ("raise", "barrier", 1),
        ("exit", "first step", 0),
        ("exit", "first step", 1),
        ("exit", "model", 0),
        ("exit", "model", 1),
        ("exit", "other model", 0),
        ("exit", "barrier", 0),
        ("exit", "barrier", 1),
        ("shutdown", "model", 1),
    ],
)
def test_a_worker_that_leaves_is_noticed_wherever_others_wait(how, where, who):
    ended = attempt(leave, 2, timeout=60, environment=PATIENT, how=how, where=where, who=who)
    assert ended[who][0] != 0
    status, words, errors = ended[1 - who]
    expected = "out of luck" if how == "raise" else "finished while others go on"
    assert words is not None and f"worker {who}" in words and expected in words, (words, errors)


def interrupt():
    import signal
    import threading

    psd, model = start()
    step(model)
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=psd.rank() == 0)
    if psd.rank() == 1:
        store.set("here", "yes")
        store.wait(["interrupted"])
        store.set("told", "yes")
        step(model)
        return None
    store.wait(["here"])
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        step(model)
    except KeyboardInterrupt:
        store.set("interrupted", "yes")
        # The store ends with this process.
        store.wait(["told"])
        return "interrupted"


def test_a_wait_can_be_interrupted():
    ended = attempt(interrupt, 2, environment=PATIENT)
    assert ended[0][1] == "interrupted", ended


def fork():
    psd, model = start()
    step(model)
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    step(model)
    psd.shutdown()
    return status


def test_a_forked_child_leaves_by_itself():
    assert run(fork, 2) == [0, 0]


def use_after_fork():
    import poseidon
    from poseidon.torch._job import Job

    psd, model = start()
    step(model)
    session = Job.get()

    def is_refused(call):
        try:
            call()
        except poseidon.PoseidonError as error:
            return f"belongs to process {os.getppid()}" in str(error)
        return False

    child = os.fork()
    if child == 0:
        calls = [session.finish, lambda: session.abort("enough"), lambda: session.gather("topic", "1")]
        # Twice: a session that was refused is still there.
        os._exit(0 if all(is_refused(call) for call in calls + calls) else 1)
    _, status = os.waitpid(child, 0)
    step(model)
    psd.shutdown()
    return status


def test_a_forked_child_does_not_act_as_its_parent():
    assert run(use_after_fork, 2) == [0, 0]


def state_afterwards():
    psd, model = start(update="server")
    optimizer = psd.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model)
    optimizer.step()
    before = optimizer.state_dict()
    psd.shutdown()
    try:
        return before, optimizer.state_dict()
    except RuntimeError as error:
        return before, str(error)


def test_the_shards_state_is_gone_with_the_job():
    for before, after in run(state_afterwards, 2):
        assert len(before["state"]) == 4
        assert "collect it before" in after
