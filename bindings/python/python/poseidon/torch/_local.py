"""Steps that a worker takes itself, on its GPU: those of layers by factors with update="server", which no shard has."""

import ctypes
from typing import Any, Dict, List, Sequence

import torch
from torch import Tensor

# What of a group is a setting of a rule. A group may hold anything else: schedulers and programs put things there.
_SETTINGS = ("momentum", "dampening", "nesterov", "weight_decay", "betas", "eps", "maximize")


class LocalRule:
    """A rule's steps of one layer, by torch's optimizer for the settings of ``group``. Every worker takes the same ones."""

    def __init__(self, group: Dict[str, Any], vectors: Sequence[str], values: Tensor):
        # The same memory with a count of changes of its own: the wrapper counts those that are not its rule's.
        self._values, self._vectors = values.data, vectors
        settings = {name: group[name] for name in _SETTINGS if name in group}
        self._optimizer: Any = _optimizer(group)([self._values], **settings)
        # Of the step under way.
        self.rate = 0.0
        # Passed by what still reads the old values.
        self.is_free: Any = None

    def step(self, gradient: Tensor) -> None:
        self._values.grad = gradient
        # In float32, as shards have it, and as workers tell each other in a join: all of them step by the same.
        self._optimizer.param_groups[0]["lr"] = ctypes.c_float(self.rate).value
        self._optimizer.step()
        self._values.grad = None

    def state(self) -> List[Tensor]:
        """The rule's vectors, where they are; zeros before the first step."""
        state = self._optimizer.state[self._values]
        found = [state.get(name) for name in self._vectors]
        return [torch.zeros_like(self._values) if v is None else v.detach() for v in found]

    def restore(self, steps: int, vectors: Sequence[Tensor]) -> None:
        state = self._optimizer.state[self._values]
        for name, vector in zip(self._vectors, vectors):
            state[name] = vector.to(self._values.device)
        if "exp_avg" in self._vectors:
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _optimizer(group: Dict[str, Any]) -> Any:
    """As the rules' texts tell them apart. Adam's settings may have been loaded from AdamW's, and the other way round."""
    if "betas" not in group:
        return torch.optim.SGD
    return torch.optim.AdamW if group["decoupled_weight_decay"] else torch.optim.Adam
