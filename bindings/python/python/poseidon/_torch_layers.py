"""What of a model is synchronised as one, and Linear layers that hand out their factors."""

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Gradients of at least this many bytes go out from their own memory; smaller ones share a buffer,
# because a frame costs a few microseconds however short it is.
_OWN_MEMORY = 64 << 10
_BUCKET = 256 << 10


def memory(tensor: Tensor) -> Tuple[int, int, object]:
    return tensor.data_ptr(), tensor.numel(), tensor


class Unit:
    """What is synchronised as one: a layer of the session."""

    def __init__(self, name: str, parameters: List[nn.Parameter], fc: Optional[Tuple[int, int]] = None):
        self.name = name
        self.parameters = parameters
        self.fc = fc
        self.index = -1
        self.len = sum(p.numel() for p in parameters)
        # Gradients of one large float32 parameter go out from where they are.
        self.in_place = (
            fc is None
            and len(parameters) == 1
            and parameters[0].dtype == torch.float32
            and parameters[0].device.type == "cpu"
        )
        self.stage: Optional[Tensor] = None
        # Whether this step's result comes to the stage.
        self.is_staged = True
        self.missing = 0
        self.ready: set = set()
        self.in_flight = False

    def begin(self) -> None:
        self.ready = set()
        self.missing = len(self.parameters)

    def staged(self) -> Tensor:
        if self.stage is None:
            self.stage = torch.zeros(self.len, dtype=torch.float32)
        return self.stage

    def slices(self) -> Iterator[Tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self.parameters:
            part = self.staged()[start : start + parameter.numel()]
            yield parameter, part.view(parameter.shape)
            start += parameter.numel()


class Factored:
    """A Linear layer that may go by factors: what its calls have left for the next synchronisation."""

    def __init__(self, owner: Any, linear: nn.Linear, name: str):
        self.owner = owner
        self.linear = linear
        self.name = name
        self.unit: Optional[Unit] = None
        self.rows = 0
        self.calls = 0
        self.parts: List[Tuple[Tensor, Tensor]] = []

    def note_call(self, rows: int) -> None:
        self.rows += rows
        self.calls += 1

    def take(self, u: Tensor, v: Tensor) -> bool:
        """The factors of one call. False if the plan wants the gradient itself."""
        owner = self.owner
        owner._begin_backward()
        self.calls -= 1
        if self.unit is None and owner._session is not None:
            return False
        # Before the first synchronised backward nobody knows yet; see `fold`.
        self.parts.append((u.detach().float().contiguous(), v.detach().float().contiguous()))
        if self.calls == 0 and owner._synchronises:
            owner._send_factors(self)
        return True

    def fold(self) -> None:
        """Turns factors kept during ``no_sync`` into gradients: the plan has decided against them."""
        linear = self.linear
        for u, v in self.parts:
            accumulate(linear.weight, u.t() @ v)
            if linear.bias is not None and linear.bias.requires_grad:
                accumulate(linear.bias, u.sum(0))
        self.parts = []

    def reset(self) -> None:
        self.rows = self.calls = 0
        self.parts = []


class _FactorLinear(torch.autograd.Function):
    """Linear that hands out its factors instead of computing the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor, bias: Optional[Tensor], factored: Factored) -> Tensor:  # type: ignore[override]
        kind = source.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else source.dtype
        low = source.to(dtype)
        ctx.save_for_backward(low, weight)
        ctx.factored, ctx.input_dtype, ctx.has_bias = factored, source.dtype, bias is not None
        factored.note_call(low.numel() // max(low.shape[-1], 1))
        return F.linear(low, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:  # type: ignore[override]
        source, weight = ctx.saved_tensors
        u = gradient.reshape(-1, gradient.shape[-1])
        v = source.reshape(-1, source.shape[-1])
        # Factors leave first, so that they travel while the rest is computed.
        taken = ctx.factored.take(u, v)
        below = down = bias = None
        if ctx.needs_input_grad[0]:
            below = (gradient @ weight.to(gradient.dtype)).to(ctx.input_dtype)
        if not taken:
            if ctx.needs_input_grad[1]:
                down = (u.t() @ v).to(weight.dtype)
            if ctx.has_bias and ctx.needs_input_grad[2]:
                bias = u.sum(0).to(weight.dtype)
        return below, down, bias, None


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def units_of(trainable: Dict[str, nn.Parameter], factors: Dict[nn.Parameter, Factored]) -> List[Unit]:
    """Units in forward order: factored layers and large parameters alone, small ones together."""
    units: List[Unit] = []
    bucket: List[Tuple[str, nn.Parameter]] = []
    seen = set()

    def close() -> None:
        if bucket:
            name = bucket[0][0] if len(bucket) == 1 else f"{bucket[0][0]} to {bucket[-1][0]}"
            units.append(Unit(name, [p for _, p in bucket]))
            bucket.clear()

    for name, parameter in trainable.items():
        factored = factors.get(parameter)
        if factored is not None:
            if factored.name not in seen and factored.unit is not None:
                seen.add(factored.name)
                units.append(factored.unit)
            continue
        if parameter.numel() * 4 >= _OWN_MEMORY:
            units.append(Unit(name, [parameter]))
            continue
        bucket.append((name, parameter))
        if sum(p.numel() * 4 for _, p in bucket) >= _BUCKET:
            close()
    close()
    return units


def factorable(module: nn.Module) -> List[nn.Linear]:
    """Linear layers whose weight's gradient is only made by their own forward."""
    owners: Dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    # Exactly Linear: subclasses have reasons of their own, and attention uses its projection's
    # weight without calling it.
    return [
        m
        for m in module.modules()
        if type(m) is nn.Linear and m.weight.requires_grad and owners[id(m.weight)] == 1
        and (m.bias is None or owners[id(m.bias)] == 1)
        and getattr(m.__dict__.get("forward"), "__name__", "factor_forward") == "factor_forward"
    ]


def patch(factored: Factored) -> None:
    linear = factored.linear

    # Handing out factors is a side effect that no traced graph can have.
    @torch.compiler.disable
    def factor_forward(source: Tensor) -> Tensor:
        if torch.is_grad_enabled() and linear.weight.requires_grad:
            return _FactorLinear.apply(source, linear.weight, linear.bias, factored)
        return F.linear(source, linear.weight, linear.bias)

    linear.forward = factor_forward  # type: ignore[method-assign]
