"""The wrapper around a model."""

import contextlib
import json
import weakref
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon.torch._agreement import check_same
from poseidon.torch._awaited import give_back
from poseidon.torch._backward import or_abort
from poseidon.torch._buffers import Buffers
from poseidon.torch._ddp import DdpInterface, chosen_buffers, chosen_group, refuse
from poseidon.torch._doubles import Doubles, DoubleUnit
from poseidon.torch._factors import Factored
from poseidon.torch._forward import Forward
from poseidon.torch._hooks import Hooks
from poseidon.torch._job import Job, broadcast, rank, world_size
from poseidon.torch._join import Join
from poseidon.torch._layers import (
    WHY_MEAN,
    Member,
    Unit,
    choose,
    factorable,
    is_hooked,
    units_of,
)
from poseidon.torch._linear import patch, unpatch
from poseidon.torch._parts import Part
from poseidon.torch._remainder import Remainders
from poseidon.torch._replicas import Replicas, are_comparable, tell
from poseidon.torch._staleness import Staleness

MODELS: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


class DistributedDataParallel(Forward, DdpInterface):
    """Wraps ``module`` so that ``backward`` leaves the mean of all workers' gradients in ``grad``.

    As torch's: parameters and buffers begin as rank 0's, ``state_dict`` has the same keys (those of
    the module behind ``module.``), ``no_sync`` accumulates locally, ``join`` is for uneven inputs.

    * ``forward_sync_buffers``, or ``broadcast_buffers`` as it was called before: before each forward of a synchronised
      step, and the first one after it, buffers become rank 0's.
    * ``find_unused_parameters``, ``static_graph``: parameters may take no part in a step.
    * ``update``: ``worker`` (any torch optimizer) or ``server``: the shards take the steps, by the rule
      of a ``psd.SGD``, ``psd.Adam`` or ``psd.AdamW`` made from this model's parameters. Parameters then come back
      while the next forward is under way; ``synchronize()`` waits for all of them.
    * ``sync``: with ``update="server"``, how many steps workers may be apart: ``bsp`` (none), ``ssp:S`` or ``asp``.
      ``step_together()`` makes them equal.
    * ``scheme``: ``auto`` (the fewest bytes for each layer; one that would save only a few goes with its neighbours),
      ``ps`` or ``sfb``.
    * ``batch``: how many rows (samples, or samples times sequence length) a Linear layer sees between
      two synchronisations; worth saying if most steps are larger than the first, by which the plan is made.
    * ``deterministic``: gradients are added in rank order, so that a run repeats bit by bit. The
      default is what ``torch.use_deterministic_algorithms`` was told.
    * ``init_sync=False``: parameters and buffers begin as each worker has them.
    * ``process_group`` or ``device_mesh`` may be one of all workers; ``mixed_precision``,
      ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` are refused.
    * All other arguments are taken so that calls of torch's work as they are; without effect.

    ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` holds, for libraries that ask.

    During ``no_sync``, Linear layers that go by factors make gradients as ever, and keep copies of their factors beside
    them, which are sent instead if nobody changes the gradients. Whatever else is in ``grad`` is averaged as it is.
    As with torch's, a backward is synchronised if it is the first after a forward outside
    ``no_sync``. Others, such as ``model.module(x).backward()``, leave their gradients to the next
    one that is.

    How layers go is decided at the first synchronised backward, when it is known how many rows each
    Linear layer sees. ``sessions_plan()`` then tells.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: Optional[bool] = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: Optional[float] = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: Optional[bool] = None,
        lazy_bucket_allocation: bool = False,
        *,
        update: str = "worker",
        sync: str = "bsp",
        scheme: str = "auto",
        batch: Optional[int] = None,
        deterministic: Optional[bool] = None,
    ):
        super().__init__()
        if update not in ("worker", "server"):
            raise ValueError(f"update={update!r}: expected 'worker' or 'server'")
        delayed = delay_all_reduce_named_params if param_to_hook_all_reduce is None else param_to_hook_all_reduce
        refuse(module, mixed_precision, delayed)
        group = chosen_group(process_group, device_mesh)
        self.module = module
        self._keep_arguments(device_ids, output_device, dim, bucket_cap_mb)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = chosen_buffers(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        # Parameters, and buffers. The older argument keeps these apart from the beginning.
        self._begins_equal = (init_sync, init_sync and (forward_sync_buffers is not None or self.broadcast_buffers))
        self._update = update
        self._sync = sync
        self._scheme = scheme
        self._batch = batch
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        self._deterministic = deterministic
        self._begin()
        self._refuse_staleness()
        self._process_group = group
        self._take_part()

    def _begin(self) -> None:
        """What no copy has in common with its model."""
        kept = set(self.__dict__)
        self._find_parameters()
        self._rule: Any = None
        # By group of the rule: the learning rates that the session has.
        self._rates: List[float] = []
        self._session: Optional[_native.Session] = None
        # Of the session, unless workers' parameters may differ.
        self._replicas: Optional[Replicas] = None
        self._process_group: Any = None
        self._shared = Buffers(self.module, self.parameters_to_ignore)
        self._doubles = Doubles()
        self._units: List[Unit] = []
        self._usage_unit: Optional[Unit] = None
        self._remainders: Optional[Remainders] = None
        self._synchronises = True
        self._in_backward = False
        # The backward pass at whose end `_end_pass` will be called, as torch numbers them.
        self._ending: Optional[int] = None
        # Set by a synchronised forward, until a synchronised backward begins.
        self._expects_gradients = False
        # Synchronised forwards whose backward has not been.
        self._forwards = 0
        self._stepped = True
        self._staleness = Staleness(self._sync)
        # With update="server": parameters whose gradients the shards have, until the step.
        self._absent: List[Member] = []
        self._join: Optional[Join] = None
        # Parameters that are used outside their module's forward, seen in the first one.
        self._used_early: Set[nn.Parameter] = set()
        self._entered: Set[nn.Parameter] = set()
        self._watched = False
        self._factored: List[Factored] = []
        # Layers that will not go by factors, patched until no graph under way needs them to be.
        self._leaving: List[Factored] = []
        # Where a pass that makes gradients of parameters ends.
        self._ends: List[Any] = []
        self._hooks = Hooks(self._settle)
        self._part: Optional[Part] = None
        # As long as its hooks are on its module.
        self._is_open = False
        self._is_alone = False
        self._number = self._sessions_started = 0
        self._own = {*self.__dict__, "_own"} - kept

    def __getstate__(self) -> Dict[str, Any]:
        """A copy has the module and the settings, and takes part in the job from its first forward in training on."""
        self.synchronize()
        return {name: value for name, value in self.__dict__.items() if name not in self._own}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()
        MODELS.add(self)

    def __del__(self) -> None:
        # Not if the constructor has refused its arguments, nor in a process forked from the one that made it.
        if "_part" in self.__dict__ and Job.is_here():
            self._let_go()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self._begin_evaluation()
            return self.module(*args, **kwargs)
        self._begin_forward()
        if self._is_alone:
            return self.module(*args, **kwargs)
        self._note_pass(is_backward=False)
        if self._watched:
            result = self.module(*args, **kwargs)
        else:
            result = self._watched_forward(*args, **kwargs)
        self._note_pass_end()
        self._end_forward(result)
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside add up here. The next synchronised backward sends them."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """For workers whose numbers of batches differ: those that are through go along with the others.

        As torch's: they contribute nothing while the others train on, and end with the same model.
        ``divide_by_initial_world_size=False`` takes means over the workers that still train.
        """
        if enable and self._part is None:
            self._take_part()
        if not enable or self._is_alone:
            yield
            return
        if self._update == "server" and not divide_by_initial_world_size:
            raise ValueError('with update="server" the shards divide by the number of all workers')
        self._staleness.refuse("in join() all workers ask each other before every step", "as many batches on every worker")
        # Within it, buffers are shared at each step: nothing may be left from before.
        self._share_buffers(False)
        self._join = Join(self, divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
            self._join.go_along()
            self._join.close()
        except BaseException as error:
            # The others must not wait for a worker that has given up.
            self._join.close(because=f"worker {rank()}: {error!r}")
            raise
        finally:
            self._join = None

    def close(self) -> None:
        """Ends synchronisation; the module is as if it had never been wrapped. Every worker calls it.

        A model that is deleted, or whose module is wrapped again, does as much, but for its connections, threads and
        memory: they are given back when every worker's is gone and another model is wrapped.
        """
        if self._is_open and self._part is not None:
            self._part.close()()

    def synchronize(self) -> None:
        """Waits for everything that is in flight: gradients are means, parameters are the new ones."""
        # Those that were sent first come first.
        for unit in reversed(self._units):
            self._await(unit)

    def step_together(self) -> None:
        """The next synchronised step is taken together. Every worker calls it before the same backward.

        With ``sync="ssp:S"`` and ``"asp"`` a worker may lack what others have contributed. After this step all workers have
        the same parameters, and buffers become rank 0's before the next forward. The last step before ``state_dict()``,
        ``psd.save``, ``psd.load`` and ``psd.shutdown`` must be such a step. With ``sync="bsp"`` every step is one.
        """
        self._staleness.is_asked = True

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Finishes synchronisation and scales gradients so that their norm is at most ``max_norm``. Returns it.

        ``torch.nn.utils.clip_grad_norm_`` after ``backward`` does the same.
        """
        if self._update == "server":
            raise RuntimeError(
                'with update="server" the shards step each layer as soon as its gradients have met, and the norm of all '
                "gradients is known only when the last layer's have: every step would have to wait for it. To clip by "
                'norm, use update="worker"'
            )
        self.synchronize()
        return nn.utils.clip_grad_norm_(self._trainable.values(), max_norm, norm_type)

    def sessions_plan(self) -> List[Tuple[str, int, str, str, int]]:
        """The plan in force: name, parameters, scheme, reason and bytes this worker sends a step."""
        if self._session is None:
            raise RuntimeError("the plan is made at the first synchronised backward of two or more workers")
        rows = self._session.plan()
        # The checksums of remainders are no layer of the model's.
        rows = rows if self._remainders is None else rows[: self._remainders.checksums.index]
        doubles = [u for u in self._units if isinstance(u, DoubleUnit)]
        return rows + [(u.name, u.len, "mean", WHY_MEAN, 8 * u.len) for u in doubles]

    def traffic(self) -> Tuple[int, int]:
        """Bytes sent and received for gradients so far."""
        return (0, 0) if self._session is None else self._session.traffic()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._await_all()
        return super().state_dict(*args, **kwargs)

    # Sessions.

    def _start_session(self) -> None:
        """Decides what goes how, together with the other workers."""
        if self._update == "server" and self._rule is None:
            raise RuntimeError(
                'update="server" needs a rule for the shards: make a poseidon.torch.SGD, Adam or AdamW from '
                "model.parameters() before the first backward"
            )
        rules = [] if self._rule is None else self._rule.settle()
        for parameter, kind in self._rule.kinds().items() if rules else ():
            if parameter in self._members:
                self._members[parameter].kind = kind
        rows = {f.name: f.rows for f in self._factored if not is_hooked(f.linear, own=1)}
        self._sessions_started += 1
        topic = f"rows of model {self._number}, {self._sessions_started}"
        devices = sorted({member.device.type for member in self._members.values()})
        told = [json.loads(facts) for facts in Job.get().gather(topic, json.dumps([rows, devices]))]
        all_rows = [theirs for theirs, _ in told]
        for factored in self._factored:
            weight = factored.weight
            most = max([self._batch or 0, *(r.get(factored.name, 0) for r in all_rows)])
            if self._staleness.is_allowed and weight.is_cuda:
                most = 0  # A GPU rebuilds the gradient of one step, which all workers take together.
            everywhere = all(factored.name in r for r in all_rows)
            is_known = weight in self._members
            if most == 0 or not everywhere or not is_known or choose(weight, most, Job.get(), self._scheme)[0] != "sfb":
                factored.unit = None
                continue
            # Frozen or not: what is trainable was settled when the model was wrapped.
            members = [self._members[p] for p in (factored.weight, factored.bias) if p in self._members]
            # The weight comes first.
            factored.bias_apart = any(member.kind != members[0].kind for member in members)
            members = members[:1] if factored.bias_apart else members
            factored.unit = Unit(factored.name, members, (*weight.shape, most))
        # What a worker does not use may be used by others, or by nobody: then it is not stepped.
        together = self._rule is None or not self._expects_unused
        self._units = units_of((m for m in self._members.values() if m.dtype != torch.float64), together)
        self._usage_unit = None
        if self._expects_unused:
            self._usage_unit = Unit("parameters in use", [])
            self._usage_unit.len = len(self._members)
            self._units.append(self._usage_unit)
        for factored in self._factored:
            if factored.unit is None:
                self._give_up(factored)
        self._factored = [factored for factored in self._factored if factored.unit is not None]
        self._remainders = None
        by_factors = [factored.unit for factored in self._factored if factored.unit is not None]
        if by_factors and self._update == "worker":
            self._remainders = Remainders(by_factors, self._deterministic)
            self._units.append(self._remainders.checksums)
        layers = []
        for index, unit in enumerate(self._units):
            unit.index = index
            layers.append(unit.spec())
            for member in unit.members:
                member.unit = unit
        setup: Dict[str, Any] = {}
        self._rates = []
        if self._rule is not None:
            check_same(f"the optimizer of model {self._number}, {self._sessions_started}", self._rule.describe())
            own = [rules[unit.group] if unit.members else "sum" for unit in self._units]
            setup.update(rules=own, learning_rate=self._rule.rates()[0], sync=self._sync)
        self._session = Job.open(
            f"gradients of model {self._number}",
            layers,
            deterministic=self._deterministic,
            threads=torch.get_num_threads(),
            **setup,
        )
        if (self._begins_equal[0] or self._update == "server") and are_comparable([theirs for _, theirs in told]):
            self._replicas = Replicas(self._session, list(self._members.values()))
        doubles = [m for m in self._members.values() if m.dtype == torch.float64]
        if doubles:
            self._units.append(self._doubles.unit(doubles))
            for member in doubles:
                member.unit = self._units[-1]
        if self._rule is not None:
            with_values = [unit for unit in self._units if unit.members]
            for unit in with_values:
                unit.take_parameters()
            for unit in with_values:
                unit.broadcast(self._session)
            for unit in with_values:
                unit.receive_values(self._session)
                if unit.on_gpu and unit.fc is not None:
                    unit.local = self._rule.local(unit)
                # All workers have these values already, and the graph this backward goes through, too.
                unit.note_versions()
            self._rule._restore()
            if self._staleness.is_allowed:
                # The first worker's step must not come to a shard before that has what was loaded.
                Job.get().gather(f"the shards of model {self._number}, {self._sessions_started}", "null")

    def _set_rule(self, rule: Any) -> None:
        if self._session is not None:
            raise RuntimeError("the shards have their rule already: make the optimizer before the first backward")
        self._rule = rule

    def _set_rates(self, rates: List[float]) -> None:
        """The learning rate of each group's units, from now on."""
        if rates == self._rates or self._session is None:
            return
        for unit in self._units:
            if unit.members:
                self._session.set_layer_learning_rate(unit.index, rates[unit.group])
        self._rates = rates

    def _note_step(self) -> None:
        self._stepped = True
        self._forget_gradients()

    def _restart(self) -> None:
        """The shards forget: the next backward starts with the parameters as they are then."""
        if self._session is None:
            return
        self.synchronize()
        self._end_replicas()
        for session in self._sessions():
            session.say_goodbye()
            tell(session)
            session.finish()
        self._session = None
        self._units = []
        for member in self._members.values():
            member.unit = None
        for factored in self._factored:
            factored.unit = None
            factored.bias_apart = False
            factored.reset()

    @or_abort
    def _share_buffers(self, synchronises: bool) -> None:
        if self.broadcast_buffers:
            # Where workers may be apart, buffers become rank 0's after the steps that are taken together.
            self._shared.begin_forward(synchronises and not self._staleness.is_allowed)

    @or_abort
    def _share_buffers_in_join(self) -> None:
        # Those who are through go along with every step of the others, and with nothing else they do.
        if self.broadcast_buffers and self._join is not None:
            self._shared.share(self._join.first_active)

    # The job.

    def _find_parameters(self) -> None:
        self._trainable: Dict[str, nn.Parameter] = {
            name: p
            for name, p in self.module.named_parameters()
            if p.requires_grad and name not in self.parameters_to_ignore
        }
        self._members = {p: Member(name, p) for name, p in self._trainable.items()}

    def _take_part(self) -> None:
        """Synchronises from now on, together with the other workers' models."""
        Job.get()
        self._find_parameters()
        if not self._trainable:
            raise ValueError("no parameter requires a gradient: there is nothing to synchronise")
        self._refuse_parameters()
        for model in list(MODELS):
            if not self._members.keys().isdisjoint(model._members):
                model._let_go()
        Job.models += 1
        self._number = Job.models
        Part.close_those_left(self._number)
        check_same(f"model {self._number}", self._describe())
        broadcast(self._tensors_that_begin_equal())
        # A worker alone has nothing to synchronise, and nothing to pay for it.
        self._is_alone = world_size() == 1 and self._update == "worker"
        if not self._is_alone:
            names = {id(p): name for name, p in self._trainable.items()}
            known = [m for m in factorable(self.module) if all(id(p) in names or not p.requires_grad for p in m.parameters())]
            self._factored = [Factored(self, m, names[id(m.weight)]) for m in known]
            for factored in self._factored:
                patch(factored)
                self._hooks.hide_on(factored.linear)
                for p in factored.parameters:
                    self._members[p].factored = factored
            for parameter, member in self._members.items():
                self._hooks.on_gradient(parameter, self._on_gradient, member)
            with torch.enable_grad():
                for parameter, member in self._members.items():
                    member.end = _end(parameter)
            self._ends = [member.end for member in self._members.values()]
        if self._update == "server":
            self._await_in_forward()
        MODELS.add(self)
        self._part = Part(self, self._number)
        self._is_open = True

    def _let_go(self) -> None:
        """Leaves, though the other workers may still have theirs."""
        if self._is_open and self._in_backward:
            self._close(because=self._torn())
        self._leave()

    def _leave(self, waits: bool = True) -> None:
        """Takes the hooks off and leaves the sessions to be ended, if that is not done yet."""
        if not self._is_open:
            return
        if waits:
            self.synchronize()
            self._end_replicas()
        self._is_open = False
        MODELS.discard(self)
        self._hooks.remove()
        for factored in (*self._factored, *self._leaving):
            unpatch(factored)
        self._factored, self._leaving = [], []
        # Cycles: without them a model's memory is free at once.
        for member in self._members.values():
            member.unit = member.factored = None
            give_back(member.parameter)
        assert self._part is not None
        self._part.leave(self._sessions(), self._shared, self._doubles)
        self._session = None

    def _end_replicas(self) -> None:
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.end()

    def _sessions(self) -> List[_native.Session]:
        """Those to be ended with the model."""
        besides = None if self._remainders is None else self._remainders.leave()
        return [session for session in (self._session, besides) if session is not None]

    def _close(self, because: str) -> None:
        """Takes the job down, as far as it is this model's."""
        if self._is_open and self._part is not None:
            self._part.close(because)

    def _torn(self) -> str:
        return f"worker {rank()}: the last backward pass ended with an error, and not all of its gradients were sent"


def _end(parameter: nn.Parameter) -> Any:
    """The node of the graph where gradients of ``parameter`` arrive."""
    made_of_it: Any = parameter.view_as(parameter).grad_fn
    return made_of_it.next_functions[0][0]


# For libraries that ask whether a model is torch's. It is none of its subclasses: nothing of torch's class runs here.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
