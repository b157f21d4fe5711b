"""Runs a function of a test file on several workers, each a process of its own."""

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent


def run(function, workers, timeout=120, **arguments):
    """What ``function(**arguments)`` returned on each worker. All of them must end well."""
    ended = attempt(function, workers, timeout, **arguments)
    for rank, (status, _, errors) in enumerate(ended):
        assert status == 0, f"worker {rank} ended with {status}:\n{errors}"
    return [result for _, result, _ in ended]


def attempt(function, workers, timeout=120, environment=None, **arguments):
    """Exit status, result and standard error of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments")
        port = free_port()
        processes = []
        for rank in range(workers):
            env = dict(os.environ)
            env.update(
                RANK=str(rank),
                WORLD_SIZE=str(workers),
                LOCAL_WORLD_SIZE=str(workers),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                POSEIDON_SECRET="tests",
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
                **(environment or {}),
            )
            command = [sys.executable, __file__, function.__module__, function.__name__, folder]
            processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        ended = []
        for rank, process in enumerate(processes):
            try:
                _, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                for other in processes:
                    other.kill()
                raise AssertionError(f"worker {rank} hangs")
            result = Path(folder, f"result-{rank}")
            value = torch.load(result, weights_only=False) if result.exists() else None
            ended.append((process.returncode, value, errors))
        return ended


def free_port():
    """A port that is free, and so is the one after it, where Poseidon's coordinator listens."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    module, name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    arguments = torch.load(f"{folder}/arguments", weights_only=False)
    value = getattr(importlib.import_module(module), name)(**arguments)
    torch.save(value, f"{folder}/result-{os.environ['RANK']}")
