"""Whether all workers have the same parameters."""

import warnings
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from poseidon import _native
from poseidon.torch._checksum import digests
from poseidon.torch._device import stream_of
from poseidon.torch._layers import Member


class ReplicasDiffer(RuntimeWarning):
    """Workers do not have the same parameters, though all of them have got the same gradients.

    It is a warning because a program may mean it: it steps its parameters itself, and torch's wrapper would say nothing.
    ``warnings.simplefilter("error", poseidon.torch.ReplicasDiffer)`` makes it an error, which ends the job.
    """


class Replicas:
    """Compares a turn of the parameters with the other workers', every so many synchronised backward passes.

    All workers count the same passes and have the same turns, so they compare the same values.
    """

    def __init__(self, session: _native.Session, members: Sequence[Member]):
        self._session = session
        self._every = _native.compares_every(session)
        self._turns = [] if self._every is None else list(turns(members))
        self._passes = 0
        # Digests that a GPU may still be making: of which step and of what, where they come to, when they are there.
        self._coming: Optional[Tuple[int, List[str], Tensor, Any]] = None

    def begin_pass(self, is_comparable: bool) -> None:
        """A synchronised backward begins. ``is_comparable``: all workers take it, and have stepped what they have."""
        self._post(waits=False)
        tell(self._session)
        if not is_comparable:
            return
        steps, self._passes = self._passes, self._passes + 1
        if steps == 0 or not self._turns or self._every is None or steps % self._every != 0:
            return
        # A GPU that is more than so many steps behind would have to be waited for anyway.
        self._post(waits=True)
        turn = self._turns[(steps // self._every - 1) % len(self._turns)]
        with torch.no_grad():
            made = digests([rows(member.parameter)[first:last] for member, first, last in turn])
            here, event = made, None
            if made.is_cuda:
                here = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=True)
                here.copy_(made, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream_of(made.device))
        self._coming = steps, [words(*piece) for piece in turn], here, event
        self._post(waits=False)

    def end(self) -> None:
        """The session's goodbye comes next, and it waits until everything is compared."""
        self._post(waits=True)

    def _post(self, waits: bool) -> None:
        if self._coming is None:
            return
        steps, names, here, event = self._coming
        if event is not None and not event.query():
            if not waits:
                return
            event.synchronize()
        self._coming = None
        numbers = [number + 2**63 for number in here.tolist()]
        _native.watch_replicas(self._session, steps, list(zip(names, numbers)))


def tell(session: _native.Session) -> None:
    """Warns if ``session`` has found a difference that the program has not been told yet."""
    difference = _native.take_difference(session)
    if difference is None:
        return
    warnings.warn(
        f"{difference}. Every worker has got the same gradients. Has one changed its parameters by itself, or stepped with "
        "another learning rate? Do processors or GPUs of different kinds round differently? Is the memory of a machine "
        "faulty? POSEIDON_COMPARE_EVERY=0 compares nothing",
        ReplicasDiffer,
        stacklevel=2,
    )


def turns(members: Sequence[Member]) -> Iterator[List[Tuple[Member, int, int]]]:
    """What is compared at once: rows of parameters of one device, from the first one to before the last."""
    turn: List[Tuple[Member, int, int]] = []
    left = _BYTES
    for member in members:
        parameter = member.parameter
        count = len(rows(parameter))
        width = parameter.element_size() * max(parameter.numel() // max(count, 1), 1)
        first = 0
        while first < count:
            if turn and (left < width or len(turn) == _MOST or turn[0][0].device != member.device):
                yield turn
                turn, left = [], _BYTES
            last = min(first + max(left // width, 1), count)
            turn.append((member, first, last))
            left -= width * (last - first)
            first = last
    if turn:
        yield turn


def rows(parameter: Tensor) -> Tensor:
    """``parameter`` as something that has rows: a single number is one."""
    return parameter if parameter.dim() > 0 else parameter.view(1)


def words(member: Member, first: int, last: int) -> str:
    count = len(rows(member.parameter))
    part = "" if (first, last) == (0, count) else f" (rows {first} to {last - 1} of {count})"
    return f"parameter '{member.name}'{part}"


def are_comparable(devices: Sequence[Sequence[str]]) -> bool:
    """Whether digests of the workers' parameters compare. Each has told the kinds of its devices."""
    return len(devices[0]) == 1 and all(theirs == devices[0] for theirs in devices)


# As many bytes as a session digests of what it receives (ADR 0027).
_BYTES = 1 << 20
# Parameters of one turn: a GPU begins one addition for each of them.
_MOST = 16
