"""Linear layers that may go by factors: what they keep of them until they are sent."""

import weakref
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from poseidon.torch._checksum import Trace, awaited
from poseidon.torch._device import stream_of
from poseidon.torch._layers import is_hooked

if TYPE_CHECKING:
    from poseidon.torch._layers import Member, Unit


class Factored:
    """A Linear layer that may go by factors: what its calls have left for the next synchronisation.

    A backward pass that does not synchronise (``no_sync``) leaves gradients, as everywhere, and copies of the factors they
    were made from. If the gradients are still those when it is time to send, the factors go instead. Otherwise the
    gradients count, which are a remainder then (`Remainders`).
    """

    def __init__(self, owner: Any, linear: nn.Linear, name: str):
        # Not kept alive by its layers: a model that is deleted ends then, not when garbage is collected.
        self.owner = weakref.proxy(owner)
        self.linear = linear
        # As they were when the model was wrapped: pruning and parametrizations put other tensors
        # in their place.
        self.weight: Any = linear.weight
        self.bias: Any = linear.bias
        self.name = name
        self.unit: "Optional[Unit]" = None
        # Of forward passes since the last synchronisation.
        self.rows = 0
        # Calls whose backward is still to come.
        self.calls = 0
        self.inside = 0
        # It takes no part any more; graphs made before may still come by.
        self.is_out = False
        # The bias has a unit of its own, because it is stepped by another rule: its gradient is made as ever.
        self.bias_apart = False
        self.parts: List[Tuple[Tensor, Tensor]] = []
        # Parameters, with their gradients before the first of the kept parts, and what tells if others change what a
        # part has left.
        self.before: List[Tuple[nn.Parameter, Optional[Tensor]]] = []
        self.trace = Trace(linear.weight.device)
        # On a GPU: passed when the last kept part is in the gradients. Then torch may add to them, where `held` says so.
        self.kept: Any = None
        self.held: "Set[Member]" = set()

    @property
    def parameters(self) -> List[nn.Parameter]:
        """Those that have gradients."""
        return [p for p in self._all if p.requires_grad]

    @property
    def _all(self) -> List[nn.Parameter]:
        both: Tuple[Any, Any] = (self.weight, None if self.bias_apart else self.bias)
        return [p for p in both if p is not None]

    def take(self, u: Tensor, v: Tensor, is_last: bool) -> bool:
        """The factors of one call. False if the gradient itself is wanted."""
        if self.is_out:
            return False
        owner = self.owner
        owner._begin_backward()
        if self.is_out or (self.unit is None and owner._session is not None):
            return False
        # Whoever has put a hook on a parameter meanwhile wants to see its gradient, which goes as a remainder then.
        # A pass that makes a graph of itself needs the gradient, too.
        if is_hooked(self.linear, own=1) or torch.is_grad_enabled():
            return False
        if not owner._in_backward:
            self._keep(u, v)
            return True
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
        """Adds to the gradients, as torch would, and keeps the factors.

        Torch does not add: what it still adds in this pass did not come through the layer's forward, and is seen.
        """
        self.look()
        if not self.parts:
            self.trace.begin()
            self.before = [(p, None if p.grad is None else p.grad.detach().clone()) for p in self._all]
        # Copies: the program may write its next batch to the same memory.
        self.parts.append((_factor(u).clone(), _factor(v).clone()))
        for p in self.parameters:
            member = self.owner._members.get(p)
            if member is not None:
                member.is_used = True
            gradient = (u.t() @ v if p is self.weight else u.sum(0)).to(p.dtype)
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.add_(gradient)
        self.trace.leave(self._gradients())
        if self.weight.is_cuda:
            self._hold_torch_back()

    def _hold_torch_back(self) -> None:
        """What torch itself adds in this pass, such as a penalty's gradient, is added after what was done here.

        torch adds on the stream that was the program's when the model was wrapped. It makes that stream wait for those
        that it gets gradients from. From here it gets none, so it does not wait for what this stream does.
        """
        self.kept = stream_of(self.weight.device).record_event()
        for p in self.parameters:
            member = self.owner._members.get(p)
            if member is not None and member not in self.held:
                self.owner._hooks.before_gradient(member.end, self._wait_for_kept)
                self.held.add(member)

    def _wait_for_kept(self, _: Any) -> None:
        """Called on the stream that torch is about to add on."""
        stream_of(self.weight.device).wait_event(self.kept)

    def _gradients(self) -> List[Optional[Tensor]]:
        return [p.grad for p, _ in self.before]

    def look(self) -> None:
        """Forgets the factors if gradients are not what they made, as far as that is known without waiting."""
        if self.parts and self.trace.look(self._gradients()):
            self.parts = []

    def _settle(self, is_changed: bool) -> None:
        if is_changed:
            self.parts = []
        for p, gradient in self.before if self.parts else ():
            # A bias that turned out to be stepped by another rule than the weight goes by itself.
            if p is self.weight or not self.bias_apart:
                p.grad = gradient
        self.before = []

    def done(self) -> None:
        """The weight is not needed any more in this backward pass."""
        unit = self.unit
        if unit is None or not unit.in_flight:
            return
        if not unit.on_gpu:
            self.owner._session.rebuild(unit.index)
        elif unit.local is not None:
            unit.local.is_free = stream_of(unit.device).record_event()

    def reset(self) -> None:
        self.rows = 0
        self.parts = []
        self.before = []


