"""Parameters in float64: a session adds in float32, which would round their gradients."""

from typing import List, Optional

import torch

from poseidon import _native
from poseidon._numbers import DTYPES, MEAN
from poseidon.torch._device import stream_of
from poseidon.torch._job import LINGER, Job
from poseidon.torch._layers import Member, Unit

# What errors say of a wait.
_WHAT = "gradients in float64"


class Doubles:
    """The group that a model's float64 gradients go through."""

    def __init__(self) -> None:
        self._group: Optional[_native.Group] = None

    def unit(self, members: List[Member]) -> "DoubleUnit":
        """All float64 parameters of a model. Every worker calls it at the same time."""
        if self._group is None:
            self._group = Job.group(_WHAT)
        return DoubleUnit(members, self._group)

    def close(self, because: Optional[str] = None) -> None:
        if self._group is None:
            return
        if because is not None:
            self._group.abort(because)
        self._group.leave(LINGER)
        self._group = None


class DoubleUnit(Unit):
    """Float64 parameters, which are synchronised by one collective operation when a backward pass ends.

    Workers must begin the operations of a group in the same order, and gradients may be made in any.
    """

    def __init__(self, members: List[Member], group: _native.Group):
        super().__init__(f"float64: {members[0].name} to {members[-1].name}", members)
        self._group = group
        self._work: Optional[_native.Work] = None

    def begin(self) -> None:
        super().begin()
        # No gradient is the last one: the end of the pass is.
        self.missing += 1

    def send(self, session: _native.Session) -> None:
        self.in_flight = True
        self.result = None
        self.result = result = self._gradient()
        memory, timeout = (result.data_ptr(), result.numel(), DTYPES[torch.float64]), Job.get().timeout
        if self.on_gpu:
            place = (self.device.index, stream_of(self.device).cuda_stream)
            self._work = self._group.begin_on_device("all_reduce", [memory], [], result, timeout, *place, op=MEAN)
        else:
            self._work = self._group.begin("all_reduce", [memory], [], result, timeout, True, op=MEAN)

    def receive(self, session: _native.Session) -> None:
        assert self._work is not None
        self._work.wait(session=Job.get(), what=_WHAT)
        if self.on_gpu:
            self._work.make_wait(stream_of(self.device).cuda_stream)
        self._work = None
        self.in_flight = False
