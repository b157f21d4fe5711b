"""Which parameters a forward pass uses."""

from typing import Any, Set

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Attributes that are the values in another shape.
_VIEWS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data)
# Of these, the answer does not depend on the values.
_QUESTIONS = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"}


def is_attribute(func: Any) -> bool:
    """Whether ``func`` gets or sets an attribute that is not the values in another shape."""
    return getattr(func, "__name__", "") in ("__get__", "__set__") and getattr(func, "__self__", None) not in _VIEWS


def looks_at_values(func: Any) -> bool:
    """Whether ``func`` may look at the values of its arguments, or change them."""
    return getattr(func, "__name__", "") not in _QUESTIONS and not is_attribute(func)


class Watch(TorchFunctionMode):
    """Sees which parameters a forward pass uses while they are not expected to be used."""

    def __init__(self, unexpected: Any):
        super().__init__()
        self._unexpected = unexpected
        self.seen: Set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Looking at an attribute is no use of the values, unless it is the values in another shape.
        if not is_attribute(func):
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, nn.Parameter) and self._unexpected(tensor):
                        self.seen.add(tensor)
        return func(*args, **kwargs)
