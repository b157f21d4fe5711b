"""The wrapper around a model."""

import contextlib
import functools
import json
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from poseidon import _native
from poseidon.torch._buffers import Buffers
from poseidon.torch._job import Job, broadcast, memory, rank, world_size
from poseidon.torch._join import Join
from poseidon.torch._layers import (
    Factored,
    Unit,
    Watch,
    factorable,
    is_compiled,
    patch,
    units_of,
    unpatch,
)

MODELS: List["DistributedDataParallel"] = []


def _or_abort(method: Callable[..., None]) -> Callable[..., None]:
    """If ``method`` fails, the other workers must not wait for this one: they are told why."""

    @functools.wraps(method)
    def guarded(self: "DistributedDataParallel", *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self._close(because=f"worker {rank()}: {error}")
            raise

    return guarded


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that ``backward`` leaves the mean of all workers' gradients in ``grad``.

    As torch's: parameters and buffers begin as rank 0's, ``state_dict`` has the same keys (those of
    the module behind ``module.``), ``no_sync`` accumulates locally, ``join`` is for uneven inputs.

    * ``broadcast_buffers``: before each forward of a synchronised step, and the first one after it, buffers become
      rank 0's.
    * ``find_unused_parameters``: parameters may take no part in a step.
    * ``update``: ``worker`` (any torch optimizer) or ``server``: the shards take the steps, by the rule
      of a ``psd.SGD``, ``psd.Adam`` or ``psd.AdamW`` made from this model's parameters. Parameters then come back
      while the next forward is under way; ``synchronize()`` waits for all of them.
    * ``scheme``: ``auto`` (the fewest bytes for each layer), ``ps`` or ``sfb``.
    * ``batch``: how many rows (samples, or samples times sequence length) a Linear layer sees between
      two synchronisations; worth saying if most steps are larger than the first, by which the plan is made.
    * ``deterministic``: gradients are added in rank order, so that a run repeats bit by bit.
    * ``device_ids``, ``output_device``, ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``static_graph``: taken
      so that calls of torch's work as they are; without effect.

    During ``no_sync``, Linear layers that go by factors keep those instead of a gradient: their
    ``weight.grad`` is complete after the next synchronised backward.

    How layers go is decided at the first synchronised backward, when it is known how many rows each
    Linear layer sees. ``sessions_plan()`` then tells.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        update: str = "worker",
        scheme: str = "auto",
        batch: Optional[int] = None,
        deterministic: bool = False,
        bucket_cap_mb: Optional[float] = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ):
        super().__init__()
        if update not in ("worker", "server"):
            raise ValueError(f"update={update!r}: expected 'worker' or 'server'")
        if update == "server" and find_unused_parameters:
            raise ValueError('update="server" steps every parameter: find_unused_parameters needs update="worker"')
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self._update = update
        self._scheme = scheme
        self._batch = batch
        self._deterministic = deterministic
        self._trainable: Dict[str, nn.Parameter] = {
            name: p for name, p in module.named_parameters() if p.requires_grad
        }
        if not self._trainable:
            raise ValueError("no parameter requires a gradient: there is nothing to synchronise")
        for name, p in self._trainable.items():
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise TypeError(f"parameter '{name}' is {p.dtype}: expected float32, bfloat16 or float16")
            if p.is_sparse:
                raise TypeError(f"parameter '{name}' is sparse: expected a dense one")
        self._names = {p: name for name, p in self._trainable.items()}
        self._kinds = {p: (p.dtype, p.device) for p in self._trainable.values()}
        self._rule: Any = None
        self._session: Optional[_native.Session] = None
        self._shared = Buffers(module)
        self._units: List[Unit] = []
        self._unit_of: Dict[nn.Parameter, Unit] = {}
        self._usage_unit: Optional[Unit] = None
        self._synchronises = True
        self._in_backward = False
        self._forwards = 0
        self._stepped = True
        self._join: Optional[Join] = None
        # Parameters that are used outside their module's forward, seen in the first one.
        self._used_early: Set[nn.Parameter] = set()
        self._entered: Set[nn.Parameter] = set()
        self._watched = False
        Job.get()
        Job.models += 1
        self._number = Job.models
        broadcast(_tensors(module))
        # A worker alone has nothing to synchronise, and nothing to pay for it.
        self._is_alone = world_size() == 1 and update == "worker"
        self._factored: List[Factored] = []
        if not self._is_alone:
            self._factored = [Factored(self, linear, self._names[linear.weight]) for linear in factorable(module)]
            for factored in self._factored:
                patch(factored)
            for parameter in self._trainable.values():
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        if update == "server":
            self._await_in_forward()
        MODELS.append(self)
        Job.closers.append(self._close)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            if self in MODELS and self._join is None:
                self._share_buffers(False)
            return self.module(*args, **kwargs)
        self._begin_forward()
        if self._watched or self._is_alone:
            return self.module(*args, **kwargs)
        return self._watched_forward(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the next one outside sends them."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """For workers whose numbers of batches differ: those that are through go along with the others.

        As torch's: they contribute nothing while the others train on, and end with the same model.
        ``divide_by_initial_world_size=False`` takes means over the workers that still train.
        """
        if not enable or self._is_alone:
            yield
            return
        if self._update == "server" and not divide_by_initial_world_size:
            raise ValueError('with update="server" the shards divide by the number of all workers')
        # Within it, buffers are shared at each step: nothing may be left from before.
        self._share_buffers(False)
        self._join = Join(self, divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
            self._join.go_along()
            self._join.close()
        except BaseException as error:
            # The others must not wait for a worker that has given up.
            self._join.close(because=f"worker {rank()}: {error!r}")
            raise
        finally:
            self._join = None

    def synchronize(self) -> None:
        """Waits for everything that is in flight: gradients are means, parameters are the new ones."""
        for unit in self._units:
            self._await(unit)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Finishes synchronisation and scales gradients so that their norm is at most ``max_norm``. Returns it.

        ``torch.nn.utils.clip_grad_norm_`` after ``backward`` does the same.
        """
        if self._update == "server":
            raise RuntimeError('update="server" has no gradients to clip here: the shards step with them. Use update="worker"')
        self.synchronize()
        return nn.utils.clip_grad_norm_(self._trainable.values(), max_norm, norm_type)

    def sessions_plan(self) -> List[Tuple[str, int, str, str, int]]:
        """The plan in force: name, parameters, scheme, reason and bytes this worker sends a step."""
        if self._session is None:
            raise RuntimeError("the plan is made at the first synchronised backward of two or more workers")
        return self._session.plan()

    def traffic(self) -> Tuple[int, int]:
        """Bytes sent and received for gradients so far."""
        return (0, 0) if self._session is None else self._session.traffic()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As a module's; factors kept during ``no_sync`` are gradients, too."""
        super().zero_grad(set_to_none)
        for factored in self._factored:
            factored.reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.synchronize()
        return super().state_dict(*args, **kwargs)

    # Forward.

    @torch.compiler.disable
    def _begin_forward(self) -> None:
        if self not in MODELS:
            raise RuntimeError("this model took part in a job that has ended, or failed earlier")
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            why = f"worker {rank()}: the last backward pass ended with an error, and not all of its gradients were sent"
            self._close(because=why)
            raise RuntimeError(why)
        self._entered = set()
        self._forwards += 1
        if self._join is None:
            self._share_buffers(self._synchronises)
        elif self._synchronises:
            self._join.note_forward()
            self._share_buffers_in_join()

    @torch.compiler.disable
    def _watched_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first forward: sees which parameters are used in other ways than by calling their module."""
        self._watched = True
        for m in self.module.modules():
            if is_compiled(m):
                # What happens inside cannot be seen: nothing is taken for granted.
                self._used_early.update(m.parameters())
        inside = {p: f for f in self._factored for p in f.linear.parameters()}

        def unexpected(parameter: nn.Parameter) -> bool:
            factored = inside.get(parameter)
            return parameter not in self._entered if factored is None else factored.inside == 0

        with Watch(unexpected) as watch:
            result = self.module(*args, **kwargs)
        self._used_early.update(watch.seen)
        for factored in list(self._factored):
            if factored.linear.weight in watch.seen or factored.linear.bias in watch.seen:
                unpatch(factored)
                self._factored.remove(factored)
        return result

    def _await_in_forward(self) -> None:
        """With update="server": a module's parameters are awaited when its forward begins."""

        @torch.compiler.disable
        def await_own(module: nn.Module, _: Any) -> None:
            for p in module.parameters(recurse=False):
                self._entered.add(p)
                unit = self._unit_of.get(p)
                if unit is not None:
                    self._await(unit)

        @torch.compiler.disable
        def await_early(*_: Any) -> None:
            for p in self._used_early:
                unit = self._unit_of.get(p)
                if unit is not None:
                    self._await(unit)

        for m in self.module.modules():
            if next(m.parameters(recurse=False), None) is not None:
                m.register_forward_pre_hook(await_own)
        self.module.register_forward_pre_hook(await_early)
        self.module.register_state_dict_pre_hook(lambda *_: self.synchronize())

    def _await(self, unit: Unit) -> None:
        if not unit.in_flight:
            return
        try:
            assert self._session is not None
            unit.receive(self._session)
            if self._update == "server":
                self._check(unit)
        except Exception as error:
            self._close(because=f"worker {rank()}: {error}")
            raise
        if self._update == "server":
            unit.land_parameters()

    # Backward: what follows runs in its thread.

    @_or_abort
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
        Variable._execution_engine.queue_callback(self._finish_backward)
        if self._session is None:
            self._start_session()
        if self._update == "server":
            self._stepped = False
            self._session.set_learning_rate(self._rule.rate())  # type: ignore[union-attr]
            self.synchronize()
        for unit in self._units:
            unit.begin()

    @_or_abort
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._begin_backward()
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise TypeError(f"the gradient of '{self._names[parameter]}' is sparse: expected a dense one (sparse=False)")
        if not self._synchronises:
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
            return
        unit.ready.add(parameter)
        unit.missing -= 1
        if unit.missing == 0:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        assert self._session is not None
        self._check(unit)
        unit.send(self._session)

    @_or_abort
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

    @_or_abort
    def _finish_backward(self) -> None:
        self._in_backward = False
        assert self._session is not None
        self._send_the_rest()
        if self._update == "server":
            return
        self.synchronize()
        self._deliver()

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
            usage = torch.tensor([float(p in self._unit_of[p].ready) for p in self._trainable.values()])
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
                if used is not None and p not in used:
                    continue  # nobody used it: its gradient stays as it was
                if unit.fc is None or p.dtype != part.dtype or p.device != part.device:
                    part = part.to(p.device, p.dtype, copy=True)
                if p.grad is None:
                    p.grad = part
                elif unit.fc is not None:
                    p.grad.add_(part)
                else:
                    p.grad.copy_(part)

    # Sessions.

    def _start_session(self) -> None:
        """Decides what goes how, together with the other workers."""
        if self._update == "server" and self._rule is None:
            raise RuntimeError(
                'update="server" needs a rule for the shards: make a poseidon.torch.SGD, Adam or AdamW from '
                "model.parameters() before the first backward"
            )
        rows = {factored.name: factored.rows for factored in self._factored}
        self._sessions_started += 1
        topic = f"rows of model {self._number}, {self._sessions_started}"
        all_rows = [json.loads(r) for r in Job.get().gather(topic, json.dumps(rows))]
        factors: Dict[nn.Parameter, Factored] = {}
        for factored in self._factored:
            most = max([self._batch or 0, *(r.get(factored.name, 0) for r in all_rows)])
            m, n = factored.linear.weight.shape
            everywhere = all(factored.name in r for r in all_rows)
            if most == 0 or not everywhere or not _goes_by_factors(m, n, most, self._scheme):
                factored.unit = None
                continue
            parameters = [factored.linear.weight]
            if factored.linear.bias is not None and factored.linear.bias.requires_grad:
                parameters.append(factored.linear.bias)
            factored.unit = Unit(factored.name, parameters, (m, n, most))
            factors.update({p: factored for p in parameters})
        self._units = units_of(self._trainable, factors)
        self._usage_unit = None
        if self.find_unused_parameters:
            self._usage_unit = Unit("parameters in use", [])
            self._usage_unit.len = len(self._trainable)
            self._units.append(self._usage_unit)
        for factored in self._factored:
            if factored.unit is None:
                factored.fold()
                unpatch(factored)
        self._factored = [factored for factored in self._factored if factored.unit is not None]
        layers = []
        for index, unit in enumerate(self._units):
            unit.index = index
            layers.append((unit.name, unit.len, unit.fc))
            self._unit_of.update({p: unit for p in unit.parameters})
        setup: Dict[str, Any] = {}
        if self._rule is not None:
            setup.update(optimizer=self._rule.text(), learning_rate=self._rule.rate())
        self._session = Job.open(
            layers,
            deterministic=self._deterministic,
            threads=torch.get_num_threads(),
            **setup,
        )
        if self._rule is not None:
            for unit in self._units:
                self._session.broadcast(unit.index, memory(unit.take_parameters()))
            for unit in self._units:
                self._session.receive(unit.index)
                # All workers have these values already, and the graph this backward goes through, too.
                unit.note_versions()
            self._rule._restore()

    _sessions_started = 0

    def _set_rule(self, rule: Any) -> None:
        if self._session is not None:
            raise RuntimeError("the shards have their rule already: make the optimizer before the first backward")
        self._rule = rule

    def _note_step(self) -> None:
        self._stepped = True

    def _restart(self) -> None:
        """The shards forget: the next backward starts with the parameters as they are then."""
        if self._session is None:
            return
        self.synchronize()
        self._session.finish()
        self._session = None
        self._units, self._unit_of = [], {}
        for factored in self._factored:
            factored.unit = None
            factored.reset()

    @torch.compiler.disable
    @_or_abort
    def _share_buffers(self, synchronises: bool) -> None:
        if self.broadcast_buffers:
            self._shared.begin_forward(synchronises)

    @_or_abort
    def _share_buffers_in_join(self) -> None:
        # Those who are through go along with every step of the others, and with nothing else they do.
        if self.broadcast_buffers and self._join is not None:
            self._shared.share(self._join.first_active)

    def _close(self, because: Optional[str] = None) -> Callable[[], None]:
        """Says goodbye, or why it stops. What is returned waits for the others, who may wait for another model first."""
        if self not in MODELS:
            return lambda: None
        if because is None:
            self.synchronize()
        MODELS.remove(self)
        Job.closers.remove(self._close)
        session, self._session = self._session, None
        if because is not None:
            if session is not None:
                session.abort(because)
            self._shared.close(because)
            return lambda: None
        if session is not None:
            session.say_goodbye()

        def wait() -> None:
            self._shared.close()
            if session is not None:
                session.finish()

        return wait


def _lies_in(parameter: nn.Parameter, values: Tensor) -> bool:
    start = values.data_ptr()
    return start <= parameter.data_ptr() < start + max(values.numel(), 1) * values.element_size()


def _goes_by_factors(m: int, n: int, rows: int, scheme: str) -> bool:
    return _native.choose(m, n, rows, world_size(), scheme)[0] == "sfb"


def _tensors(module: nn.Module) -> List[Tuple[str, Tensor]]:
    state = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor.detach()) for name, tensor in state if tensor.numel() > 0]
