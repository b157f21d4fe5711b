"""The job this process is in."""

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from poseidon import _native

# Seconds for last words in a group; those they are for may be gone.
LINGER = 5.0
# Seconds that the process whose error it was may take to end before others do.
_ANOTHERS_END = 10.0

if TYPE_CHECKING:
    from poseidon._native import LayerSpec


class Job:
    """Sessions of models are siblings of the job's own, which has no layers."""

    session: Optional[_native.Session] = None
    # The process that joined. One forked from it has neither the threads nor a part in the job.
    process = 0
    # What has to be closed before the job is left, in the order it was opened. Each says goodbye, or the reason it
    # is given, and returns what then waits for the others.
    closers: List[Callable[..., Callable[[], None]]] = []
    models = 0
    sessions = 0
    barriers = 0
    checkpoints = 0

    @classmethod
    def is_here(cls) -> bool:
        """Whether this process has joined, and was not forked from one that has."""
        return cls.session is not None and os.getpid() == cls.process

    @classmethod
    def get(cls) -> _native.Session:
        if cls.session is None:
            raise RuntimeError("poseidon.torch is not initialised: call poseidon.torch.init() first")
        return cls.session

    @classmethod
    def open(cls, purpose: str, layers: "Sequence[LayerSpec]", **setup: Any) -> _native.Session:
        """A session of all workers for ``purpose``, which errors name. Every worker opens the same ones, in the same order."""
        cls.sessions += 1
        return cls.get().sibling(f"{purpose} ({cls.sessions})", list(layers), **setup)

    @classmethod
    def group(cls, purpose: str) -> _native.Group:
        cls.sessions += 1
        return cls.get().group(f"{purpose} ({cls.sessions})")


def init() -> None:
    """Joins the job that the environment describes, and waits for the other workers.

    The environment of torchrun, Open MPI, Slurm and ``poseidon launch`` is understood; without any
    of them this process is a job of one worker.
    """
    if Job.session is not None:
        raise RuntimeError("poseidon.torch is already initialised")
    Job.session = _native.Session()
    Job.process = os.getpid()
    atexit.register(_leave_at_exit)


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    return Job.session is not None


def shutdown() -> None:
    """Leaves the job; waits until every worker does. Called at exit if you do not."""
    if not Job.is_here():
        return
    try:
        # Goodbyes come first: whatever another worker is waiting for, it learns that this one is leaving.
        waits = [close() for close in list(Job.closers)]
        Job.get().say_goodbye()
        for wait in waits:
            wait()
    except Exception as error:
        _abort(str(error))
        raise
    session, Job.session = Job.get(), None
    session.finish()


def _leave_at_exit() -> None:
    if not Job.is_here():
        return
    # Set by the interpreter when it prints what nobody caught.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        shutdown()
        return
    # Launchers blame the process that ends first. It should be the one whose error it was.
    if _is_anothers(error):
        Job.get().await_end(_ANOTHERS_END)
    else:
        Job.get().stay_until_exit()
    _abort(f"{type(error).__name__}: {error}")


def _is_anothers(error: Optional[BaseException]) -> bool:
    """Whether ``error`` comes from another worker's, which has told this one."""
    while error is not None:
        if isinstance(error, _native.AbortedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _abort(because: str) -> None:
    because = f"worker {rank()}: {because}"
    for close in list(Job.closers):
        close(because=because)
    session, Job.session = Job.session, None
    if session is not None:
        session.abort(because)


def rank() -> int:
    """This worker's rank."""
    return Job.get().rank


def world_size() -> int:
    """Number of workers."""
    return Job.get().workers


def barrier() -> None:
    """Returns when every worker has called it."""
    Job.barriers += 1
    Job.get().gather(f"barrier {Job.barriers}", "null")


def memory(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tuple[int, int, object]:
    """A tensor as the native module takes it, which goes by the address alone: of its layer's type, or float32."""
    if tensor.dtype != dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise TypeError(
            f"memory for the network: expected {dtype} on the CPU, contiguous, got {tensor.dtype} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}"
        )
    return tensor.data_ptr(), tensor.numel(), tensor


def broadcast(tensors: Sequence[Tuple[str, Tensor]]) -> None:
    """Every worker's ``tensors`` become rank 0's, bit by bit, whatever their type."""
    if world_size() == 1 or not tensors:
        return
    words = []
    for _, tensor in tensors:
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        padded = torch.zeros(-(-raw.numel() // 4) * 4, dtype=torch.uint8, device="cpu")
        padded[: raw.numel()] = raw
        words.append(padded.view(torch.float32))
    # The type is part of the name: workers whose models differ are told where.
    layers = [
        (f"{name} ({str(tensor.dtype)[6:]} {list(tensor.shape)})", word.numel(), None)
        for (name, tensor), word in zip(tensors, words)
    ]
    session = Job.open("a model's first values", layers)
    for index, word in enumerate(words):
        session.broadcast(index, memory(word))
    for index, ((_, tensor), word) in enumerate(zip(tensors, words)):
        session.receive(index)
        raw = word.view(torch.uint8)[: tensor.numel() * tensor.element_size()]
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
    session.finish()


def add_up(session: _native.Session, layer: int, tensor: Tensor) -> None:
    """``tensor`` becomes the sum over all workers, by a session whose rule is that."""
    session.send(layer, memory(tensor))
    session.receive(layer)
