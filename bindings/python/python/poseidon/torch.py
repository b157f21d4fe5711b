"""Data-parallel training with PyTorch, synchronised by Poseidon.

    import poseidon.torch as psd

    psd.init()                                   # torchrun, mpirun, srun or poseidon launch
    model = psd.DistributedDataParallel(model)   # instead of torch's
    ...                                          # the training loop stays as it is

A parameter's gradient leaves the moment its backward ends and travels while the layers below are
computed. Linear layers whose factors (gradient of the output, input) are smaller than their gradient
go as factors; their weight's gradient is never computed locally. When ``backward`` returns, every
``grad`` is the mean over all workers, bit by bit the same on each.
"""

import atexit
import contextlib
import json
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from poseidon import _native
from poseidon._torch_layers import Factored, Unit, factorable, memory, patch, units_of

__all__ = [
    "DistributedDataParallel",
    "barrier",
    "init",
    "is_initialized",
    "plan",
    "rank",
    "shutdown",
    "world_size",
]



class _Job:
    """The job this process is in. Sessions of models are siblings of its own, which has no layers."""

    session: Optional[_native.Session] = None
    models = 0
    sessions = 0
    barriers = 0

    @classmethod
    def get(cls) -> _native.Session:
        if cls.session is None:
            raise RuntimeError("poseidon.torch is not initialised: call poseidon.torch.init() first")
        return cls.session

    @classmethod
    def open(cls, layers: Sequence[Tuple[str, int, Any]], **setup: Any) -> _native.Session:
        cls.sessions += 1
        return cls.get().sibling(f"torch {cls.sessions}", list(layers), **setup)


def init() -> None:
    """Joins the job that the environment describes, and waits for the other workers.

    The environment of torchrun, Open MPI, Slurm and ``poseidon launch`` is understood; without any
    of them this process is a job of one worker.
    """
    if _Job.session is not None:
        raise RuntimeError("poseidon.torch is already initialised")
    _Job.session = _native.Session()
    atexit.register(shutdown)


def is_initialized() -> bool:
    """Whether this process has joined a job."""
    return _Job.session is not None


def shutdown() -> None:
    """Leaves the job; waits until every worker does. Called at exit if you do not."""
    session, _Job.session = _Job.session, None
    for model in list(_models):
        model._close()
    if session is not None:
        session.finish()


def rank() -> int:
    """This worker's rank."""
    return _Job.get().rank


def world_size() -> int:
    """Number of workers."""
    return _Job.get().workers


def barrier() -> None:
    """Returns when every worker has called it."""
    _Job.barriers += 1
    _Job.get().gather(f"barrier {_Job.barriers}", "null")