def settle(layers: Sequence[Factored]) -> None:
    """A synchronised backward begins: what was accumulated goes with it, as factors if they tell all of it."""
    for layer in layers:
        layer.look()
    changes = awaited([layer.trace.changes if layer.parts else () for layer in layers])
    for layer, is_changed in zip(layers, changes):
        layer._settle(is_changed)


def take_gradients(layers: Sequence[Factored]) -> None:
    """What is in the gradients becomes factors: with update="server" there is no other way for it to go."""
    there = awaited([[p.grad.any() for p in layer._all if p.grad is not None] for layer in layers])
    for layer, is_there in zip(layers, there):
        if is_there:
            layer.parts.append(as_factors(layer))
        for p in layer._all:
            p.grad = None


def _factor(tensor: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    return tensor.detach().to(dtype or tensor.dtype).contiguous()


def as_factors(layer: Any) -> Tuple[Tensor, Tensor]:
    """Factors that give the gradients a layer has: a row for each row or column of the weight's, and one for the bias.

    The bias' gradient is the sum of all u. So the u of the weight's rows are scaled to almost nothing, and their v the
    other way. The scale is a power of two, which changes no digit.
    """
    m, n = layer.weight.shape
    plain: Any = dict(dtype=torch.float32, device=layer.weight.device)
    weight = torch.zeros(m, n, **plain) if layer.weight.grad is None else _factor(layer.weight.grad, torch.float32)
    given = None if layer.bias is None else layer.bias.grad
    bias = torch.zeros(m, **plain) if given is None else _factor(given, torch.float32)
    eye, none = torch.eye(min(m, n), **plain), torch.zeros(1, n, **plain)
    if layer.weight.dtype == torch.float16:
        # Factors travel in the layer's type, and this one has no room for the scale. So each row goes twice, with
        # opposite signs, and the sum of those u is 0.
        u, v = (eye / 2, weight) if m <= n else (weight.t(), eye / 2)
        return torch.cat([u, -u, bias.view(1, m)]), torch.cat([v, -v, none])
    u, v = (eye * _SMALL, weight / _SMALL) if m <= n else (weight.t() * _SMALL, eye / _SMALL)
    return torch.cat([u, (bias - u.sum(0)).view(1, m)]), torch.cat([v, none])


# Far below the last digit of any gradient of a bias that matters, and far from where float32 ends: gradients from
# 1e-25 to 1e25 keep all their digits.
_SMALL = 2.0**-40
