"""What of a model is synchronised as one, and Linear layers that hand out their factors."""

import types
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from poseidon import _native
from poseidon.torch._job import is_initialized, memory, world_size

# Gradients of at least this many bytes go out from their own memory; smaller ones share a buffer,
# because a frame costs a few microseconds however short it is.
_OWN_MEMORY = 64 << 10
_BUCKET = 256 << 10


class Member:
    """A parameter that is synchronised, as one of its unit's.

    Hooks have their parameter's at hand: to look one up, torch computes a parameter's hash in Python.
    """

    __slots__ = ("parameter", "name", "dtype", "device", "unit", "factored", "is_used", "is_ready", "before", "version", "address")

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name = name
        self.parameter = parameter
        # As they were when the model was wrapped.
        self.dtype, self.device = parameter.dtype, parameter.device
        self.unit: Optional[Unit] = None
        # Its layer, if that may go by factors.
        self.factored: Optional[Factored] = None
        # Whether it got a gradient since the last synchronisation, and whether in this backward.
        self.is_used = self.is_ready = False
        # If it goes by factors: its gradient when this backward began.
        self.before: Any = None
        # With update="server": torch's count of changes and where the values are, as the wrapper left them.
        self.version = self.address = 0

    def has_foreign_gradient(self) -> bool:
        """Whether a factored layer's parameter got a gradient from elsewhere than its layer's forward."""
        return _trace(self.parameter.grad) != self.before


class Unit:
    """What is synchronised as one: a layer of the session."""

    def __init__(self, name: str, members: List[Member], fc: Optional[Tuple[int, int, int]] = None):
        self.name = name
        self.members = members
        self.parameters = parameters = [m.parameter for m in members]
        # If it goes by factors: outputs, inputs, most rows a step.
        self.fc = fc
        self.index = -1
        self.len = sum(p.numel() for p in parameters)
        # With update="server": where the parameters are, as the shards know them.
        self.values: Optional[Tensor] = None
        # Whether `values` is the parameters' own memory.
        self.in_values = False
        # Where this step's gradient is, or the result if it comes instead.
        self.result: Optional[Tensor] = None
        self.stage: Optional[Tensor] = None
        # The parameters' parts of the stage, unless it goes by factors: gradients are those parts then.
        self.parts: List[Tensor] = []
        self.missing = 0
        self.in_flight = False

    def begin(self) -> None:
        """A synchronised backward begins."""
        self.missing = len(self.members)
        for member in self.members:
            member.is_ready = False
            if self.fc is not None:
                member.before = _trace(member.parameter.grad)

    def send(self, session: _native.Session) -> None:
        self.in_flight = True
        self.result = self._gradient()
        if self.values is None:
            session.send(self.index, memory(self.result))
        else:
            session.send_into(self.index, memory(self.result), memory(self.values))
            # Sums are made in a gradient's memory: nobody should look at it any more.
            for p in self.parameters:
                p.grad = None

    def send_factors(self, session: _native.Session, parts: List[Tuple[Tensor, Tensor]]) -> None:
        self.in_flight = True
        self.result = self.values
        if self.result is None:
            self.result = self._stage()
        memories = [(memory(u), memory(v)) for u, v in parts]
        session.send_factors(self.index, memories, memory(self.result))

    def receive(self, session: _native.Session) -> None:
        """Waits for the result."""
        session.receive(self.index)
        self.in_flight = False

    def slices(self, whole: Tensor) -> Iterator[Tuple[nn.Parameter, Tensor]]:
        """Each parameter and its part of ``whole``."""
        start = 0
        for p in self.parameters:
            yield p, whole[start : start + p.numel()].view(p.shape)
            start += p.numel()

    def take_parameters(self) -> Tensor:
        """For update="server": the memory that parameters come back to, which is their own where it can be."""
        own = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in self.parameters)
        if own and len(self.parameters) == 1 and self.parameters[0].is_contiguous():
            self.values = self.parameters[0].detach().view(-1)
        else:
            flat = [p.detach().to("cpu", torch.float32).reshape(-1) for p in self.parameters]
            self.values = torch.cat(flat) if flat else torch.zeros(0)
            for p, part in self.slices(self.values) if own else ():
                p.data = part
        self.in_values = own
        for m in self.members if own else ():
            m.address = m.parameter.data_ptr()
        return self.values

    def land_parameters(self) -> None:
        """Puts what came back where the model has it."""
        assert self.values is not None
        if not self.in_values:
            with torch.no_grad():
                for p, part in self.slices(self.values):
                    p.copy_(part)
        else:
            # Written past torch: a graph that was made with the old values must not go on with these.
            for p in self.parameters:
                torch.autograd.graph.increment_version(p)
        self.note_versions()

    def note_versions(self) -> None:
        """From here on, whoever else changes a parameter is noticed."""
        for m in self.members:
            m.version = m.parameter._version

    def _gradient(self) -> Tensor:
        """This step's gradient as one piece: where it is, if it can go out from there."""
        gradients = [p.grad for p in self.parameters]
        for member, gradient in zip(self.members, gradients):
            if gradient is not None and gradient.layout != torch.strided:
                raise TypeError(f"the gradient of '{member.name}' is sparse: expected a dense one (sparse=False)")
        gradient = gradients[0] if len(gradients) == 1 else None
        if (
            gradient is not None
            and gradient.dtype == torch.float32
            and gradient.device.type == "cpu"
            and gradient.is_contiguous()
            # torch may hand out one memory twice: here, and as what the layers below still read.
            and _holders(gradient) <= _ONE_HOLDER
        ):
            return gradient.detach()
        stage = self._stage()
        with torch.no_grad():
            copy_all(self.parts, gradients)
        return stage

    def _stage(self) -> Tensor:
        """Memory for a gradient; not that of the last one if somebody still has it."""
        if self.stage is None or _holders(self.stage) > _ONE_HOLDER + len(self.parts):
            self.stage = torch.zeros(self.len, dtype=torch.float32)
            self.parts = [part for _, part in self.slices(self.stage)] if self.fc is None else []
        return self.stage


