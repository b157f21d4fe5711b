"""Optimizers whose steps the shards take, in torch's terms."""

import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from poseidon.torch._job import Job, add_up, world_size


class Rule(torch.optim.Optimizer):
    """An update rule that lives on the shards.

    Each shard keeps the rule's state of its part of the parameters only. The step is taken when the
    gradients meet there, during ``backward``, at the learning rate of that moment; ``step()`` is left for
    the loop to look as it does, and for schedulers of the learning rate, which work as with any optimizer.

    ``foreach`` and ``fused`` are taken so that calls of torch's work as they are; without effect.

    ``state_dict`` and ``load_state_dict`` have torch's format and meaning: what one of them saved, torch's
    optimizer of the same name can load, and the other way round. Every worker calls them.
    """

    # The state's names in torch, in the order of the shards' vectors.
    _vectors: Tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: Dict[str, Any]):
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(
                f"{type(self).__name__} on the shards has one rule for all parameters: expected one group, "
                f'got {len(self.param_groups)}; use update="worker" and torch.optim for more'
            )
        self._check_settings()
        # Steps, and by vector and parameter, what was loaded and is not on the shards yet.
        self._loaded: Optional[Tuple[int, List[List[Optional[Tensor]]]]] = None
        # The rule as the shards have it.
        self._settled = ""
        # The model keeps its rule, not the other way round.
        self._owner = weakref.proxy(self._find_owner())
        self._owner._set_rule(self)

    def text(self) -> str:
        """The rule as the shards read it."""
        raise NotImplementedError

    def settle(self) -> str:
        """The rule as the shards read it, and will have it from now on."""
        self._settled = self.text()
        return self._settled

    def check(self) -> None:
        """The shards are told the learning rate of every step, and nothing else."""
        if self.text() != self._settled:
            raise RuntimeError(
                f"the shards step by '{self._settled}', and now the optimizer is '{self.text()}': only the learning rate may "
                'change while update="server" trains (OneCycleLR and CyclicLR: cycle_momentum=False)'
            )

    def rate(self) -> float:
        return float(self.param_groups[0]["lr"])

    def vectors(self) -> Tuple[str, ...]:
        return self._vectors

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """The shards have taken the step, or are about to."""
        if closure is not None:
            raise ValueError("a closure is evaluated between steps, but the shards step during backward")
        self._owner._note_step()

    def state_dict(self) -> Dict[str, Any]:  # type: ignore[override]
        state = super().state_dict()
        steps, vectors = self._collect()
        for index in range(len(self._parameters())) if steps and vectors else ():
            if vectors[0][index] is None:
                continue  # frozen
            entry: Dict[str, Any] = {name: vectors[k][index] for k, name in enumerate(self.vectors())}
            if self._counts_steps():
                entry["step"] = torch.tensor(float(steps))
            state["state"][index] = entry
        # SGD's state does not say how many steps were taken, and torch's loads ignore what they do not know.
        state["param_groups"][0]["steps"] = steps
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:  # type: ignore[override]
        (group,) = state_dict["param_groups"]
        state, count = state_dict["state"], len(self._parameters())
        if len(group["params"]) != count:
            raise ValueError(f"expected the state of {count} parameters, got {len(group['params'])}")
        super().load_state_dict({"state": {}, "param_groups": [dict(group)]})
        self._loaded = None
        if state and self.vectors():
            entries = [state.get(index) for index in group["params"]]
            counted = [int(entry["step"]) for entry in entries if entry and "step" in entry]
            steps = max(counted) if counted else int(group.get("steps") or 1)
            self._loaded = steps, [[entry[name] if entry else None for entry in entries] for name in self.vectors()]
        self._owner._restart()

    def keep(self) -> None:
        """Fetches the shards' state, for those that follow."""
        self._loaded = self._collect()

    def _collect(self) -> Tuple[int, List[List[Optional[Tensor]]]]:
        """Steps taken and, by vector, each parameter's part of it, from all shards."""
        if not self._owner._is_open:
            raise RuntimeError("the shards' state ended with the job, or with the model's failure: collect it before")
        if self._owner._session is None:
            return self._loaded or (0, [])
        self._owner.synchronize()
        units, session = self._owner._units, self._owner._session
        names = self.vectors()
        parts: Dict[nn.Parameter, List[Tensor]] = {}
        steps = 0
        gathering = Job.open([(u.name, u.len, None) for u in units], optimizer="sum") if names else None
        for unit in units:
            whole = [torch.zeros(unit.len) for _ in names]
            steps = session.rule_state(unit.index, [(v.data_ptr(), v.numel(), v) for v in whole])
            if gathering is not None and world_size() > 1:
                for vector in whole:
                    add_up(gathering, unit.index, vector)
            start = 0
            for p in unit.parameters:
                end = start + p.numel()
                parts[p] = [v[start:end].view(p.shape).clone() for v in whole]
                start = end
        if gathering is not None:
            gathering.finish()
        # Frozen ones have none.
        return steps, [[parts[p][k] if p in parts else None for p in self._parameters()] for k in range(len(names))]

    def _restore(self) -> None:
        """Gives the shards what was loaded."""
        if self._loaded is None:
            return
        steps, vectors = self._loaded
        position = {p: i for i, p in enumerate(self._parameters())}
        for unit in self._owner._units:
            flat = [
                torch.cat([_flat(v[position[p]], p) for p in unit.parameters])
                for v in vectors
            ]
            memories = [(v.data_ptr(), v.numel(), v) for v in flat]
            self._owner._session.restore_rule(unit.index, steps, memories)
        self._loaded = None

    def _check_settings(self) -> None:
        group = self.param_groups[0]
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not group.get(name, 0.0) >= 0.0:
                raise ValueError(f"{name}={group[name]}: expected 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in group.get("betas", ())):
            raise ValueError(f"betas={group['betas']}: expected 0 or more, and less than 1")
        if group.get("nesterov") and (group["momentum"] == 0.0 or group["dampening"] != 0.0):
            raise ValueError("nesterov needs a momentum, and no dampening")

    def _parameters(self) -> List[nn.Parameter]:
        return self.param_groups[0]["params"]

    def _counts_steps(self) -> bool:
        return "exp_avg" in self._vectors

    def _find_owner(self) -> Any:
        from poseidon.torch._parallel import MODELS

        mine = {id(p) for p in self._parameters() if p.requires_grad}
        for model in MODELS:
            theirs = {id(p) for p in model._trainable.values()}
            if not mine & theirs:
                continue
            if model._update != "server":
                raise ValueError(
                    f'{type(self).__name__} steps on the shards, which needs update="server": '
                    'DistributedDataParallel(model, update="server")'
                )
            if mine != theirs:
                missing = [name for name, p in model._trainable.items() if id(p) not in mine]
                raise ValueError(
                    "the shards step a whole model: expected all its trainable parameters, "
                    + (f"{', '.join(missing)} missing" if missing else "got others as well")
                )
            return model
        raise ValueError("these are no parameters of a poseidon.torch.DistributedDataParallel: wrap the model first")


def _flat(vector: Optional[Tensor], parameter: nn.Parameter) -> Tensor:
    if vector is None:
        return torch.zeros(parameter.numel())
    return vector.detach().to("cpu", torch.float32).reshape(-1)


class SGD(Rule):
    """``torch.optim.SGD``, on the shards."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
    ):
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults)

    def vectors(self) -> Tuple[str, ...]:
        return ("momentum_buffer",) if self.param_groups[0]["momentum"] else ()

    def text(self) -> str:
        g = self.param_groups[0]
        words = [f"{name.replace('_', '-')}={g[name]!r}" for name in ("momentum", "dampening", "weight_decay")]
        return "sgd:" + ",".join(words + (["nesterov"] if g["nesterov"] else []))


class Adam(Rule):
    """``torch.optim.Adam``, on the shards."""

    _name = "adam"
    _vectors = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def text(self) -> str:
        g = self.param_groups[0]
        (beta1, beta2), eps, decay = g["betas"], g["eps"], g["weight_decay"]
        return f"{self._name}:beta1={beta1!r},beta2={beta2!r},eps={eps!r},weight-decay={decay!r}"


class AdamW(Adam):
    """``torch.optim.AdamW``, on the shards."""

    _name = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)
