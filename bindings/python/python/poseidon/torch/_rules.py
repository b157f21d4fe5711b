"""Optimizers whose steps the shards take, in torch's terms."""

import mmap
import weakref
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from poseidon.torch._job import Job, add_up, memory, rank, world_size
from poseidon.torch._local import LocalRule

# Of one parameter: steps taken, the rule's vectors, and its master if it has one.
Kept = Tuple[int, List[Tensor], Optional[Tensor]]
# By parameter: elements, as runs of them.
Held = Dict[nn.Parameter, List[Tuple[int, int]]]
# What a master is called in a state.
_MASTER = "master"


def _zeros(count: int) -> Tensor:
    """Zeros that take memory only where something is written: a worker has few elements of a state."""
    if count == 0:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    # Private: reading takes no memory either.
    pages = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32)


class Rule(torch.optim.Optimizer):
    """An update rule that lives on the shards.

    Each shard keeps the rule's state of its part of the parameters only. The step is taken when the
    gradients meet there, during ``backward``, at the learning rate of that moment; ``step()`` is left for
    the loop to look as it does, and for schedulers of the learning rate, which work as with any optimizer.

    Parameter groups work as torch's. ``add_param_group`` is for the time before the first backward, when the
    shards get their rules.

    ``foreach`` and ``fused`` are taken so that calls of torch's work as they are; without effect. Arguments
    that would change what a step computes, and that the shards do not know, are refused.

    ``state_dict`` and ``load_state_dict`` have torch's format and meaning: what one of them saved, torch's
    optimizer of the same name can load, and the other way round. Every worker calls them.

    The steps of bfloat16 and float16 parameters are taken in float32: the rule keeps ``master`` values, and the model
    has them rounded. They are saved with the state.
    """

    # The state's names in torch, in the order of the shards' vectors.
    _vectors: Tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: Dict[str, Any]):
        # What was loaded and is not on the shards yet: by parameter, steps and vectors.
        self._loaded: Dict[nn.Parameter, Kept] = {}
        # By group: the rule as the shards have it.
        self._settled: List[str] = []
        self._owner: Any = None
        super().__init__(params, defaults)
        # The model keeps its rule, not the other way round.
        self._owner = weakref.proxy(self._find_owner())
        self._owner._set_rule(self)

    def text(self, group: Dict[str, Any]) -> str:
        """The rule of ``group`` as the shards read it."""
        raise NotImplementedError

    def settle(self) -> List[str]:
        """By group: the rule as the shards read it, and will have it from now on."""
        mine = {id(p) for p in self._parameters()}
        missing = [name for name, p in self._owner._trainable.items() if id(p) not in mine]
        if missing:
            raise ValueError(
                "the shards step a whole model: expected all its trainable parameters in the optimizer, "
                f"{', '.join(missing)} missing; freeze them before the model is wrapped, or add a group with lr=0"
            )
        self._settled = [self.text(group) for group in self.param_groups]
        return self._settled

    def check(self) -> None:
        """The shards are told the learning rate of every step, and nothing else."""
        for settled, group in zip(self._settled, self.param_groups):
            if self.text(group) != settled:
                raise RuntimeError(
                    f"the shards step by '{settled}', and now the optimizer is '{self.text(group)}': only the learning "
                    'rate may change while update="server" trains (OneCycleLR and CyclicLR: cycle_momentum=False)'
                )

    def rates(self) -> List[float]:
        """By group."""
        return [float(group["lr"]) for group in self.param_groups]

    def describe(self) -> Dict[str, str]:
        """What has to be the same on all workers."""
        several = len(self.param_groups) > 1
        description = {}
        for index, (group, rate) in enumerate(zip(self.param_groups, self.rates())):
            of_group = f" of group {index}" if several else ""
            description[f"rule{of_group}"] = self.text(group)
            description[f"learning rate{of_group}"] = str(rate)
        kinds = self.kinds()
        for name, p in self._owner._trainable.items():
            index, steps = kinds[p]
            description[f"parameter '{name}'"] = f"in group {index}, stepped {steps} times"
        return description

    def kinds(self) -> Dict[nn.Parameter, Tuple[int, int]]:
        """The group of each parameter, and the steps it has taken: what is stepped as one has both in common."""
        return {
            p: (index, self._loaded[p][0] if p in self._loaded else 0)
            for index, group in enumerate(self.param_groups)
            for p in group["params"]
        }

    def vectors(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return self._vectors

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As torch's, before the first backward."""
        if self._owner is not None and self._owner._session is not None:
            raise RuntimeError(
                "the shards have had their rules since the first backward: add parameter groups before it"
            )
        super().add_param_group(param_group)
        try:
            self._check_settings(self.param_groups[-1])
            if self._owner is not None and self._find_owner()._rule is not self:
                raise ValueError("these are parameters of another model: expected those of one model in one optimizer")
        except ValueError:
            self.param_groups.pop()
            raise

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """The shards have taken the step, or are about to."""
        if closure is not None:
            raise ValueError("a closure is evaluated between steps, but the shards step during backward")
        if not self._owner._stepped:
            self.check()
            if self.rates() != self._owner._rates:
                raise RuntimeError(
                    f"the shards have stepped at the learning rates {self._owner._rates} during backward, "
                    f'and now they are {self.rates()}: with update="server", change learning rates before '
                    "backward or after step()"
                )
        self._owner._note_step()

    def state_dict(self) -> Dict[str, Any]:  # type: ignore[override]
        return self._in_torchs_terms(self._collect())

    def own_state_dict(self) -> Tuple[Dict[str, Any], Optional[Held]]:
        """As ``state_dict``, with what this worker has, and which elements that is. The others are 0.

        Nothing goes over the network. Every worker has all of it if there are no shards yet, and then nothing is told.
        """
        if not self._owner._is_open or self._owner._session is None:
            return self.state_dict(), None
        kept = self._collect(shared=False)
        held: Held = {}
        for unit in self._owner._units:
            first = 0
            # What workers step on their GPUs all of them have, and each tells its share.
            bounds = [unit.len * worker // world_size() for worker in (rank(), rank() + 1)]
            runs = self._owner._session.held(unit.index) if unit.local is None else [(bounds[0], bounds[1])]
            for p in unit.parameters:
                cut = [(max(begin - first, 0), min(end - first, p.numel())) for begin, end in runs]
                held[p] = [(begin, end) for begin, end in cut if begin < end]
                first += p.numel()
        return self._in_torchs_terms(kept), held

    def _in_torchs_terms(self, kept: Dict[nn.Parameter, Kept]) -> Dict[str, Any]:
        state = super().state_dict()
        index = 0
        for group, packed in zip(self.param_groups, state["param_groups"]):
            # SGD's state does not say how many steps were taken, and torch's loads ignore what they do not know.
            packed["steps"] = max([kept[p][0] for p in group["params"] if p in kept], default=0)
            for p in group["params"]:
                steps, vectors, master = kept.get(p, (0, [], None))
                # Frozen and unused ones have none.
                entry: Dict[str, Any] = dict(zip(self.vectors(group), vectors)) if steps else {}
                if entry and self._counts_steps():
                    entry["step"] = torch.tensor(float(steps), dtype=torch.float32, device="cpu")
                if steps and master is not None:
                    entry[_MASTER] = master
                if entry:
                    state["state"][index] = entry
                index += 1
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:  # type: ignore[override]
        self._owner._staleness.check_together("optimizer.load_state_dict()")
        groups, state = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved = [len(group["params"]) for group in groups]
        if sizes != saved:
            raise ValueError(f"expected the state of groups of {sizes} parameters, got groups of {saved}")
        # What older versions of torch did not save is at its default.
        groups = [{**self.defaults, **group} for group in groups]
        for group in groups:
            self._check_settings(group)
        super().load_state_dict({"state": {}, "param_groups": [dict(group) for group in groups]})
        self._loaded = {}
        for group, packed in zip(self.param_groups, groups):
            names = self.vectors(group)
            for p, index in zip(group["params"], packed["params"]):
                entry = state.get(index) or {}
                master = entry.get(_MASTER)
                if (names or master is not None) and all(entry.get(name) is not None for name in names):
                    steps = int(entry["step"]) if "step" in entry else int(packed.get("steps") or 1)
                    self._loaded[p] = steps, [entry[name] for name in names], master
        self._owner._restart()

    def keep(self) -> None:
        """Fetches the shards' state, for those that follow."""
        self._loaded = self._collect()

    def _collect(self, shared: bool = True) -> Dict[nn.Parameter, Kept]:
        """What all shards have, by parameter; unless ``shared``, what this worker's have, and 0 elsewhere."""
        if not self._owner._is_open:
            raise RuntimeError("the shards' state ended with the job, or with the model's failure: collect it before")
        if self._owner._session is None:
            return self._loaded
        self._owner._staleness.check_together("optimizer.state_dict()")
        self._owner.synchronize()
        units, session = self._owner._units, self._owner._session
        names = [self.vectors(self.param_groups[u.group]) if u.members else () for u in units]
        found: Dict[nn.Parameter, Kept] = {}
        gathers = shared and (any(names) or any(unit.has_masters for unit in units))
        gathering = Job.open("optimizer.state_dict()", [(u.name, u.len, None) for u in units], optimizer="sum") if gathers else None
        for unit, of_unit in zip(units, names):
            if not unit.members:
                continue  # it has no parameters
            # By factors, every worker has all masters.
            count = len(of_unit) + int(unit.has_masters and unit.fc is None)
            whole = [_zeros(unit.len) for _ in range(count)]
            steps = session.rule_state(unit.index, list(map(memory, whole)))
            if unit.local is not None:
                whole = [v.to("cpu", torch.float32) if shared else v for v in unit.local.state()]
            elif gathering is not None and world_size() > 1:
                for vector in whole:
                    add_up(gathering, unit.index, vector)
            masters: Dict[nn.Parameter, Tensor] = {}
            if unit.has_masters:
                kept = unit.values if unit.fc is not None else whole.pop()
                # What workers step themselves changes with the next step.
                copies = shared or unit.fc is not None
                masters = {p: part.cpu().clone() if copies else part for p, part in unit.slices(kept)}
            parts: Dict[nn.Parameter, List[Tensor]] = {p: [] for p in unit.parameters}
            for vector in whole:
                for p, part in unit.slices(vector):
                    parts[p].append(part.clone() if shared else part)
            for p in unit.parameters:
                found[p] = steps, parts[p], masters.get(p)
        if gathering is not None:
            gathering.finish()
        return found

    def local(self, unit: Any) -> LocalRule:
        """The rule of a unit that no shard has."""
        group = self.param_groups[unit.group]
        return LocalRule(group, self.vectors(group), unit.values)

    def _restore(self) -> None:
        """Gives the shards what was loaded."""
        for unit in self._owner._units:
            kept = [self._loaded.get(p) for p in unit.parameters]
            if not kept or kept[0] is None:
                continue  # not stepped yet
            flat = [torch.cat([_flat(v) for v in vectors]) for vectors in zip(*(k[1] for k in kept if k is not None))]
            memories = list(map(memory, flat))
            if unit.local is not None:
                unit.local.restore(kept[0][0], flat)
            masters = None
            if unit.has_masters:
                masters = torch.cat([_master(k[2], p) for k, p in zip(kept, unit.parameters) if k is not None])
            if masters is not None and unit.fc is not None:
                unit.values.copy_(masters)
                masters = None
            session = self._owner._session
            session.restore_rule(unit.index, kept[0][0], memories, None if masters is None else memory(masters))
        self._loaded = {}

    def _check_settings(self, group: Dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay", "eps"):
            if not group.get(name, 0.0) >= 0.0:
                raise ValueError(f"{name}={group[name]}: expected 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in group.get("betas", ())):
            raise ValueError(f"betas={group['betas']}: expected 0 or more, and less than 1")
        if group.get("nesterov") and (group["momentum"] == 0.0 or group["dampening"] != 0.0):
            raise ValueError("nesterov needs a momentum, and no dampening")
        for name, why in _REFUSED.items():
            if group.get(name):
                raise ValueError(
                    f'{name}={group[name]!r}: {why}. Expected {name}=False, or update="worker" and torch.optim'
                )

    def _parameters(self) -> List[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

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
            if mine - theirs:
                raise ValueError("the shards step one model: expected its trainable parameters, got others as well")
            return model
        raise ValueError("these are no parameters of a poseidon.torch.DistributedDataParallel: wrap the model first")


# Arguments of torch's that change what a step computes or is, and why the shards cannot follow.
_REFUSED = {
    "amsgrad": "the shards do not keep the largest mean square",
    "capturable": "the shards' steps are no part of a graph on a GPU",
    "differentiable": "no gradient goes through a step on the shards",
}


def _flat(vector: Tensor) -> Tensor:
    return vector.detach().to("cpu", torch.float32).reshape(-1)


def _master(master: Optional[Tensor], parameter: nn.Parameter) -> Tensor:
    """What the rule goes on from: what was saved, where the model still has it rounded, and elsewhere what the model has."""
    shown = _flat(parameter)
    if master is None:
        return shown
    saved = _flat(master)
    return torch.where(saved.to(parameter.dtype).to(torch.float32) == shown, saved, shown)


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
        maximize: bool = False,
        foreach: Optional[bool] = None,
        differentiable: bool = False,
        fused: Optional[bool] = None,
    ):
        super().__init__(params, _settings(locals()))

    def vectors(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def text(self, group: Dict[str, Any]) -> str:
        numbers = [f"{name.replace('_', '-')}={float(group[name])!r}" for name in ("momentum", "dampening", "weight_decay")]
        return "sgd:" + ",".join(numbers + [name for name in ("nesterov", "maximize") if group[name]])


class Adam(Rule):
    """``torch.optim.Adam``, on the shards."""

    _vectors = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: Optional[bool] = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
        decoupled_weight_decay: bool = False,
    ):
        super().__init__(params, _settings(locals()))

    def text(self, group: Dict[str, Any]) -> str:
        name = "adamw" if group["decoupled_weight_decay"] else "adam"
        (beta1, beta2), eps, decay = map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"])
        numbers = f"beta1={beta1!r},beta2={beta2!r},eps={eps!r},weight-decay={decay!r}"
        return f"{name}:{numbers}" + (",maximize" if group["maximize"] else "")


class AdamW(Adam):
    """``torch.optim.AdamW``, on the shards."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: Optional[bool] = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: Optional[bool] = None,
    ):
        super().__init__(**_settings(locals(), "params"), decoupled_weight_decay=True)


def _settings(arguments: Dict[str, Any], *also: str) -> Dict[str, Any]:
    """The arguments of a constructor that torch's optimizers keep in their groups, and those of ``also``."""
    apart = {"self", "params", "__class__"} - set(also)
    return {name: value for name, value in arguments.items() if name not in apart}
