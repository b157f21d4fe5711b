"""What the planner is told about a model."""

import json
import re
import subprocess
import sys

import pytest
import torch
from cluster import run
from models import Cnn, Transformer
from poseidon.describe import describe, dumps, main
from torch import nn
from torch.nn import functional as F


def layers(model, *inputs):
    described = describe(model.to("meta"), "m", tuple(t.to("meta") for t in inputs))
    assert sum(layer["parameters"] for layer in described["layers"]) == sum(p.numel() for p in model.parameters())
    return {layer["name"]: layer for layer in described["layers"]}


def test_a_cnn():
    found = layers(Cnn(), torch.zeros(3, 1, 28, 28))
    # The norm belongs to the convolution before it.
    assert list(found) == ["conv1", "conv2", "fc1", "fc2"]
    assert found["conv1"]["parameters"] == 9 * 8 + 8 + 16
    assert found["conv2"]["forward_flops"] == 2 * 9 * 8 * 16 * 14 * 14
    assert found["conv1"]["backward_flops"] == found["conv1"]["forward_flops"]
    assert found["conv2"]["backward_flops"] == 2 * found["conv2"]["forward_flops"]
    assert found["conv2"]["convolution"]["size"] == [14, 14]
    assert found["fc1"]["kind"] == {"fc": {"m": 128, "n": 784}} and found["fc1"]["rows"] == 1


def test_rows_of_tokens_and_a_shared_embedding():
    found = layers(Transformer(), torch.zeros(2, 12, dtype=torch.int64))
    kinds = {name: layer["kind"] for name, layer in found.items()}
    assert "embedding" in kinds.values()
    rows = {layer["rows"] for layer in found.values() if isinstance(layer["kind"], dict)}
    assert rows == {12}


def test_what_is_frozen_is_not_sent_and_what_is_used_twice_counts_twice():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.twice = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.twice(F.relu(self.twice(self.frozen(x))))

    described = describe(Net().to("meta"), "m", (torch.zeros(5, 4, device="meta"),))
    (layer,) = described["layers"]
    assert layer["name"] == "twice" and layer["rows"] == 2
    assert layer["forward_flops"] == 2 * 2 * 16


def test_one_line_for_each_layer():
    text = dumps(describe(Cnn().to("meta"), "m", (torch.zeros(1, 1, 28, 28, device="meta"),)))
    assert len(text.splitlines()) == 1 + 4 + 1
    assert json.loads(text)["name"] == "m"


def test_as_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Sequential(torch.nn.Linear(6, 3))\n"
        "def both():\n    return make(), torch.zeros(7, 6)\n"
        "number = 3\n"
    )
    command = [sys.executable, "-m", "poseidon.describe", "nets:both"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["layers"]
    assert layer["parameters"] == 21 and layer["forward_flops"] == 2 * 18

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["describe", "nets:make", "--input", "6"])
    main()
    assert json.loads(capsys.readouterr().out)["layers"] == [layer]
    for args, words in [
        (["nets"], "expected MODULE:FACTORY"),
        (["nowhere:make"], "cannot import 'nowhere'"),
        (["nets:none"], "has no 'none'"),
        (["nets:number"], "not a torch.nn.Module"),
        (["nets:make"], "--input 3x224x224"),
        (["nets:make", "--input", "axb"], "the shape of one sample"),
        (["nets:make", "--input", "5"], "fails on its example input"),
    ]:
        monkeypatch.setattr(sys, "argv", ["describe", *args])
        with pytest.raises(SystemExit, match=re.escape(words)):
            main()


def test_factors_that_save_less_than_messages_cost_do_not_go():
    import poseidon.torch as psd
    from poseidon import _native

    scheme, why = _native.choose(64, 64, 8, 8)
    assert scheme == "ps" and "less than messages of their own cost (16 KiB)" in why
    assert _native.choose(64, 64, 8, 8, "sfb")[0] == "sfb"
    table = psd.plan(nn.Sequential(nn.Linear(64, 64), nn.Linear(1024, 1024)), batch=8, workers=8)
    schemes = {line.split()[0]: line.split()[2] for line in table.splitlines()}
    assert schemes["0.weight"] == "ps" and schemes["1.weight"] == "sfb"


def planned_on_two_hosts():
    import os

    import poseidon.torch as psd

    os.environ["POSEIDON_HOST"] = "first" if int(os.environ["RANK"]) < 2 else "second"
    psd.init()
    model = nn.Linear(512, 512, bias=False)
    return psd.plan(model, batch=150), psd.plan(model, batch=150, workers=3)


def test_ranks_that_share_a_port_count_as_its_host():
    for table, apart in run(planned_on_two_hosts, 3):
        assert "ps" in table.split() and "per host" in table, table
        assert "sfb" in apart.split() and "per node" in apart, apart
