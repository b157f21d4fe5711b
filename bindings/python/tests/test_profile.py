"""The script of `poseidon profile`, as far as it can be tested without a GPU."""

import importlib.util
import pathlib
import sys
import tomllib

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("measure", ROOT / "crates/cli/src/profile/measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RUN, module.RUNS = 1e-4, 1
    return module


def profile_of(script, monkeypatch, capsys):
    model = ROOT / "crates/sim/zoo/cifar10-quick.json"
    monkeypatch.setattr(sys, "argv", ["measure.py", "--batch", "1", "--device", "cpu", str(model)])
    script.main()
    return tomllib.loads(capsys.readouterr().out)


def test_without_a_device_of_its_own_no_copies_are_written(script, monkeypatch, capsys):
    profile = profile_of(script, monkeypatch, capsys)
    assert "copies" not in profile
    assert profile["measured"][0]["model"] == "cifar10-quick"


def test_copies_are_a_table_of_their_own(script, monkeypatch, capsys):
    monkeypatch.setattr(script.Measure, "copies", lambda _: (4.7e10, 5.6e10))
    profile = profile_of(script, monkeypatch, capsys)
    assert profile["copies"] == {"to_host": 4.7e10, "to_device": 5.6e10}
    assert profile["measured"][0]["batch"] == 1


def test_all_pieces_are_copied(script, monkeypatch):
    measure = script.Measure(torch.device("cpu"), "float32", 1)
    monkeypatch.setattr(measure, "seconds", lambda work: work() or 2.0)
    source = torch.arange(5, dtype=torch.uint8).repeat(script.PIECE)
    target = torch.zeros_like(source)
    assert measure.copy_speed(source, target) == source.numel() / 2.0
    assert torch.equal(source, target)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_both_ways(script):
    speeds = script.Measure(torch.device("cuda"), "float32", 1).copies()
    assert all(speed > 0 for speed in speeds)
