"""What a job shows of itself."""

import itertools
import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import all_say, attempt, free_port, run
from torch import nn

STEPS = 3


def train(steps=STEPS):
    import poseidon.torch as psd

    torch.manual_seed(1)
    model = psd.DistributedDataParallel(nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()
    return [name for name, *_ in model._session.plan()]


def events(path, category):
    trace = json.loads(Path(path).read_text())
    found = [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] != "e"]
    return {(event["args"]["layer"], event["args"]["step"]) for event in found}, trace["otherData"]["poseidon"]


def trained():
    import poseidon.torch as psd

    psd.init()
    return train()


def test_a_trace_has_every_layer_of_every_step(tmp_path, monkeypatch):
    monkeypatch.setenv("POSEIDON_TRACE", str(tmp_path / "t.json"))
    layers = run(trained, 2)[0]
    assert layers
    for rank in range(2):
        for category in ["send", "wait", "layer"]:
            found, about = events(tmp_path / f"t.rank{rank}.json", category)
            assert {(layer, step) for layer in layers for step in range(1, STEPS + 1)} <= found, category
        # A backward pass is cut where the model's layers are sent. A forward pass of PyTorch names none.
        computed = [layer for layer in layers if "." in layer]
        backward, _ = events(tmp_path / f"t.rank{rank}.json", "backward")
        assert computed and {(layer, step) for layer in computed for step in range(1, STEPS + 1)} <= backward
        forward, about = events(tmp_path / f"t.rank{rank}.json", "forward")
        # The plan is made after the first forward, which shows what there is to plan.
        assert {("", step) for step in range(2, STEPS + 1)} <= forward
        assert any(session["compute_seconds"] for session in about["sessions"])
        assert about["node"] == rank and about["failure"] is None


def fails():
    import poseidon.torch as psd

    psd.init()
    train()
    if psd.rank() == 1:
        raise ValueError("a mistake of this worker")
    train(1)


def test_a_job_that_fails_leaves_its_traces(tmp_path):
    ended = attempt(fails, 2, environment={"POSEIDON_REPORT": str(tmp_path / "seen")})
    assert all(status != 0 for status, _, _ in ended), ended
    failures = [events(tmp_path / "seen" / f"trace.rank{rank}.json", "wait")[1]["failure"] for rank in range(2)]
    assert all("a mistake of this worker" in failure for failure in failures), failures


def reports(folder, command):
    import poseidon.torch as psd
    from poseidon import _command

    _command.COMMAND = Path(command)
    psd.init()
    with pytest.raises(ValueError, match="record"):
        psd.report(folder)
    psd.record()
    layers = train()
    return layers, psd.report(folder)


def test_a_program_may_ask_for_a_report(tmp_path):
    # Stands for the command of the wheel: `cargo xtask test` does not build one.
    command = tmp_path / "poseidon"
    command.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.argv[2] + '/job.html')\n")
    command.chmod(0o755)
    folder = tmp_path / "seen"
    (layers, page), (_, nothing) = run(reports, 2, folder=str(folder), command=str(command))
    assert (page, nothing) == (f"{folder}/job.html", None)
    for rank in range(2):
        found, _ = events(folder / f"trace.rank{rank}.json", "wait")
        assert {(layer, STEPS) for layer in layers} <= found


def scraped():
    import poseidon.torch as psd

    psd.init()
    train()
    psd.barrier()
    with urllib.request.urlopen(f"http://{psd.metrics_address()}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    psd.barrier()
    return text


def test_metrics_are_served(monkeypatch):
    monkeypatch.setenv("POSEIDON_METRICS", "127.0.0.1:0")
    for rank, text in enumerate(run(scraped, 2)):
        steps = [line for line in text.splitlines() if line.startswith("poseidon_steps_total")]
        assert any(f'node="worker {rank}"' in line and line.endswith(f" {STEPS}") for line in steps), steps
        assert "poseidon_layer_wait_seconds_total" in text


TAGS = ["poseidon/seconds_per_step", "poseidon/waiting_share", "poseidon/sent_bytes_per_second"]


def scalars_of(folder):
    """What TensorBoard itself reads: by tag, the last step and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    return {tag: (event.step, event.value) for tag, event in last.items()}


def shows_scalars(folder):
    import poseidon.torch as psd

    psd.init()
    own = Path(folder) / f"rank{psd.rank()}"
    train(1)
    psd.scalar("loss", torch.tensor(0.25 + psd.rank()))
    # They are written about once a second. Who trains on alone would wait for the other one.
    deadline = time.monotonic() + 60
    for turn in itertools.count():
        found = scalars_of(own)
        if all_say(folder, turn, psd.rank(), 2, {*TAGS, "loss"} <= set(found)):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        train(1)


def test_tensorboard_reads_scalars(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("POSEIDON_TENSORBOARD", str(tmp_path))
    for rank, found in enumerate(run(shows_scalars, 2, folder=str(tmp_path))):
        step, loss = found["loss"]
        assert step >= 1 and loss == 0.25 + rank, found
        assert found["poseidon/seconds_per_step"][1] > 0, found
        assert 0 <= found["poseidon/waiting_share"][1] <= 1, found


def collectives(port):
    import poseidon._c10d_register

    poseidon._c10d_register.register()
    dist.init_process_group("poseidon")
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(STEPS):
        dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10), 0)
    # Ports of process groups come after those of sessions.
    with urllib.request.urlopen(f"http://127.0.0.1:{port + size + rank}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_process_groups_have_metrics_and_a_report(tmp_path):
    port = free_port(4)
    environment = {"POSEIDON_METRICS": str(port), "POSEIDON_REPORT": str(tmp_path)}
    for rank, (status, text, errors) in enumerate(attempt(collectives, 2, environment=environment, port=port)):
        assert status == 0, errors
        labels = f'{{node="worker {rank}",operation="all_reduce"}}'
        assert f"poseidon_operations_total{labels} {STEPS}\n" in text, text
        assert f"poseidon_operation_seconds_total{labels}" in text
        about = json.loads((tmp_path / "c10d" / f"trace.rank{rank}.json").read_text())["otherData"]["poseidon"]
        counted = {operation["name"]: operation["count"] for operation in about["operations"]}
        assert counted["all_reduce"] == STEPS and counted["broadcast"] == 1, counted
        assert about["failure"] is None, about


def never_joins():
    import poseidon.torch as psd

    psd.init()


def test_a_worker_that_cannot_join_says_why_in_its_trace(tmp_path):
    # Nobody is rank 0, whose coordinator the others want.
    environment = {"POSEIDON_REPORT": str(tmp_path), "RANK": "1", "WORLD_SIZE": "2", "POSEIDON_CONNECT_TIMEOUT": "1"}
    ((status, _, errors),) = attempt(never_joins, 1, environment=environment)
    assert status != 0, errors
    about = json.loads((tmp_path / "trace.rank1.json").read_text())["otherData"]["poseidon"]
    assert "coordinator" in about["failure"] and about["name"] == "worker 1", about
