"""The console script ``poseidon``: becomes the command that the wheel carries."""

import os
import sys
from pathlib import Path
from typing import NoReturn

COMMAND = Path(__file__).parent / "bin" / "poseidon"


def main() -> NoReturn:
    if not COMMAND.is_file():
        sys.exit(
            "error: this installation of the package does not carry the poseidon command. A wheel of `cargo xtask dist` "
            "or `pip install bindings/python` brings it, and `cargo install --locked --path crates/cli` installs it alone"
        )
    # It starts servers by its own path, so it must be the program itself and not a child.
    os.execv(COMMAND, ["poseidon", *sys.argv[1:]])
