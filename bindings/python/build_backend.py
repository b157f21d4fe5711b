"""Builds the package: maturin's build backend, and two things that maturin does not do.

The wheel carries the `poseidon` command. It is built here and put into the package, where the console script finds
it (`poseidon/_command.py`). A source distribution has no sources of the command, so a wheel made from one has none.

The checkout pins the toolchain that it is developed with. Whoever only installs the package does not need that one:
any Rust that is new enough will do, and so will the Rust that maturin brings where there is none.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess

import maturin

HERE = pathlib.Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
SOURCES = CHECKOUT / "crates/cli/Cargo.toml"
COMMAND = HERE / "python/poseidon/bin/poseidon"

get_requires_for_build_wheel = maturin.get_requires_for_build_wheel
get_requires_for_build_sdist = maturin.get_requires_for_build_sdist
get_requires_for_build_editable = maturin.get_requires_for_build_editable


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    find_rust()
    build_command()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    find_rust()
    build_command()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    find_rust()
    return maturin.build_sdist(sdist_directory, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    find_rust()
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    find_rust()
    return maturin.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def find_rust():
    """Sees to it that `cargo` is there and new enough, without the pinned toolchain if possible."""
    if shutil.which("cargo") is None and not os.environ.get("MATURIN_NO_INSTALL_RUST"):
        # As maturin does. It asks for this package where there is no cargo.
        from puccinialin import setup_rust

        os.environ.setdefault("RUSTUP_TOOLCHAIN", "stable")
        os.environ.update(setup_rust())
    elif shutil.which("rustup") and "RUSTUP_TOOLCHAIN" not in os.environ:
        default = says("rustup", "default").partition(" ")[0].strip()
        wanted = re.search(r'^rust-version = "([\d.]+)"', read(CHECKOUT / "Cargo.toml"), re.MULTILINE)
        # Otherwise rustup fetches the pinned one.
        if default and wanted and version(says("rustc", f"+{default}", "--version")) >= version(wanted[1]):
            os.environ["RUSTUP_TOOLCHAIN"] = default


def build_command():
    """Builds `poseidon` and puts it into the package."""
    if not SOURCES.is_file():
        print(f"{SOURCES} is not here: this package will not have the poseidon command")
        return
    words = ["cargo", "build", "--profile", told("profile") or "release", "--bin", "poseidon"]
    words += ["--manifest-path", str(SOURCES), "--features", told("features")]
    built = subprocess.run([*words, "--message-format", "json-render-diagnostics"], stdout=subprocess.PIPE, check=True)
    messages = map(json.loads, built.stdout.splitlines())
    (executable,) = {message["executable"] for message in messages if message.get("executable")}
    COMMAND.parent.mkdir(exist_ok=True)
    # A new file: the old one may be running.
    COMMAND.unlink(missing_ok=True)
    shutil.copy2(executable, COMMAND)


def told(option):
    """What maturin is told by the environment; nothing if it is told nothing."""
    found = re.search(rf"--{option}[ =](\S+)", os.environ.get("MATURIN_PEP517_ARGS", ""))
    return found[1] if found else ""


def version(text):
    """The first version number in a text, such as "rustc 1.95.0 (59807616e 2026-04-14)", to compare; () if there is none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def says(*words):
    """What a command prints; nothing if it fails. Asked outside the checkout, where nothing is pinned."""
    done = subprocess.run(words, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout if done.returncode == 0 else ""


def read(path):
    return path.read_text() if path.is_file() else ""
