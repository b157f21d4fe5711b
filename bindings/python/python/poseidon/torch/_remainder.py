"""What lies in the gradients of layers by factors and did not come from their factors.

A program may put anything into ``grad``: by hand, with ``torch.autograd.grad`` of a second loss, by a
penalty on the weight, by a hook, or by changing what ``no_sync`` has accumulated. torch's wrapper
averages whatever is there. Factors cannot say it, so it goes as a gradient, as torch sends it.

All workers have to send it then, and one worker alone may have something to send. So in every
synchronised step each worker sends a checksum of what lies in its gradients, which takes a few bytes
and travels beside the last gradients. If all workers have the same there, which is so for gradients
that a step has left, the mean is what they have, and nothing more is sent.
"""

import hashlib
from typing import Dict, List, Optional, Sequence

import torch
from torch import Tensor

from poseidon import _native
from poseidon.torch._checksum import checksums
from poseidon.torch._job import Job, memory, rank, world_size
from poseidon.torch._layers import Unit

# Checksums travel as numbers of 16 bits, of which a float32 keeps all: this many for all layers
# together, and for each one if they differ.
_WORDS_TOGETHER = 3
_WORDS_EACH = 4


class Remainders:
    """The remainders of a session's layers by factors."""

    def __init__(self, units: Sequence[Unit], deterministic: bool):
        self._units = list(units)
        self._deterministic = deterministic
        # A layer of the session itself: every worker's checksum, where its rank has it.
        self.checksums = Unit("what gradients held", [])
        self.checksums.len = world_size() * _WORDS_TOGETHER
        self._mine: List[int] = []
        # Has a layer for each unit. Opened when it is needed first.
        self._session: Optional[_native.Session] = None
        # What came back in this step.
        self._means: Dict[Unit, Tensor] = {}
        # In how many steps a unit had a remainder.
        self.steps: Dict[Unit, int] = {}

    def send_checksums(self, session: _native.Session) -> None:
        """The pass has ended: what is in the gradients now is the remainder."""
        self._means = {}
        self._mine = checksums([[p.grad for p in unit.parameters] for unit in self._units])
        together = 0
        if any(self._mine):
            digest = hashlib.blake2b(repr(self._mine).encode(), digest_size=2 * _WORDS_TOGETHER).digest()
            together = int.from_bytes(digest, "little")
        self.checksums.result = _table([together], _WORDS_TOGETHER)
        self.checksums.in_flight = True
        session.send(self.checksums.index, memory(self.checksums.result))

    def exchange(self) -> None:
        """After the checksums have come: averages the remainders that are not the same on all workers."""
        assert self.checksums.result is not None
        if not any(_differing(self.checksums.result, 1)):
            return
        if self._session is None:
            layers = [("checksums", world_size() * len(self._units) * _WORDS_EACH, None)]
            layers += [(unit.name, unit.len, None) for unit in self._units]
            self._session = Job.open("gradients besides factors", layers, deterministic=self._deterministic)
        session = self._session
        each = _table(self._mine, _WORDS_EACH)
        session.send(0, memory(each))
        session.receive(0)
        sent = {}
        for index, differs in enumerate(_differing(each, len(self._units))):
            if differs:
                unit = self._units[index]
                sent[index + 1] = self._means[unit] = _flat(unit)
                session.send(index + 1, memory(self._means[unit]))
                self.steps[unit] = self.steps.get(unit, 0) + 1
        for index in sent:
            session.receive(index)

    def mean(self, unit: Unit) -> Optional[List[Tensor]]:
        """The mean of what was in the gradients of ``unit``; nothing if what is there is the mean."""
        mean = self._means.get(unit)
        return None if mean is None else [part for _, part in unit.slices(mean.to(unit.device))]

    def leave(self) -> Optional[_native.Session]:
        """The session to be ended, if there is one."""
        session, self._session = self._session, None
        return session


def _flat(unit: Unit) -> Tensor:
    """What is in the gradients of ``unit``, as one vector."""
    flat = torch.zeros(unit.len, dtype=torch.float32, device="cpu")
    for p, part in unit.slices(flat):
        if p.grad is not None:
            part.copy_(p.grad.detach())
    return flat


def _table(sums: Sequence[int], words: int) -> Tensor:
    """This worker's checksums in its row, for a sum over all workers."""
    table = torch.zeros(world_size(), len(sums) * words, dtype=torch.float32, device="cpu")
    row = [(value >> (16 * word)) & 0xFFFF for value in sums for word in range(words)]
    table[rank()] = torch.tensor(row, dtype=torch.float32, device="cpu")
    return table


def _differing(table: Tensor, units: int) -> List[bool]:
    """For each unit, whether not all rows are the same."""
    rows = table.view(world_size(), units, -1)
    return (rows != rows[:1]).any(2).any(0).tolist()