def copy_all(into: List[Tensor], sources: List[Optional[Tensor]]) -> None:
    """Copies each of ``sources``; zeros where there is none."""
    there = [source for source in sources if source is not None]
    if len(there) == len(into):
        # One call: torch needs several microseconds for each.
        torch._foreach_copy_(into, there)
        return
    for part, source in zip(into, sources):
        part.zero_() if source is None else part.copy_(source)


def _holders(tensor: Tensor) -> int:
    """How many tensors have this one's memory, in a count of its own."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ONE_HOLDER = _holders(torch.zeros(1))


def _trace(gradient: Optional[Tensor]) -> Any:
    """Changes whenever the gradient does."""
    return None if gradient is None else (id(gradient), gradient._version)


class Factored:
    """A Linear layer that may go by factors: what its calls have left for the next synchronisation.

    A backward pass that does not synchronise (``no_sync``) leaves gradients, as everywhere, and copies of the factors they
    were made from. If nobody has touched the gradients when it is time to send, the factors go instead.
    """

    def __init__(self, owner: Any, linear: nn.Linear, name: str):
        # Not kept alive by its layers: a model that is deleted ends then, not when garbage is collected.
        self.owner = weakref.proxy(owner)
        self.linear = linear
        self.weight = linear.weight
        self.name = name
        self.unit: Optional[Unit] = None
        # Of forward passes since the last synchronisation.
        self.rows = 0
        # Calls whose backward is still to come.
        self.calls = 0
        self.inside = 0
        # It takes no part any more; graphs made before may still come by.
        self.is_out = False
        self.parts: List[Tuple[Tensor, Tensor]] = []
        # Gradients before the first of the kept parts, and as the last one left them.
        self.before: Dict[nn.Parameter, Optional[Tensor]] = {}
        self.after: Dict[nn.Parameter, Any] = {}

    @property
    def parameters(self) -> List[nn.Parameter]:
        """Those that have gradients."""
        both: Tuple[Any, Any] = (self.linear.weight, self.linear.bias)
        return [p for p in both if p is not None and p.requires_grad]

    def take(self, u: Tensor, v: Tensor, is_last: bool) -> bool:
        """The factors of one call. False if the gradient itself is wanted."""
        if self.is_out:
            return False
        owner = self.owner
        owner._begin_backward()
        if self.is_out or (self.unit is None and owner._session is not None):
            return False
        if not owner._synchronises:
            self._keep(u, v)
            return False
        if self.unit is not None and self.unit.in_flight:
            raise RuntimeError(
                f"a second backward reached '{self.name}' after its factors were sent. With torch.utils.checkpoint, pass "
                "use_reentrant=False"
            )
        self.parts.append((_factor(u), _factor(v)))
        if is_last:
            owner._send_factors(self)
        return True

    def _keep(self, u: Tensor, v: Tensor) -> None:
        if not self.parts:
            self.before = {p: None if p.grad is None else p.grad.clone() for p in self.parameters}
        elif self._is_touched():
            self._take_gradients()
        # Copies: the program may write its next batch to the same memory.
        self.parts.append((_factor(u).clone(), _factor(v).clone()))

    def note_gradient(self, parameter: nn.Parameter) -> None:
        """A gradient of a pass that does not synchronise has landed."""
        if self.parts:
            self.after[parameter] = _trace(parameter.grad)

    def _is_touched(self) -> bool:
        return any(_trace(p.grad) != self.after.get(p) for p in self.parameters)

    def _take_gradients(self) -> None:
        """Somebody has changed the gradients: what counts is what is there now, and nothing from before."""
        is_zero = not any(p.grad is not None and bool(p.grad.any()) for p in self.parameters)
        self.parts = [] if is_zero else [as_factors(self.linear)]
        self.before = {}

    def settle(self) -> None:
        """A synchronised backward begins: what was accumulated goes with it, as factors."""
        if self.parts:
            if self._is_touched():
                self._take_gradients()
            for p in self.parameters:
                p.grad = self.before.get(p)
        self.before, self.after = {}, {}

    def done(self) -> None:
        """The weight is not needed any more in this backward pass."""
        unit = self.unit
        if unit is not None and unit.in_flight:
            self.owner._session.rebuild(unit.index)

    def reset(self) -> None:
        self.rows = 0
        self.parts = []
        self.before, self.after = {}, {}


def _factor(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def as_factors(linear: nn.Linear) -> Tuple[Tensor, Tensor]:
    """Factors that give the gradients a layer has: rows of the weight's, and one for the bias.

    Each row goes twice, with opposite signs, because the bias' gradient is the sum of all u.
    """
    m, n = linear.weight.shape
    weight = torch.zeros(m, n) if linear.weight.grad is None else _factor(linear.weight.grad) / 2
    given = None if linear.bias is None else linear.bias.grad
    bias = torch.zeros(m) if given is None else _factor(given)
    u = torch.cat([torch.eye(m), -torch.eye(m), bias.view(1, m)])
    v = torch.cat([weight, -weight, torch.zeros(1, n)])
    return u, v


class _Call:
    """One call of a layer, for as long as its backward may come."""

    def __init__(self, factored: Factored):
        self.factored = factored
        self.is_pending = True
        factored.calls += 1

    def end(self) -> bool:
        """Its backward is here. True if no other call's is still to come."""
        self.factored.calls -= int(self.is_pending)
        self.is_pending = False
        return self.factored.calls == 0

    def __del__(self) -> None:
        self.end()


