"""Which parameters a forward pass uses."""

from typing import Any, Set

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Attributes that are the values in another shape.
VIEWS = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.data)


class Watch(TorchFunctionMode):
    """Sees which parameters a forward pass uses while they are not expected to be used."""

    def __init__(self, unexpected: Any):
        super().__init__()
        self._unexpected = unexpected
        self.seen: Set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Looking at an attribute is no use of the values, unless it is the values in another shape.
        if getattr(func, "__name__", "") != "__get__" or getattr(func, "__self__", None) in VIEWS:
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(tensor, nn.Parameter) and self._unexpected(tensor):
                        self.seen.add(tensor)
        return func(*args, **kwargs)
