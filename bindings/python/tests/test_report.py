"""What a job shows of itself."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from cluster import attempt, run
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
