"""What a job does, for people to see."""

import os
import subprocess
import warnings
from typing import Optional, Union

from poseidon import _command, _native
from poseidon.torch._job import Job, barrier, rank


def record() -> None:
    """Notes from now on what this worker does: when layers are sent, awaited, rebuilt.

    The last some ten thousand events stay, in memory of a fixed size. ``POSEIDON_REPORT``, ``POSEIDON_TRACE`` and
    ``POSEIDON_METRICS`` have a worker note from the beginning.
    """
    _native.record(Job.get())


def report(path: "Union[str, os.PathLike[str]]") -> Optional[str]:
    """Writes what all workers have noted so far into the folder ``path``, and makes a page of it.

    Every worker calls it. Returns the path of the page on rank 0, and ``None`` elsewhere. Workers of other machines
    write to their own disks unless the folder is shared: then copy their files, and run ``poseidon report``.
    """
    folder = os.fspath(path)
    _native.write_trace(Job.get(), folder)
    barrier()
    if rank() != 0:
        return None
    if not _command.COMMAND.is_file():
        warnings.warn(
            f"this installation does not carry the poseidon command: run `poseidon report {folder}` elsewhere",
            stacklevel=2,
        )
        return None
    made = subprocess.run(
        [str(_command.COMMAND), "report", folder], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if made.returncode != 0:
        raise RuntimeError(f"poseidon report {folder}: {made.stderr.strip()}")
    return made.stdout.splitlines()[0]


def scalar(name: str, value: float) -> None:
    """Shows ``value``, such as the loss, in TensorBoard, under ``name``.

    It goes into this worker's file in ``POSEIDON_TENSORBOARD``, beside seconds a step, waiting and bytes. Of each name
    the last value of about a second is kept. Without ``POSEIDON_TENSORBOARD`` this does nothing.
    """
    _native.scalar(Job.get(), name, float(value))


def metrics_address() -> Optional[str]:
    """Where this worker serves metrics, as ``address:port``, if ``POSEIDON_METRICS`` asks for it."""
    return _native.metrics_address(Job.get())
