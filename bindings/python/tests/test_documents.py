"""Documented commands that need torchrun are run by the real one.

Commands without PyTorch are run by ``crates/cli/tests/it/documents.rs``, which checks that none is forgotten.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import PATIENCE, free_port, run

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "examples/pytorch/README.md"]
TORCHRUN = re.compile(r"^(?:\$ )?((?:\w+=\S+ )*torchrun --.*?)(?: +#.*)?$", re.MULTILINE)

COMMANDS = sorted({command for page in PAGES for command in TORCHRUN.findall(page.read_text())})
OF_TWO_MACHINES = [command for command in COMMANDS if "--node-rank" in command]
OF_ONE = [command for command in COMMANDS if command not in OF_TWO_MACHINES]


def start(commands, folder):
    """Runs the commands at once, and returns what all of them print. They must end well."""
    example = ROOT / "examples/pytorch/mnist_cnn.py"
    words = ["train.py", "--epochs", "1", "--steps", "2", "--batch", "8"]
    program = f"#!{sys.executable}\nimport runpy, sys\nsys.argv = {words}\n"
    program += f"runpy.run_path({str(example)!r}, run_name='__main__')\n"
    for name in ["train.py", "mnist_cnn.py", "program"]:
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    env = dict(os.environ, HOME=str(folder), OMP_NUM_THREADS="1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    port = str(free_port())
    started = []
    for command in commands:
        # Two workers show it as well as four, and the document's ports may be somebody's.
        command = command.replace("--nproc-per-node 4", "--nproc-per-node 2").replace(":9400", ":0")
        command = command.replace("10.0.0.1", "127.0.0.1").replace("29500", port)
        if port not in command:
            command = command.replace("torchrun", f"torchrun --master-port {port}")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(["timeout", str(PATIENCE), "sh", "-c", command], cwd=folder, env=env, **pipes))
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return "".join(printed)


@pytest.mark.parametrize("command", OF_ONE)
def test_torchrun_starts_what_the_documents_say(command, tmp_path):
    assert "epoch 1: loss" in start([command], tmp_path)
    if "POSEIDON_REPORT" in command:
        assert sorted(path.name for path in (tmp_path / "seen").glob("trace*")) == [
            "trace.rank0.json",
            "trace.rank1.json",
        ]


def test_torchrun_joins_two_machines_as_the_documents_say(tmp_path):
    assert len(OF_TWO_MACHINES) == 2, COMMANDS
    assert "epoch 1: loss" in start(OF_TWO_MACHINES, tmp_path)


def runs_the_readme(lines):
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loader = [(torch.full((3, 8), float(i)), torch.tensor([0, 1, 1])) for i in range(3)]
    names = {"torch": torch, "model": model, "loader": loader, "loss_of": torch.nn.functional.cross_entropy}
    exec(lines, names)
    after = [parameter.detach() for parameter in model.parameters()]
    assert not any(torch.equal(was, now) for was, now in zip(before, after))
    assert names["model"] is not model
    return [now.clone() for now in after]


def test_the_ten_lines_of_the_readme_run_as_they_are():
    lines = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(lines) == 1 and len(lines[0].splitlines()) <= 10
    first, second = run(runs_the_readme, 2, lines=lines[0])
    assert all((a == b).all() for a, b in zip(first, second))


def test_the_plot_of_the_readme_shows_what_its_table_says():
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| \[", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = re.findall(r">(\d\.\d\d)</text>", (ROOT / "docs/figures/measured.svg").read_text())
    assert rows and shown == [f"{float(ddp) / float(ours):.2f}" for ours, ddp in rows]