class _FactorLinear(torch.autograd.Function):
    """Linear that hands out its factors instead of computing the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor, bias: Optional[Tensor], factored: Factored) -> Tensor:  # type: ignore[override]
        kind = source.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else source.dtype
        low = source.to(dtype)
        ctx.save_for_backward(low, weight)
        ctx.factored, ctx.input_dtype, ctx.has_bias = factored, source.dtype, bias is not None
        ctx.call = _Call(factored)
        factored.rows += low.numel() // max(low.shape[-1], 1)
        return F.linear(low, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:  # type: ignore[override]
        source, weight = ctx.saved_tensors
        u = gradient.reshape(-1, gradient.shape[-1])
        v = source.reshape(-1, source.shape[-1])
        # Factors leave first, so that they travel while the rest is computed.
        is_last = ctx.call.end()
        taken = _is_wanted(ctx) and ctx.factored.take(u, v, is_last)
        below = down = bias = None
        if ctx.needs_input_grad[0]:
            below = (gradient @ weight.to(gradient.dtype)).to(ctx.input_dtype)
        if taken:
            ctx.factored.done()
        else:
            if ctx.needs_input_grad[1]:
                down = (u.t() @ v).to(weight.dtype)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                bias = u.sum(0).to(weight.dtype)
        return below, down, bias, None


def _is_wanted(ctx: Any) -> bool:
    """Whether this pass goes on to the weight: that for torch.autograd.grad(loss, input) does not."""
    weight = ctx.next_functions[1][0]
    try:
        return weight is not None and torch._C._will_engine_execute_node(weight)
    except RuntimeError:
        return False  # torch.autograd.grad(loss, weight): it gets the gradient itself


def choose(m: int, n: int, rows: int, workers: int, scheme: str) -> Tuple[str, str]:
    """How a Linear layer goes, and why."""
    return _native.choose(m, n, rows, workers, scheme)


def units_of(members: Iterable[Member]) -> List[Unit]:
    """Units in forward order: layers that have theirs, by factors, and large parameters alone, small ones together.

    What is together stands where its first parameter does: the next forward needs it there.
    """
    units: List[Unit] = []
    bucket: List[Member] = []
    first = 0

    def close() -> None:
        if bucket:
            name = bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} to {bucket[-1].name}"
            units.insert(first, Unit(name, list(bucket)))
            bucket.clear()

    for member in members:
        unit = None if member.factored is None else member.factored.unit
        if unit is not None:
            if unit not in units:
                units.append(unit)
            continue
        if member.parameter.numel() * 4 >= _OWN_MEMORY:
            units.append(Unit(member.name, [member]))
            continue
        if not bucket:
            first = len(units)
        bucket.append(member)
        if sum(m.parameter.numel() * 4 for m in bucket) >= _BUCKET:
            close()
    close()
    return units


def factorable(module: nn.Module) -> List[nn.Linear]:
    """Linear layers whose weight's gradient is only made by their own forward, as far as one can see."""
    owners: Dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    # Exactly Linear: subclasses have reasons of their own, and attention uses its projection's
    # weight without calling it.
    return [
        m
        for m in module.modules()
        if type(m) is nn.Linear and m.weight.requires_grad and owners.get(id(m.weight)) == 1
        and (m.bias is None or owners.get(id(m.bias)) == 1)
        and not is_hooked(m)
        and ("forward" not in m.__dict__ or is_patch(m.forward))
    ]