def plan(model: nn.Module, batch: int, workers: Optional[int] = None, scheme: str = "auto") -> str:
    """A table of how each trainable parameter of ``model`` would be synchronised, and why.

    ``batch`` is the number of rows a Linear layer sees per worker and step: the batch size or, for
    sequences, batch times length.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    workers = workers or (world_size() if is_initialized() else 4)
    rows = [("parameter", "size", "scheme", "why")]
    factored = {id(p): linear for linear in factorable(model) for p in linear.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            rows.append((name, str(parameter.numel()), "-", "frozen"))
        elif id(parameter) in factored:
            m, n = factored[id(parameter)].weight.shape
            choice, why = _native.choose(m, n, batch, workers, scheme)
            if parameter.dim() == 1:
                why = "part of its weight's factors" if choice == "sfb" else "its gradient has no factors"
            rows.append((name, str(parameter.numel()), choice, why))
        else:
            rows.append((name, str(parameter.numel()), "ps", "its gradient has no factors"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    line = "{:<%d}  {:>%d}  {:<%d}  {}" % tuple(widths)
    return "\n".join(line.format(*row) for row in rows)


_models: List["DistributedDataParallel"] = []


class DistributedDataParallel(nn.Module):
    """Wraps ``module`` so that ``backward`` leaves the mean of all workers' gradients in ``grad``.

    As torch's: parameters and buffers begin as rank 0's, ``state_dict`` has the same keys (those of
    the module behind ``module.``), ``no_sync`` accumulates locally.

    * ``broadcast_buffers``: before each forward in training, buffers become rank 0's.
    * ``find_unused_parameters``: parameters may take no part in a step.
    * ``scheme``: ``auto`` (the fewest bytes for each layer), ``ps`` or ``sfb``.
    * ``batch``: the most rows (samples, or samples times sequence length) a Linear layer sees between
      two synchronisations; needed if later steps are larger than the first.
    * ``deterministic``: gradients are added in rank order, so that a run repeats bit by bit.

    During ``no_sync``, Linear layers that go by factors keep those instead of a gradient: their
    ``weight.grad`` is complete after the next synchronised backward.

    How layers go is decided at the first synchronised backward, when it is known how many rows each
    Linear layer sees. ``sessions_plan()`` then tells.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        scheme: str = "auto",
        batch: Optional[int] = None,
        deterministic: bool = False,
    ):
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
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
        _Job.models += 1
        self._number = _Job.models
        self._session: Optional[_native.Session] = None
        self._buffer_session: Optional[_native.Session] = None
        self._units: List[Unit] = []
        self._unit_of: Dict[nn.Parameter, Unit] = {}
        self._synchronises = True
        self._in_backward = False
        self._usage: Optional[Tensor] = None
        _broadcast(_tensors(module))
        names = {id(p): name for name, p in self._trainable.items()}
        self._factored = [
            Factored(self, linear, names[id(linear.weight)]) for linear in factorable(module)
        ]
        for factored in self._factored:
            patch(factored)
        for parameter in self._trainable.values():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        _models.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and self.broadcast_buffers and torch.is_grad_enabled():
            self._share_buffers()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the next one outside sends them."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def sessions_plan(self) -> List[Tuple[str, int, str, str, int]]:
        """The plan in force: name, parameters, scheme, reason and bytes this worker sends a step."""
        if self._session is None:
            raise RuntimeError("the plan is made at the first synchronised backward")
        return self._session.plan()

    def traffic(self) -> Tuple[int, int]:
        """Bytes sent and received for gradients so far."""
        return (0, 0) if self._session is None else self._session.traffic()

    # What follows runs in the thread of the backward pass.

    def _begin_backward(self) -> None:
        if self._in_backward or not self._synchronises:
            return
        self._in_backward = True
        Variable._execution_engine.queue_callback(self._finish_backward)
        if self._session is None:
            self._start_session()
        for unit in self._units:
            unit.begin()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._begin_backward()
        if not self._synchronises:
            return
        unit = self._unit_of[parameter]
        if unit.fc is not None or parameter in unit.ready:
            return
        unit.ready.add(parameter)
        unit.missing -= 1
        if unit.missing == 0:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        assert self._session is not None
        unit.in_flight = True
        if unit.in_place:
            gradient = unit.parameters[0].grad
            unit.is_staged = gradient is None or not gradient.is_contiguous()
            if gradient is not None and not unit.is_staged:
                self._session.send(unit.index, memory(gradient))
                return
        for parameter, part in unit.slices():
            part.copy_(parameter.grad) if parameter.grad is not None else part.zero_()
        self._session.send(unit.index, memory(unit.staged()))

    def _send_factors(self, factored: Factored) -> None:
        unit = factored.unit
        assert self._session is not None and unit is not None
        unit.in_flight = True
        if factored.parts:
            unit.ready.update(unit.parameters)
        parts = [(memory(u), memory(v)) for u, v in factored.parts]
        try:
            self._session.send_factors(unit.index, parts, memory(unit.staged()))
        except _native.UsageError as error:
            raise _native.UsageError(f"{error}. Pass batch= the most rows a step can have") from None
        factored.reset()

    def _finish_backward(self) -> None:
        self._in_backward = False
        assert self._session is not None
        try:
            self._send_the_rest()
            for unit in self._units:
                self._session.receive(unit.index)
                unit.in_flight = False
            self._deliver()
        except Exception:
            # The others must not wait for a worker that has given up.
            self._close(abort=True)
            raise

    def _send_the_rest(self) -> None:
        """Sends what backward did not reach."""
        for factored in self._factored:
            unit = factored.unit
            if unit is not None and not unit.in_flight:
                if not factored.parts and not self.find_unused_parameters:
                    raise self._unused([factored.name])
                self._send_factors(factored)
        unused = []
        for unit in self._units:
            if unit.in_flight or unit is self._usage_unit:
                continue
            unused += [n for n, p in self._trainable.items() if p in set(unit.parameters) - unit.ready]
            if not self.find_unused_parameters:
                raise self._unused(unused)
            self._send(unit)
        if self._usage_unit is not None:
            usage = self._usage_unit.staged()
            for i, p in enumerate(self._trainable.values()):
                unit = self._unit_of[p]
                usage[i] = float(p in unit.ready)
            self._usage_unit.in_flight = True
            self._session.send(self._usage_unit.index, memory(usage))

    def _unused(self, names: Sequence[str]) -> RuntimeError:
        return RuntimeError(
            f"no gradient came for {', '.join(names)}: these parameters took no part in the loss of "
            f"worker {rank()}. Pass find_unused_parameters=True if that is meant"
        )

    def _deliver(self) -> None:
        """Puts results that came to shared buffers where the optimizer looks for them."""
        usage = None if self._usage_unit is None else self._usage_unit.staged()
        position = {p: i for i, p in enumerate(self._trainable.values())}
        for unit in self._units:
            if unit is self._usage_unit:
                continue
            for parameter, part in unit.slices() if unit.is_staged else ():
                if usage is not None and usage[position[parameter]] == 0:
                    continue  # nobody used it: its gradient stays as it was
                if parameter.grad is None:
                    parameter.grad = part.to(parameter.dtype, copy=True).to(parameter.device)
                elif unit.fc is not None:
                    parameter.grad.add_(part)
                else:
                    parameter.grad.copy_(part)

    def _start_session(self) -> None:
        """Decides what goes how, together with the other workers."""
        rows = {factored.name: factored.rows for factored in self._factored}
        all_rows = [json.loads(r) for r in _Job.get().gather(f"rows {self._number}", json.dumps(rows))]
        factors: Dict[nn.Parameter, Factored] = {}
        batch = 1
        for factored in self._factored:
            most = max([self._batch or 0, *(r[factored.name] for r in all_rows)])
            m, n = factored.linear.weight.shape
            if most == 0 or not _goes_by_factors(m, n, most, self._scheme):
                continue
            batch = max(batch, most)
            parameters = [factored.linear.weight]
            if factored.linear.bias is not None and factored.linear.bias.requires_grad:
                parameters.append(factored.linear.bias)
            factored.unit = Unit(factored.name, parameters, (m, n))
            factors.update({p: factored for p in parameters})
        self._units = units_of(self._trainable, factors)
        self._usage_unit = None
        if self.find_unused_parameters:
            self._usage_unit = Unit("parameters in use", [])
            self._usage_unit.len = len(self._trainable)
            self._units.append(self._usage_unit)
        layers = []
        for factored in self._factored:
            if factored.unit is None:
                factored.fold()
        for index, unit in enumerate(self._units):
            unit.index = index
            layers.append((unit.name, unit.len, unit.fc))
            self._unit_of.update({p: unit for p in unit.parameters})
        # What goes by factors is decided above, where the batch of each layer is known.
        self._session = _Job.open(
            layers, batch=batch, scheme="sfb", deterministic=self._deterministic
        )

    _usage_unit: Optional[Unit] = None

    def _share_buffers(self) -> None:
        buffers = [b for b in self.module.buffers() if b.dtype == torch.float32 and b.device.type == "cpu"]
        if not buffers or world_size() == 1:
            return
        flat = torch.zeros(sum(b.numel() for b in buffers))
        if self._buffer_session is None:
            self._buffer_session = _Job.open([("buffers", flat.numel(), None)], optimizer="sum")
        if rank() == 0:
            torch.cat([b.reshape(-1) for b in buffers], out=flat)
        self._buffer_session.send(0, memory(flat))
        self._buffer_session.receive(0)
        for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers])):
            buffer.copy_(part.view_as(buffer))

    def _close(self, abort: bool = False) -> None:
        if self in _models:
            _models.remove(self)
        for session in (self._session, self._buffer_session):
            if session is None:
                continue
            session.abort("a worker's backward pass failed") if abort else session.finish()
        self._session = self._buffer_session = None


def _goes_by_factors(m: int, n: int, rows: int, scheme: str) -> bool:
    return _native.choose(m, n, rows, world_size(), scheme)[0] == "sfb"


def _tensors(module: nn.Module) -> List[Tuple[str, Tensor]]:
    state = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor.detach()) for name, tensor in state if tensor.numel() > 0]


def _broadcast(tensors: Sequence[Tuple[str, Tensor]]) -> None:
    """Every worker's ``tensors`` become rank 0's, bit by bit, whatever their type."""
    if world_size() == 1 or not tensors:
        _Job.get()
        return
    words = []
    for _, tensor in tensors:
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        padded = torch.zeros(-(-raw.numel() // 4) * 4, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        words.append(padded.view(torch.float32))
    layers = [(name, w.numel(), None) for (name, _), w in zip(tensors, words)]
    session = _Job.open(layers)
    for index, word in enumerate(words):
        session.broadcast(index, memory(word))
    for index, ((_, tensor), word) in enumerate(zip(tensors, words)):
        session.receive(index)
        raw = word.view(torch.uint8)[: tensor.numel() * tensor.element_size()]
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))
    session.finish()
