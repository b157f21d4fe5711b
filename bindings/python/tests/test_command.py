"""The console script becomes the command that the wheel carries, and building a wheel needs no pinned toolchain."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import build_backend  # noqa: E402

from poseidon import _command  # noqa: E402


def become(command, *words):
    """What the console script does if the package has `command`."""
    program = "import sys; from pathlib import Path; from poseidon import _command\n_command.COMMAND = Path(sys.argv.pop(1))\n"
    return subprocess.run(
        [sys.executable, "-c", program + "_command.main()", command, *words], capture_output=True, text=True
    )


def test_the_console_script_is_the_command(tmp_path):
    command = tmp_path / "poseidon"
    command.write_text('#!/bin/sh\necho "$0 $# $1 $3"\nexit 7\n')
    command.chmod(0o755)
    ended = become(command, "launch", "-n", "two words")
    assert (ended.returncode, ended.stdout) == (7, f"{command} 3 launch two words\n"), ended


def test_a_package_without_the_command_says_so(tmp_path):
    ended = become(tmp_path / "missing", "--help")
    assert ended.returncode == 1
    assert "does not carry the poseidon command" in ended.stderr


def test_the_package_names_the_console_script():
    found = {script.name: script for script in entry_points(group="console_scripts")}
    assert found["poseidon"].load() is _command.main


@pytest.mark.parametrize(
    ("default", "expected"), [("rustc 1.95.0 (59807616e 2026-04-14)", "mine"), ("rustc 1.94.9", None), ("", None)]
)
def test_any_toolchain_that_is_new_enough_builds_it(monkeypatch, tmp_path, default, expected):
    """The default toolchain of rustup, unless it is older than the workspace asks for."""
    (tmp_path / "Cargo.toml").write_text('[workspace.package]\nrust-version = "1.95"\n')
    monkeypatch.setattr(build_backend, "CHECKOUT", tmp_path)
    monkeypatch.setattr(build_backend.shutil, "which", lambda program: f"/bin/{program}")
    said = {"rustup": "mine (default)\n", "rustc": default}
    monkeypatch.setattr(build_backend, "says", lambda program, *_: said[program])
    environment = {}
    monkeypatch.setattr(build_backend.os, "environ", environment)
    build_backend.find_rust()
    assert environment.get("RUSTUP_TOOLCHAIN") == expected
