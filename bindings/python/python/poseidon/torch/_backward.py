"""What a wrapper does in backward passes: gradients leave as they are made."""

import functools
import sys
from types import FrameType
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from poseidon import _native
from poseidon.torch._absent import Absent
from poseidon.torch._awaited import make_awaited
from poseidon.torch._buffers import Buffers
from poseidon.torch._factors import Factored, settle, take_gradients
from poseidon.torch._hooks import Hooks, weakly
from poseidon.torch._job import memory, rank
from poseidon.torch._join import Join
from poseidon.torch._layers import Member, Unit
from poseidon.torch._linear import unpatch
from poseidon.torch._remainder import Remainders
from poseidon.torch._replicas import Replicas
from poseidon.torch._staleness import Staleness

# After so many steps in which a layer's gradient had to be sent besides its factors, it goes without them.
_MOST_REMAINDERS = 3
CLOSED = (
    "this model was closed or failed earlier, its module, or a part of it, was wrapped again, or the job "
    "has ended"
)


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
    _set_rates: Callable[[List[float]], None]
    _restart: Callable[[], None]
    _close: Callable[..., None]

    find_unused_parameters: bool
    static_graph: bool
    _update: str
    _members: Dict[nn.Parameter, Member]
    _rule: Any
    _rates: List[float]
    _session: Optional[_native.Session]
    _units: List[Unit]
    _usage_unit: Optional[Unit]
    _remainders: Optional[Remainders]
    _replicas: Optional[Replicas]
    _factored: List[Factored]
    _leaving: List[Factored]
    _ends: List[Any]
    _join: Optional[Join]
    _is_open: bool
    _synchronises: bool
    _in_backward: bool
    _ending: Optional[int]
    _expects_gradients: bool
    _forwards: int
    _stepped: bool
    _staleness: Staleness
    _shared: Buffers
    _absent: List[Member]
    _hooks: Hooks

    @property
    def _expects_unused(self) -> bool:
        """Whether parameters may take no part. A static graph of torch's finds out by itself which do not."""
        return self.find_unused_parameters or self.static_graph

    @torch.compiler.disable
    def _end_forward(self, result: Any) -> None:
        """Backward begins at the outputs, in the outermost pass: one in a checkpoint is part of it.

        Not all outputs can be hooked: some are in objects, and a view that is changed in-place
        loses its hooks. A pass from there begins at the first parameter.
        """
        if not self._synchronises:
            return
        self._expects_gradients = True
        self._forwards += 1
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.requires_grad and output.grad_fn is not None:
                output.register_hook(weakly(self._on_output))

    @or_abort
    def _begin_backward(self) -> None:
        """A pass has reached the wrapper's outputs, or a parameter. Begins to synchronise, if the pass is one that does.

        It does if gradients are expected: the rule of torch's wrapper. Otherwise they stay here,
        and the next pass that synchronises sends them. A pass through outputs of a synchronised
        forward is never left out.
        """
        if self._in_backward or (self._ending is None and not self._expects_gradients):
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
        if self._ending is None and _is_in_checkpoint():
            raise RuntimeError(
                f"worker {rank()}: a checkpoint's pass ends before that of the loss, whose outputs were not seen. With "
                "torch.utils.checkpoint, pass use_reentrant=False"
            )
        self._forwards -= 1
        self._expects_gradients = False
        self._in_backward = True
        if self._ending is None:
            self._expect_end()
        if self._session is None:
            self._start_session()
        if self._update == "server":
            self._stepped = False
            self._rule.check()
            self._set_rates(self._rule.rates())
            self.synchronize()
            assert self._session is not None
            if self._staleness.begin_step(self._session):
                self._shared.is_due = True
        if self._replicas is not None:
            # In a join, only workers that still train step their parameters.
            self._replicas.begin_pass(is_comparable=self._join is None)
        settle(self._factored)
        if self._update == "server":
            take_gradients(self._factored)
        self._note_pass(is_backward=True)
        for unit in self._units:
            unit.begin()

    @torch.compiler.disable
    def _note_pass(self, is_backward: bool) -> None:
        """From now on the program computes: traces and reports show it."""
        if self._session is not None:
            _native.begin_pass(self._session, is_backward)

    @torch.compiler.disable
    def _note_pass_end(self) -> None:
        if self._session is not None:
            _native.end_pass(self._session)

    @or_abort
    def _on_output(self, _: Tensor) -> None:
        if not self._is_open and self._expects_gradients and self._goes_to_parameters():
            raise RuntimeError(CLOSED)
        if not self._is_open:
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
        if not self._in_backward:
            self._begin_backward()
            if not self._in_backward:
                return
        unit = member.unit
        assert unit is not None
        if unit.fc is not None:
            member.is_ready = True
            if unit.values is not None and unit.in_flight and parameter.grad is not None:
                raise RuntimeError(
                    f"'{member.name}' got a gradient past its layer's forward, after its factors were sent to be stepped "
                    'with: use update="worker"'
                )
            return
        if member.is_ready:
            raise RuntimeError(
                f"'{member.name}' got a second gradient in one backward, after the first was sent. With "
                "torch.utils.checkpoint, pass use_reentrant=False"
            )
        member.is_ready = True
        if not self._hooks.are_over(parameter):
            # They see and change this worker's gradient, as with torch's wrapper: it is sent later.
            return
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
        if unit.local is not None:
            # In a join, those of a worker that still trains: this worker's own schedule may have stopped.
            unit.local.rate = self._rates[unit.group]
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
                    'update="server", load values before the first backward or with poseidon.torch.load. What changes '
                    'parameters itself needs update="worker"'
                )

    @or_abort
    def _finish_backward(self) -> None:
        self._in_backward = False
        assert self._session is not None
        self._note_pass_end()
        self._send_the_rest()
        for factored in self._leaving:
            unpatch(factored)
        self._leaving = []
        if self._update == "worker":
            self.synchronize()
            if self._remainders is not None:
                self._remainders.exchange()
            self._deliver()
            self._leave_factors()
        else:
            self._say_where_gradients_are()
        for member in self._members.values():
            member.is_used = False

    def _leave_factors(self) -> None:
        """Layers whose factors tell only a part, step after step, go without them. All workers know the same of it."""
        steps = {} if self._remainders is None else self._remainders.steps
        leaving = [f for f in self._factored if f.unit is not None and steps.get(f.unit, 0) >= _MOST_REMAINDERS]
        if not leaving:
            return
        self._restart()
        for factored in leaving:
            self._give_up(factored)
            self._factored.remove(factored)

    def _say_where_gradients_are(self) -> None:
        """With update="server", until the step: whoever looks at a gradient is told that the shards have it."""
        self._absent = [m for unit in self._units if unit.in_flight for m in unit.members]
        for member in self._absent:
            if member.absent is None:
                member.absent = Absent.like(member.parameter)
            member.parameter.grad = member.absent
            make_awaited(member.parameter)

    def _forget_gradients(self) -> None:
        for member in self._absent:
            if member.parameter.grad is member.absent:
                member.parameter.grad = None
        self._absent = []

    def _give_up(self, factored: Factored) -> None:
        """A layer will not go by factors. What recomputes its forward in this pass still has to find it as it was."""
        factored.is_out = True
        factored.reset()
        self._leaving.append(factored)

    def _send_the_rest(self) -> None:
        """Sends what backward did not reach."""
        assert self._session is not None
        unused = self._share_usage()
        late: List[Factored] = []
        for factored in self._factored:
            unit = factored.unit
            if unit is None or unit.in_flight or unit in unused:
                continue
            is_unused = not factored.parts and not any(m.is_ready for m in unit.members)
            if is_unused and not self._expects_unused and not self._goes_along():
                raise self._unused([factored.name])
            late.append(factored)
        if self._update == "server":
            take_gradients(late)
        for factored in late:
            self._send_factors(factored)
            factored.done()
        for unit in self._units:
            if unit.in_flight or not unit.members or unit in unused:
                continue
            missing = [m.name for m in unit.members if not m.is_ready]
            if missing and not self._expects_unused and not self._goes_along():
                raise self._unused(missing)
            self._send(unit)
        if self._remainders is not None:
            self._remainders.send_checksums(self._session)

    def _share_usage(self) -> Set[Unit]:
        """Tells the other workers which parameters are used here. Returns the units that nobody steps this time.

        With update="server" a parameter that no worker has used must not be stepped, as torch's optimizers pass over
        those whose gradient is None. A worker that has used a parameter may have sent it already. One that has not
        waits here for what the others say. So a unit is sent by all workers or by none.
        """
        unit = self._usage_unit
        if unit is None:
            return set()
        assert self._session is not None
        used = [m.is_used or m.is_ready or m.has_factors() for m in self._members.values()]
        unit.result = torch.tensor(used, dtype=torch.float32, device="cpu")
        unit.in_flight = True
        self._session.send(unit.index, memory(unit.result))
        if self._update == "worker" or all(u.in_flight for u in self._units):
            return set()
        unit.receive(self._session)
        shares = dict(zip(self._members.values(), unit.result.tolist()))
        return {u for u in self._units if u.members and not any(shares[m] > 0 for m in u.members)}

    def _await(self, unit: Unit) -> None:
        if not unit.in_flight:
            return
        if self._session is None:
            # The job has failed. Gradients do not matter any more.
            if self._update == "worker":
                return
            raise RuntimeError(f"new values of '{unit.name}' were on their way when the job failed: the old ones may be gone")
        try:
            unit.receive(self._session)
            if unit.values is not None:
                self._check(unit)
        except Exception as error:
            self._close(because=f"worker {rank()}: {error}")
            raise
        if unit.values is not None:
            unit.land_parameters()

    def _goes_along(self) -> bool:
        return self._join is not None and self._join.is_through

    def _unused(self, names: Sequence[str]) -> RuntimeError:
        return RuntimeError(
            f"no gradient came for {', '.join(names)}: these parameters took no part in the loss of "
            f"worker {rank()}. Pass find_unused_parameters=True if that is meant"
        )

    @torch.no_grad()
    def _deliver(self) -> None:
        """Puts results that came to shared buffers where the optimizer looks for them."""
        if self._usage_unit is not None and self._usage_unit.result is not None:
            for member, share in zip(self._members.values(), self._usage_unit.result.tolist()):
                member.is_used = share > 0
        scale = 1.0 if self._join is None else self._join.scale
        for unit in self._units:
            if not unit.members or unit.result is None:
                continue
            rest = None if self._remainders is None else self._remainders.mean(unit)
            if rest is not None:
                torch._foreach_add_([part for _, part in unit.slices(unit.result)], rest)
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
                elif unit.fc is not None and rest is None:
                    gradient.add_(part)
                else:
                    gradients.append(gradient)
                    results.append(part)
            if gradients:
                # One call: torch needs several microseconds for each.
                torch._foreach_copy_(gradients, results)
        # Whoever has the gradients decides how long they stay.
        for unit in self._units:
            unit.result = None


def _is_in_checkpoint() -> bool:
    """Whether this pass is inside another one, as with ``use_reentrant=True``."""
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None
