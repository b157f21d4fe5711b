"""What programs and libraries ask of torch's DistributedDataParallel, besides training."""

import warnings
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poseidon.torch._agreement import describe
from poseidon.torch._buffers import Buffers
from poseidon.torch._job import rank, world_size
from poseidon.torch._staleness import Staleness

_ELSEWHERE = (
    "To keep it, use torch's DistributedDataParallel on torch.distributed.init_process_group(\"poseidon\"), which has "
    "neither factors nor updates on the shards"
)


class DdpInterface:
    """Attributes and methods of torch's DistributedDataParallel, as far as they mean something here.

    The others are missing, or say in words why they are.
    """

    module: nn.Module
    training: bool
    broadcast_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    _update: str
    _staleness: Staleness
    _scheme: str
    _batch: Optional[int]
    _deterministic: bool
    _begins_equal: Tuple[bool, bool]
    _trainable: Dict[str, nn.Parameter]
    _session: Any
    _shared: Buffers
    _synchronises: bool
    _process_group: Any

    # torch's logger and reducer are parts of its own engine.
    logger: None = None
    mixed_precision: None = None
    # Synchronisation goes on by itself: `finalize_backward` has nothing to do.
    should_finalize_after_backward = False

    def _keep_arguments(self, device_ids: Any, output_device: Any, dim: int, bucket_cap_mb: Optional[float]) -> None:
        """Remembers what others may ask for again."""
        self.device_ids = None if device_ids is None else list(device_ids)
        self.output_device = output_device
        self.dim = dim
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * (1 << 20))
        self.broadcast_bucket_size = 250 << 20
        self.parameters_to_ignore: Set[str] = ignored(self.module)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next forward's gradients are synchronised. False within ``no_sync``."""
        return self._synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, required: bool) -> None:
        self._synchronises = bool(required)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether buffers become rank 0's before the next forward, if they are shared at all."""
        return self._shared.is_due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, required: bool) -> None:
        self._shared.is_due = bool(required)

    @property
    def forward_sync_buffers(self) -> bool:
        """As ``broadcast_buffers``."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, wanted: bool) -> None:
        self.broadcast_buffers = bool(wanted)

    def will_sync_module_buffers(self) -> bool:
        has_buffers = any(buffer.numel() > 0 for buffer in self.module.buffers())
        return self.broadcast_buffers and self.require_forward_param_sync and has_buffers

    @property
    def process_group(self) -> Any:
        """The group that was given, or torch's default one, if there is any. Gradients do not go through it."""
        if self._process_group is None and dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return self._process_group

    @property
    def device(self) -> torch.device:
        return next(iter(self._trainable.values())).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        return len({p.device for p in self._trainable.values()}) > 1

    @property
    def reducer(self) -> "Reducer":
        return Reducer(self)

    @property
    def require_manual_backward_finalization(self) -> bool:
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise NotImplementedError(
                'backward finishes by itself: to overlap more, pass update="server", where a layer is awaited when its '
                f"next forward begins. {_ELSEWHERE}"
            )

    def finalize_backward(self) -> None:
        raise RuntimeError("backward has finished by itself: require_manual_backward_finalization is False")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Takes torch's ``allreduce_hook``, which is what happens anyway. Other hooks are refused."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        group: Any = state
        if hook is default_hooks.allreduce_hook and (group is None or group.size() == world_size()):
            return
        name = getattr(hook, "__name__", repr(hook))
        raise NotImplementedError(
            f"communication hook {name}: gradients travel layer by layer, some as factors, and there are no buckets to "
            'give to a hook. They are exact; scheme="auto" chooses the fewest bytes that leave them so. ' + _ELSEWHERE
        )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        if comm_hook_type != dist.BuiltinCommHookType.ALLREDUCE:
            raise NotImplementedError(
                f"communication hook {comm_hook_type}: gradients are exact here, and are not rounded on their way. "
                + _ELSEWHERE
            )

    def _register_fused_optim(self, optim: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{getattr(optim, '__name__', optim)} in the backward pass: pass update=\"server\" and make a poseidon.torch.SGD, "
            "Adam or AdamW, whose steps the shards take during backward"
        )

    def _set_static_graph(self) -> None:
        if self._session is not None:
            raise RuntimeError("the plan is made at the first synchronised backward: set static_graph before it")
        self.static_graph = True
        self._refuse_staleness()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(f"sample rate {sample_rate}: expected 1 or more")

    def _get_ddp_logging_data(self) -> Dict[str, Any]:
        """Facts under the names that torch's has for them."""
        parameters = list(self._trainable.values())
        return {
            "world_size": world_size(),
            "rank": rank(),
            "backend_name": "poseidon",
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "dtypes": ", ".join(sorted({str(p.dtype)[6:] for p in parameters})),
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())),
        }

    def _refuse_staleness(self) -> None:
        """Says what has no meaning where workers may be at different steps."""
        refuse = self._staleness.refuse
        if self._update == "worker":
            refuse(
                'with update="worker" a gradient is the mean of one step, which all workers take together',
                'update="server" and a poseidon.torch.SGD, Adam or AdamW',
            )
        if self._deterministic:
            refuse("gradients are added as they come, so a run does not repeat bit by bit", "deterministic=False")
        if self.find_unused_parameters or self.static_graph:
            refuse(
                "whether anybody has used a parameter is known when all workers have taken the step",
                "find_unused_parameters=False and static_graph=False",
            )

    def _refuse_parameters(self) -> None:
        """Says which parameters cannot be synchronised."""
        for name, p in self._trainable.items():
            if p.is_cuda and self._scheme == "sfb":
                why = f"parameter '{name}' is on a GPU, where no layer goes by factors then"
                self._staleness.refuse(why, 'scheme="auto"')
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                raise TypeError(f"parameter '{name}' is {p.dtype}: expected float32, bfloat16, float16 or float64")
            if p.dtype == torch.float64 and self._update == "server":
                raise TypeError(
                    f"parameter '{name}' is {p.dtype}: with update=\"server\" the shards keep and step float32, which would "
                    'round it. Expected update="worker"'
                )
            if p.is_sparse:
                raise TypeError(f"parameter '{name}' is sparse: expected a dense one")

    def _tensors_that_begin_equal(self) -> List[Tuple[str, Tensor]]:
        """What becomes rank 0's when the model is wrapped."""
        parameters, buffers = self._begins_equal
        state: List[Tuple[str, Tensor]] = [*self.module.named_parameters()] if parameters else []
        state += self.module.named_buffers() if buffers else ()
        return [(name, t.detach()) for name, t in state if t.numel() > 0 and name not in self.parameters_to_ignore]

    def _describe(self) -> Dict[str, str]:
        """What has to be the same on all workers: what is synchronised, and how."""
        ignored, (equal, equal_buffers) = self.parameters_to_ignore, self._begins_equal
        parameters = [(n, p) for n, p in self.module.named_parameters() if n not in ignored and (equal or p.requires_grad)]
        buffers = [(n, b) for n, b in self.module.named_buffers() if n not in ignored]
        names = ("find_unused_parameters", "static_graph", "broadcast_buffers")
        settings = {name: getattr(self, name) for name in names}
        settings.update(update=self._update, sync=self._staleness.sync, scheme=self._scheme, batch=self._batch)
        settings.update(deterministic=self._deterministic, init_sync=equal)
        return describe(parameters, buffers if equal_buffers or self.broadcast_buffers else (), settings)


