"""What a wrapper does in backward passes: gradients leave as they are made."""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from poseidon import _native
from poseidon.torch._job import memory, rank
from poseidon.torch._join import Join
from poseidon.torch._layers import Factored, Member, Unit, unpatch


def or_abort(method: Callable[..., None]) -> Callable[..., None]:
    """If ``method`` fails, the other workers must not wait for this one: they are told why."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self._close(because=f"worker {rank()}: {error}")
            raise

    return guarded


class Backward(nn.Module):
    """The part of a `DistributedDataParallel` that runs in torch's backward thread. The wrapper makes all of its state."""

    synchronize: Callable[[], None]
    _start_session: Callable[[], None]

    find_unused_parameters: bool
    _update: str
    _members: Dict[nn.Parameter, Member]
    _rule: Any
    _session: Optional[_native.Session]
    _units: List[Unit]
    _usage_unit: Optional[Unit]
    _factored: List[Factored]
    _leaving: List[Factored]
    _ends: List[Any]
    _join: Optional[Join]
    _is_open: bool
    _synchronises: bool
    _in_backward: bool
    _ending: Optional[int]
    _forwards: int
    _stepped: bool

    @or_abort
    def _begin_backward(self) -> None:
        if self._in_backward or not self._synchronises:
            return
        if self._forwards == 0:
            raise RuntimeError(
                f"worker {rank()}: a second backward without a forward in between: to synchronise the sum of several "
                "losses, add them before backward, or use no_sync() for all but the last"
            )
        if not self._stepped:
            raise RuntimeError(
                f"worker {rank()}: a second backward before step(): with update=\"server\" the first one has stepped "
                "the parameters. Use no_sync() to accumulate gradients"
            )
        self._forwards -= 1
        self._in_backward = True
        if self._ending is None:
            self._expect_end()
        if self._session is None:
            self._start_session()
        if self._update == "server":
            self._stepped = False
            self._rule.check()
            self._session.set_learning_rate(self._rule.rate())  # type: ignore[union-attr]
            self.synchronize()
        for factored in self._factored:
            factored.settle()
        for unit in self._units:
            unit.begin()

    @or_abort
    def _on_output(self, _: Tensor) -> None:
        if not self._synchronises or not self._is_open:
            return
        if self._ending != torch._C._current_graph_task_id():
            self._expect_end()
        if self._goes_to_parameters():
            self._begin_backward()

    def _goes_to_parameters(self) -> bool:
        """Whether this pass makes gradients of parameters: one for torch.autograd.grad(loss, input) does not."""
        try:
            return any(map(torch._C._will_engine_execute_node, self._ends))
        except RuntimeError:
            return False  # torch.autograd.grad(loss, parameter) keeps what it gets

    def _expect_end(self) -> None:
        self._ending = torch._C._current_graph_task_id()
        Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._ending = None
        if self._in_backward:
            self._finish_backward()

    @or_abort
    def _on_gradient(self, member: Member, parameter: nn.Parameter) -> None:
        """Called for each parameter: every microsecond counts."""
        member.is_used = True
        if not self._synchronises:
            if member.factored is not None:
                member.factored.note_gradient(parameter)
            return
        if not self._in_backward:
            self._begin_backward()
        unit = member.unit
        assert unit is not None
        if unit.fc is not None:
            if member.has_foreign_gradient():
                raise RuntimeError(
                    f"'{member.name}' is used outside its layer's forward, where its factors are not seen: "
                    'pass scheme="ps"'
                )
            return
        if member.is_ready:
            raise RuntimeError(
                f"'{member.name}' got a second gradient in one backward, after the first was sent. With "
                "torch.utils.checkpoint, pass use_reentrant=False"
            )
        member.is_ready = True
        unit.missing -= 1
        if unit.missing == 0:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        assert self._session is not None
        self._check(unit)
        unit.send(self._session)

    @or_abort
    def _send_factors(self, factored: Factored) -> None:
        unit = factored.unit
        assert self._session is not None and unit is not None
        self._check(unit)
        for member in unit.members if factored.parts else ():
            member.is_ready = True
        unit.send_factors(self._session, factored.parts)
        factored.reset()

    def _check(self, unit: Unit) -> None:
        """A parameter that is not what it was cannot be synchronised."""
        for m in unit.members:
            p = m.parameter
            if p.dtype != m.dtype or p.device != m.device:
                raise RuntimeError(
                    f"parameter '{m.name}' was {m.dtype} on {m.device} when the model was wrapped and is {p.dtype} on "
                    f"{p.device} now: move a model before it is wrapped"
                )
            if unit.values is None:
                continue
            moved = unit.in_values and p.data_ptr() != m.address
            if moved or p._version != m.version:
                raise RuntimeError(
                    f"parameter '{m.name}' was changed outside its update rule, which the shards do not see: with "
                    'update="server", load values before the first backward or with poseidon.torch.load'
                )

    @or_abort
    def _finish_backward(self) -> None:
        self._in_backward = False
        assert self._session is not None
        self._send_the_rest()
        for factored in self._leaving:
            unpatch(factored)
        self._leaving = []
        if self._update == "worker":
            self.synchronize()
            self._deliver()
        for member in self._members.values():
            member.is_used = False

    def _send_the_rest(self) -> None:
        """Sends what backward did not reach."""
        assert self._session is not None
        for factored in self._factored:
            unit = factored.unit
            if unit is None:
                continue
            if not unit.in_flight:
                if not factored.parts and not self.find_unused_parameters and not self._goes_along():
                    raise self._unused([factored.name])
                self._send_factors(factored)
                factored.done()
        for unit in self._units:
            if unit.in_flight or unit is self._usage_unit:
                continue
            if not self.find_unused_parameters and not self._goes_along():
                raise self._unused([m.name for m in unit.members if not m.is_ready])
            self._send(unit)
        if self._usage_unit is not None:
            ready = [m.is_used or m.is_ready for m in self._members.values()]
            usage = torch.tensor(ready, dtype=torch.float32)
            self._usage_unit.result = usage
            self._usage_unit.in_flight = True
            self._session.send(self._usage_unit.index, memory(usage))

    def _goes_along(self) -> bool:
        return self._join is not None and self._join.is_through

    def _unused(self, names: Sequence[str]) -> RuntimeError:
        return RuntimeError(
            f"no gradient came for {', '.join(names)}: these parameters took no part in the loss of "
            f"worker {rank()}. Pass find_unused_parameters=True if that is meant"
        )

    def _deliver(self) -> None:
        """Puts results that came to shared buffers where the optimizer looks for them."""
        if self._usage_unit is not None and self._usage_unit.result is not None:
            for member, share in zip(self._members.values(), self._usage_unit.result.tolist()):
                member.is_used = share > 0
        scale = 1.0 if self._join is None else self._join.scale
        for unit in self._units:
            if unit is self._usage_unit or unit.result is None:
                continue
            if scale != 1.0:
                unit.result.mul_(scale)
            if unit.result is not unit.stage:
                continue
            parts = unit.parts or [part for _, part in unit.slices(unit.result)]
            gradients: List[Tensor] = []
            results: List[Tensor] = []
            for member, part in zip(unit.members, parts):
                p = member.parameter
                # Nobody used it, or it was frozen after wrapping: its gradient stays as it was.
                if (self._usage_unit is not None and not member.is_used) or not p.requires_grad:
                    continue
                gradient = p.grad
                if gradient is None:
                    own = unit.fc is not None and p.dtype == part.dtype and p.device == part.device
                    p.grad = part if own else part.to(p.device, p.dtype, copy=True)
                elif unit.fc is not None:
                    gradient.add_(part)
                else:
                    gradients.append(gradient)
                    results.append(part)
            if gradients:
                # One call: torch needs several microseconds for each.
                torch._foreach_copy_(gradients, results)
