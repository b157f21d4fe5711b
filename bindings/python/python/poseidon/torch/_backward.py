"""What a wrapper does in backward passes: gradients leave as they are made."""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from poseidon import _native
from poseidon.torch._job import memory, rank
from poseidon.torch._join import Join
from poseidon.torch._layers import Factored, Unit, unpatch


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

    find_unused_parameters: bool
    _update: str
    _trainable: Dict[str, nn.Parameter]
    _names: Dict[nn.Parameter, str]
    _kinds: Dict[nn.Parameter, Any]
    _rule: Any
    _session: Optional[_native.Session]
    _units: List[Unit]
    _unit_of: Dict[nn.Parameter, Unit]
    _usage_unit: Optional[Unit]
    _factored: List[Factored]
    _factored_of: Dict[nn.Parameter, Factored]
    _leaving: List[Factored]
    _used: Set[nn.Parameter]
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
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._begin_backward()
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise TypeError(f"the gradient of '{self._names[parameter]}' is sparse: expected a dense one (sparse=False)")
        self._used.add(parameter)
        if not self._synchronises:
            factored = self._factored_of.get(parameter)
            if factored is not None:
                factored.note_gradient(parameter)
            return
        unit = self._unit_of[parameter]
        if unit.fc is not None:
            if unit.has_foreign_gradient(parameter):
                raise RuntimeError(
                    f"'{self._names[parameter]}' is used outside its layer's forward, where its factors are not seen: "
                    'pass scheme="ps"'
                )
            return
        if parameter in unit.ready:
            raise RuntimeError(
                f"'{self._names[parameter]}' got a second gradient in one backward, after the first was sent. With "
                "torch.utils.checkpoint, pass use_reentrant=False"
            )
        unit.ready.add(parameter)
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
        if factored.parts:
            unit.ready.update(unit.parameters)
        unit.send_factors(self._session, factored.parts)
        factored.reset()

    def _check(self, unit: Unit) -> None:
        """A parameter that is not what it was cannot be synchronised."""
        for index, p in enumerate(unit.parameters):
            if (p.dtype, p.device) != self._kinds[p]:
                dtype, device = self._kinds[p]
                raise RuntimeError(
                    f"parameter '{self._names[p]}' was {dtype} on {device} when the model was wrapped and is {p.dtype} on "
                    f"{p.device} now: move a model before it is wrapped"
                )
            if unit.values is None:
                continue
            moved = unit.in_values and not _lies_in(p, unit.values)
            if moved or p._version != unit.versions[index]:
                raise RuntimeError(
                    f"parameter '{self._names[p]}' was changed outside its update rule, which the shards do not see: with "
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
        self._used = set()

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
                raise self._unused([self._names[p] for p in unit.parameters if p not in unit.ready])
            self._send(unit)
        if self._usage_unit is not None:
            ready = [p in self._used or p in self._unit_of[p].ready for p in self._trainable.values()]
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
        used: Optional[Set[nn.Parameter]] = None
        if self._usage_unit is not None and self._usage_unit.result is not None:
            usage = self._usage_unit.result.tolist()
            used = {p for p, share in zip(self._trainable.values(), usage) if share > 0}
        scale = 1.0 if self._join is None else self._join.scale
        for unit in self._units:
            if unit is self._usage_unit or unit.result is None:
                continue
            if scale != 1.0:
                unit.result.mul_(scale)
            if unit.result is not unit.stage:
                continue
            for p, part in unit.slices(unit.result):
                # Nobody used it, or it was frozen after wrapping: its gradient stays as it was.
                if (used is not None and p not in used) or not p.requires_grad:
                    continue
                if unit.fc is None or p.dtype != part.dtype or p.device != part.device:
                    part = part.to(p.device, p.dtype, copy=True)
                if p.grad is None:
                    p.grad = part
                elif unit.fc is not None:
                    p.grad.add_(part)
                else:
                    p.grad.copy_(part)


def _lies_in(parameter: nn.Parameter, values: Tensor) -> bool:
    start = values.data_ptr()
    return start <= parameter.data_ptr() < start + max(values.numel(), 1) * values.element_size()
