"""What a wrapper has on the modules and parameters of its model while it synchronises them."""

import functools
import weakref
from typing import Any, Callable, Dict, List, Set

import torch
from torch import nn

from poseidon.torch._linear import is_patch


class Hooks:
    """None of it keeps the wrapper alive, all of it comes off, and a module that is copied or pickled has none of it.

    ``settle`` is called with a module before it is copied.
    """

    def __init__(self, settle: Callable[[nn.Module], None]):
        self._settle = weakly(settle)
        self._handles: List[Any] = []
        self._ids: Set[int] = set()
        self._hidden_on: List[nn.Module] = []

    def on_gradient(self, parameter: nn.Parameter, method: Callable[..., None], *first: Any) -> None:
        self._keep(parameter.register_post_accumulate_grad_hook(weakly(method, *first)))

    def are_over(self, parameter: nn.Parameter) -> bool:
        """Whether no hook comes after ours when a gradient of ``parameter`` is accumulated."""
        hooks: Dict[int, Any] = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        return len(hooks) <= 1 or next(reversed(hooks)) in self._ids

    def before_gradient(self, end: Any, method: Callable[..., None]) -> None:
        """``end`` is the node of torch's graph that is about to add to a parameter's gradient, if there is one to add."""
        self._keep(end.register_prehook(weakly(method)))

    def before_forward(self, module: nn.Module, method: Callable[..., None], *first: Any) -> None:
        self._keep(module.register_forward_pre_hook(torch.compiler.disable(weakly(method, *first))))
        self.hide_on(module)

    def before_state_dict(self, module: nn.Module, method: Callable[..., None]) -> None:
        self._keep(module.register_state_dict_pre_hook(weakly(method)))
        self.hide_on(module)

    def hide_on(self, module: nn.Module) -> None:
        """Copies of ``module`` are plain modules: deepcopy and pickle look for this method on the object, too."""
        module.__getstate__ = functools.partial(self._plain_state, module)  # type: ignore[assignment]
        self._hidden_on.append(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._hidden_on:
            module.__dict__.pop("__getstate__", None)

    def _keep(self, handle: Any) -> None:
        self._handles.append(handle)
        self._ids.add(handle.id)

    def _plain_state(self, module: nn.Module) -> Any:
        self._settle(module)
        own = getattr(type(module), "__getstate__", None)  # every class has one since Python 3.11
        state = module.__dict__ if own is None else own(module)
        if not isinstance(state, dict):
            return state
        plain: Dict[str, Any] = {k: v for k, v in state.items() if k != "__getstate__" and not is_patch(v)}
        for name in ("_forward_pre_hooks", "_state_dict_pre_hooks"):
            hooks = plain.get(name, {})
            plain[name] = type(hooks)((k, hook) for k, hook in hooks.items() if k not in self._ids)
        return plain


def weakly(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """``method`` with its ``first`` arguments, for as long as its object lives."""
    # Not a WeakMethod, which is Python and makes a method of it each time.
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            function(alive, *first, *arguments)

    return call
