"""What is in the place of a gradient that the shards have, with update="server"."""

from typing import Any

import torch
from torch import Tensor, nn

from poseidon.torch._watch import looks_at_values

# How torch's zero_grad(set_to_none=False) forgets a gradient.
_ZEROING = {"zero_", "detach_", "requires_grad_", "_foreach_zero_"}


class Absent(Tensor):
    """A gradient that is not here: whoever looks at its values, or changes them, is told so.

    Were it None, torch's ``clip_grad_norm_`` would clip nothing and say nothing.
    """

    @staticmethod
    def like(parameter: nn.Parameter) -> "Absent":
        """Of the parameter's shape, type and device, and with the memory of one number."""
        with torch.no_grad():
            return parameter.new_zeros(()).expand(parameter.shape).as_subclass(Absent)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ZEROING:
            return args[0]
        if not looks_at_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f'{name or func} of a gradient: with update="server" the shards have the gradients, and step each layer as soon '
            "as its gradients have met. Between backward and step there is nothing here to clip, scale or look at: the "
            "norm of all gradients is known only when the last layer's have met, and every step would have to wait for "
            'it. What needs gradients needs update="worker"'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Absent(the shards have this gradient)"
