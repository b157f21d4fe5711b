"""Runs a function of a test file on several workers, each a process of its own.

Workers are forked from one process, the fork server, which has imported torch and Poseidon and has done nothing else.
So torch is imported once, and not by every worker of every test.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
# The longest message between a test and the fork server: the environment of a worker.
LONGEST = 1 << 20


# Seconds that a job of a test may take, however much else this machine does. None takes as long.
PATIENCE = 400


def run(function, workers, timeout=PATIENCE, **arguments):
    """What ``function(**arguments)`` returned on each worker. All of them must end well."""
    ended = attempt(function, workers, timeout, **arguments)
    for rank, (status, _, errors) in enumerate(ended):
        assert status == 0, f"worker {rank} ended with {status}:\n{errors}"
    return [result for _, result, _ in ended]


def attempt(function, workers, timeout=PATIENCE, environment=None, **arguments):
    """Exit status, result and standard error of each worker."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, f"{folder}/arguments")
        port = free_port()
        for rank in range(workers):
            env = dict(os.environ)
            env.update(
                RANK=str(rank),
                WORLD_SIZE=str(workers),
                LOCAL_WORLD_SIZE=str(workers),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                POSEIDON_SECRET="known to all of us",
                OMP_NUM_THREADS="1",
            )
            env.update(environment or {})
            ForkServer.get().start(rank, env, [function.__module__, function.__name__, folder])
        statuses = ForkServer.get().wait(workers, timeout)
        ended = []
        for rank in range(workers):
            result = Path(folder, f"result-{rank}")
            value = torch.load(result, weights_only=False) if result.exists() else None
            ended.append((statuses[rank], value, Path(folder, f"errors-{rank}").read_text(errors="replace")))
        return ended


def all_say(folder, turn, rank, workers, yes):
    """Whether all workers say yes at this turn, by files in ``folder``. All get the same answer, which a look of each
    worker at the clock or at its own results does not give."""
    own = Path(folder, f"said-{turn}-{rank}")
    own.with_suffix(".new").write_text(str(int(yes)))
    own.with_suffix(".new").rename(own)
    files = [Path(folder, f"said-{turn}-{each}") for each in range(workers)]
    deadline = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"turn {turn}: only {[file.name for file in files if file.exists()]}"
        time.sleep(0.01)
    return all(file.read_text() == "1" for file in files)


def free_port(count=2):
    """The first of so many ports after each other that are free. On the second listens Poseidon's coordinator.

    They are none of those that the kernel gives to connections: on a machine with much to do, one of these may be
    somebody's before the job has begun. Each process of tests (pytest-xdist) takes them from a part of its own: what
    another has found may not be in use yet.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    part = (max(given, 20_000) - 10_000) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    while True:
        port = 10_000 + process * part + random.randrange(part - count)
        with contextlib.ExitStack() as sockets:
            try:
                for one in range(port, port + count):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", one))
            except OSError:
                continue
            return port


class ForkServer:
    """A test's end of the fork server. Messages are JSON, one in a packet."""

    started = None

    @classmethod
    def get(cls):
        if cls.started is None or cls.started.process.poll() is not None:
            cls.started = cls()
        return cls.started

    def __init__(self):
        self.socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Libraries read these numbers of threads when they are loaded. A process that forks has one thread.
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())], env=env, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
        )
        its.close()

    def start(self, rank, env, words):
        self.socket.send(json.dumps({"rank": rank, "env": env, "words": words}).encode())

    def wait(self, workers, timeout):
        """The exit status of each worker, by rank; ``-n`` if signal n ended it."""
        deadline = time.monotonic() + timeout
        pids, statuses, hang = {}, {}, None
        while len(statuses) < workers:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                packet = self.socket.recv(LONGEST)
            except socket.timeout:
                if hang is not None:
                    raise AssertionError("workers that were killed do not end")
                hang = sorted(set(range(workers)) - set(statuses))
                for rank in hang:
                    os.kill(pids[rank], signal.SIGKILL)
                deadline += 10
                continue
            assert packet, "the fork server ended"
            message = json.loads(packet)
            if "status" in message:
                statuses[message["rank"]] = message["status"]
            else:
                pids[message["rank"]] = message["pid"]
        assert hang is None, f"workers {hang} hang"
        return statuses


def serve(tests):
    """Forks a worker for every message from ``tests``, and says how it ended. Returns in workers, with their message."""
    with selectors.DefaultSelector() as selector:
        selector.register(tests, selectors.EVENT_READ)
        ranks = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is not tests:
                    pid, rank = ranks.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    tests.send(json.dumps({"rank": rank, "status": os.waitstatus_to_exitcode(status)}).encode())
                    continue
                packet = tests.recv(LONGEST)
                if not packet:
                    for pid, _ in ranks.values():
                        os.kill(pid, signal.SIGKILL)
                    sys.exit()
                message = json.loads(packet)
                pid = os.fork()
                if pid == 0:
                    for fd in ranks:
                        os.close(fd)
                    tests.close()
                    return message
                fd = os.pidfd_open(pid)
                ranks[fd] = pid, message["rank"]
                selector.register(fd, selectors.EVENT_READ)
                tests.send(json.dumps({"rank": message["rank"], "pid": pid}).encode())


def work(rank, env, words):
    """A worker: runs the function that the words name. Its interpreter then ends as that of a program does."""
    module, name, folder = words
    os.environ.clear()
    os.environ.update(env)
    errors = os.open(f"{folder}/errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.close(errors)
    torch.set_num_threads(1)
    arguments = torch.load(f"{folder}/arguments", weights_only=False)
    value = getattr(importlib.import_module(module), name)(**arguments)
    torch.save(value, f"{folder}/result-{rank}")


if __name__ == "__main__":
    # What workers need sooner or later, and what takes long to import.
    import poseidon.torch  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import torch.distributed.optim  # noqa: F401

    # Objects that are here now are never garbage: a worker that collects garbage does not look at them.
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads must not fork workers"
    work(**serve(socket.socket(fileno=int(sys.argv[1]))))
