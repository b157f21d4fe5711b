"""Parameters that are on their way from the shards (update="server"): who looks at one waits."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.torch._watch import looks_at_values


class Awaited(nn.Parameter):
    """A parameter from the backward whose gradient the shards have, until a forward uses it.

    A parameter becomes one by its ``__class__``: it stays the same object.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not looks_at_values(func):
                return func(*args, **kwargs)
            for value in (*args, *kwargs.values()):
                for parameter in value if isinstance(value, (list, tuple)) else (value,):
                    if type(parameter) is Awaited:
                        _await(parameter)
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                # Unlike `data` it shares torch's count of changes, so that writes are noticed.
                return args[0].detach()
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _await(self)
        give_back(self)
        return copy.deepcopy(self, memo)


def make_awaited(parameter: nn.Parameter) -> None:
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Awaited


def give_back(parameter: nn.Parameter) -> None:
    if type(parameter) is Awaited:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def _await(parameter: nn.Parameter) -> None:
    from poseidon.torch._parallel import MODELS

    for model in MODELS:
        member = model._members.get(parameter)
        if member is None or member.unit is None or not member.unit.in_flight:
            continue
        if not model._stepped:
            raise RuntimeError(
                f"parameter '{member.name}' was looked at between backward and step: with update=\"server\" the shards step "
                "during backward, and the old values may be gone. Look at parameters before backward or after step()"
            )
        model._await(member.unit)
