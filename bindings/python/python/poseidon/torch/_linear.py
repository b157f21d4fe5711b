"""Linear layers that hand out their factors."""

import types
from typing import TYPE_CHECKING, Any, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from poseidon.torch._factors import Factored


def patch(factored: "Factored") -> None:
    # A compiled graph cannot hand out factors: it ends before this layer and goes on behind it.
    @torch.compiler.disable
    def factor_forward(self: nn.Linear, input: Tensor) -> Tensor:
        # A shallow copy of the layer's attributes is bound to this, too; torch.func.functional_call puts in other weights.
        own = self is factored.linear and self.weight is factored.weight and self.bias is factored.bias
        if not own or not _is_plain(input) or not torch.is_grad_enabled() or not self.weight.requires_grad or _is_transformed():
            return F.linear(input, self.weight, self.bias)
        # In rows: what a function of our own returns may be changed in-place, unless it is a view.
        is_matrix = input.dim() <= 2
        factored.inside += 1
        try:
            result = _FactorLinear.apply(input if is_matrix else input.flatten(0, -2), self.weight, self.bias, factored)
        finally:
            factored.inside -= 1
        return result if is_matrix else result.unflatten(0, input.shape[:-1])

    linear = factored.linear
    linear.forward = types.MethodType(factor_forward, linear)  # type: ignore[method-assign]


def is_patch(value: Any) -> bool:
    return getattr(value, "__name__", "") == "factor_forward"


def unpatch(factored: "Factored") -> None:
    del factored.linear.forward
    factored.is_out = True


def _is_plain(input: Any) -> bool:
    """Whether it has rows: neither a nested nor a sparse tensor, nor anything else that torch may take or refuse."""
    return isinstance(input, Tensor) and not input.is_nested and input.layout == torch.strided


def _is_transformed() -> bool:
    """Whether torch.func or a tracer looks on, which a function of our own would stop."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()


class _Call:
    """One call of a layer, for as long as its backward may come."""

    def __init__(self, factored: "Factored"):
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
    def forward(ctx: Any, source: Tensor, weight: Tensor, bias: Optional[Tensor], factored: "Factored") -> Tensor:  # type: ignore[override]
        low, low_weight = _autocast(source), _autocast(weight)
        # First of all: whatever torch refuses, it refuses in its own words.
        result = F.linear(low, low_weight, None if bias is None else _autocast(bias))
        ctx.save_for_backward(low, weight)
        ctx.factored, ctx.input_dtype, ctx.has_bias = factored, source.dtype, bias is not None
        ctx.call = _Call(factored)
        factored.rows += low.numel() // max(low.shape[-1], 1)
        return result

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
        if ctx.has_bias and ctx.needs_input_grad[2] and (not taken or ctx.factored.bias_apart):
            bias = u.sum(0).to(weight.dtype)
        return below, down, bias, None


def _autocast(tensor: Tensor) -> Tensor:
    """As torch.autocast, where it is on, would pass ``tensor`` to a linear function."""
    kind = tensor.device.type
    # Not by autocast itself: inside a function of our own it would remember casts that have no gradient.
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _is_wanted(ctx: Any) -> bool:
    """Whether this pass goes on to the weight: that for torch.autograd.grad(loss, input) does not."""
    weight = ctx.next_functions[1][0]
    try:
        return weight is not None and torch._C._will_engine_execute_node(weight)
    except RuntimeError:
        return False  # torch.autograd.grad(loss, weight): it gets the gradient itself