def is_hooked(linear: nn.Linear, own: int = 0) -> bool:
    """Whether somebody wants to see or change its gradients themselves; ``own`` hooks are ours."""
    return any(
        p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > own for p in linear.parameters(recurse=False)
    )


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def patch(factored: Factored) -> None:
    # A compiled graph cannot hand out factors: it ends before this layer and goes on behind it.
    @torch.compiler.disable
    def factor_forward(self: nn.Linear, input: Tensor) -> Tensor:
        # A shallow copy of the layer's attributes is bound to this, too; torch.func.functional_call puts in other weights.
        own = self is factored.linear and self.weight is factored.weight
        if not own or not torch.is_grad_enabled() or not self.weight.requires_grad or _is_transformed():
            return F.linear(input, self.weight, self.bias)
        factored.inside += 1
        try:
            return _FactorLinear.apply(input, self.weight, self.bias, factored)
        finally:
            factored.inside -= 1

    linear = factored.linear
    linear.forward = types.MethodType(factor_forward, linear)  # type: ignore[method-assign]


def is_patch(value: Any) -> bool:
    return getattr(value, "__name__", "") == "factor_forward"


def unpatch(factored: Factored) -> None:
    del factored.linear.forward
    factored.is_out = True


def _is_transformed() -> bool:
    """Whether torch.func or a tracer looks on, which a function of our own would stop."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


_VIEWS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data)


class Watch(TorchFunctionMode):
    """Sees which parameters a forward pass uses while they are not expected to be used."""

    def __init__(self, unexpected: Any):
        super().__init__()
        self._unexpected = unexpected
        self.seen: Set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Looking at an attribute is no use of the values, unless it is the values in another shape.
        if getattr(func, "__name__", "") != "__get__" or getattr(func, "__self__", None) in _VIEWS:
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, nn.Parameter) and self._unexpected(tensor):
                        self.seen.add(tensor)
        return func(*args, **kwargs)


def plan(model: nn.Module, batch: int, workers: Optional[int] = None, scheme: str = "auto") -> str:
    """A table of how each trainable parameter of ``model`` would be synchronised, and why.

    ``batch`` is the number of rows a Linear layer sees per worker and step: the batch size or, for
    sequences, batch times length.
    """
    model = getattr(model, "module", model) if hasattr(model, "sessions_plan") else model
    workers = workers or (world_size() if is_initialized() else 4)
    rows = [("parameter", "size", "scheme", "why")]
    factored = {id(p): linear for linear in factorable(model) for p in linear.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            rows.append((name, str(parameter.numel()), "-", "frozen"))
        elif id(parameter) in factored:
            m, n = factored[id(parameter)].weight.shape
            choice, why = choose(m, n, batch, workers, scheme)
            if parameter.dim() == 1:
                why = "part of its weight's factors" if choice == "sfb" else "its gradient has no factors"
            rows.append((name, str(parameter.numel()), choice, why))
        else:
            rows.append((name, str(parameter.numel()), "ps", "its gradient has no factors"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    line = "{:<%d}  {:>%d}  {:<%d}  {}" % tuple(widths)
    return "\n".join(line.format(*row) for row in rows)