class Reducer:
    """What libraries call of torch's reducer."""

    def __init__(self, model: Any):
        self._model = model

    def prepare_for_backward(self, outputs: Iterable[Any]) -> None:
        """The next backward synchronises, though its forward was in ``no_sync``."""
        self._model._expects_gradients = True
        self._model._forwards = max(self._model._forwards, 1)

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the reducer's {name} is a part of torch's own engine, which does not run here")


def ignored(module: nn.Module) -> Set[str]:
    """Parameters and buffers that torch's DistributedDataParallel is told to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def chosen_buffers(broadcast_buffers: Optional[bool], forward_sync_buffers: Optional[bool]) -> bool:
    """Whether buffers are shared in training; the newer argument counts."""
    if forward_sync_buffers is None:
        return True if broadcast_buffers is None else broadcast_buffers
    if broadcast_buffers is not None:
        warnings.warn("broadcast_buffers is ignored where forward_sync_buffers is given", stacklevel=3)
    return forward_sync_buffers


def chosen_group(process_group: Any, device_mesh: Any) -> Any:
    """The group that a model is synchronised among. It has all workers, or is refused."""
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("process_group and device_mesh: expected one of them")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions: expected 1")
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is not None and process_group.size() != world_size():
        what = "process_group" if device_mesh is None else "device_mesh"
        raise ValueError(
            f"{what} has {process_group.size()} workers: expected None or one of all {world_size()}, "
            "which every model is synchronised among"
        )
    return process_group


def refuse(module: nn.Module, mixed_precision: Any, delayed: Any) -> None:
    """Says which of torch's arguments would change results."""
    if mixed_precision is not None:
        raise ValueError(
            f"mixed_precision={mixed_precision}: it casts parameters before each forward and adds gradients up in the type "
            "they are cast to. That is not here. Use torch.autocast, whose gradients are float32 and exact, or parameters "
            "in bfloat16 or float16, whose gradients are added in float32 and rounded once. " + _ELSEWHERE
        )
    if delayed is not None:
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce: a gradient goes out when it is ready. Expected None"
        )
    for name, p in module.named_parameters():
        if getattr(p, "_in_backward_optimizers", None):
            raise ValueError(
                f"parameter '{name}' has an optimizer that steps during backward, before gradients have met: pass "
                'update="server" and make a poseidon.torch.SGD, Adam or AdamW instead'
            )
