"""What of a model is synchronised as one."""

from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon.torch._device import Beside, on_device, stream_of
from poseidon.torch._job import Job, is_initialized, memory, world_size
from poseidon.torch._linear import is_patch
from poseidon.torch._local import LocalRule

if TYPE_CHECKING:
    from poseidon._native import LayerSpec
    from poseidon.torch._factors import Factored

# Gradients of at least this many bytes go out from their own memory; smaller ones share a buffer,
# because a frame costs a few microseconds however short it is.
_OWN_MEMORY = 64 << 10
_BUCKET = 256 << 10

# How numbers of a type travel.
_ENCODINGS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Why float64 goes as a mean, which plans say.
WHY_MEAN = "float64: one collective operation after backward"


class Member:
    """A parameter that is synchronised, as one of its unit's.

    Hooks have their parameter's at hand: to look one up, torch computes a parameter's hash in Python.
    """

    __slots__ = ("parameter", "name", "dtype", "device", "unit", "factored", "kind", "is_used", "is_ready", "version", "address", "absent", "end")

    def __init__(self, name: str, parameter: nn.Parameter):
        self.name = name
        self.parameter = parameter
        # As they were when the model was wrapped.
        self.dtype, self.device = parameter.dtype, parameter.device
        self.unit: Optional[Unit] = None
        # Its layer, if that may go by factors.
        self.factored: "Optional[Factored]" = None
        # What is synchronised as one has one kind. With update="server": its group, and steps taken before.
        self.kind: Tuple[int, int] = (0, 0)
        # Whether it got a gradient since the last synchronisation, and whether in this backward.
        self.is_used = self.is_ready = False
        # With update="server": torch's count of changes and where the values are, as the wrapper left them.
        self.version = self.address = 0
        # What is in the place of its gradient while the shards have that.
        self.absent: Optional[Tensor] = None
        # The node of torch's graph where its gradients arrive, while the wrapper synchronises.
        self.end: Any = None

    def has_factors(self) -> bool:
        """Whether its layer has factors that are not sent yet."""
        layer = self.factored
        return layer is not None and self.unit is layer.unit and bool(layer.parts)


class Unit:
    """What is synchronised as one: a layer of the session."""

    def __init__(self, name: str, members: List[Member], fc: Optional[Tuple[int, int, int]] = None):
        self.name = name
        self.members = members
        self.parameters = parameters = [m.parameter for m in members]
        # If it goes by factors: outputs, inputs, most rows a step.
        self.fc = fc
        self.index = -1
        self.device = members[0].device if members else torch.device("cpu")
        self.on_gpu = self.device.type == "cuda"
        # If it is on a GPU: the stream that has last waited for its result, and by factors everybody's rows of them.
        self.stream: Any = None
        self.matrix: Optional[Tensor] = None
        # If, besides, update is "server": what steps it.
        self.local: Optional[LocalRule] = None
        self.len = sum(p.numel() for p in parameters)
        # Its members' type, which gradients and factors travel as: one for all.
        self.dtype = members[0].dtype if members else torch.float32
        # What results are: the same, but what is rebuilt from factors is float32.
        self.result_dtype = self.dtype if fc is None else torch.float32
        # With update="server": where the parameters are, as the shards know them.
        self.values: Optional[Tensor] = None
        # Whether `values` is the parameters' own memory.
        self.in_values = False
        # While it is on its way: where this step's gradient is, or the result if it comes instead.
        self.result: Optional[Tensor] = None
        self.stage: Optional[Tensor] = None
        # The parameters' parts of the stage, unless it goes by factors: gradients are those parts then.
        self.parts: List[Tensor] = []
        self.missing = 0
        self.in_flight = False

    @property
    def group(self) -> int:
        """With update="server": the group of its parameters."""
        return self.members[0].kind[0]

    def spec(self) -> "LayerSpec":
        """The unit as a layer of a session."""
        return self.name, self.len, self.fc, _ENCODINGS[self.dtype], _ENCODINGS[self.result_dtype]

    @property
    def has_masters(self) -> bool:
        """With update="server": whether the update rule has the parameters in float32, and the model has them rounded."""
        return self.values is not None and self.dtype != torch.float32

    def begin(self) -> None:
        """A synchronised backward begins."""
        self.missing = len(self.members)
        for member in self.members:
            member.is_ready = False

    def send(self, session: _native.Session) -> None:
        self.in_flight = True
        # The last one would count as a holder of the gradient's memory.
        self.result = None
        self.result = self._gradient()
        if self.on_gpu:
            self.stream = stream_of(self.device)
            into = None if self.values is None else on_device(self.values)
            session.send_on_device(self.index, on_device(self.result), self.stream.cuda_stream, into)
        elif self.values is None:
            session.send(self.index, memory(self.result, self.dtype))
        else:
            session.send_into(self.index, memory(self.result, self.dtype), memory(self.values, self.result_dtype))
        if self.values is not None:
            # Sums are made in a gradient's memory: nobody should look at it any more.
            for p in self.parameters:
                p.grad = None

    def send_factors(self, session: _native.Session, parts: List[Tuple[Tensor, Tensor]]) -> None:
        self.in_flight = True
        self.result = self.values
        if self.result is None:
            self.result = self._stage()
        if self.on_gpu:
            # Whatever torch does to make it is done before the factors leave, and so before another stream writes to it.
            self._stage()
            self._gather(session, parts)
            return
        memories = [(memory(u.to(self.dtype), self.dtype), memory(v.to(self.dtype), self.dtype)) for u, v in parts]
        session.send_factors(self.index, memories, memory(self.result))

    def _gather(self, session: _native.Session, parts: List[Tuple[Tensor, Tensor]]) -> None:
        """Has everybody's factors come to the GPU."""
        assert self.fc is not None
        m, n, most = self.fc
        self.stream = stream_of(self.device)
        if self.matrix is None:
            self.matrix = torch.zeros(world_size() * most, m + n, dtype=self.dtype, device=self.device)
        into, stream = on_device(self.matrix), self.stream.cuda_stream
        if sum(u.shape[0] for u, _ in parts) > most:
            memories = [(memory(u.to("cpu", torch.float32)), memory(v.to("cpu", torch.float32))) for u, v in parts]
            session.gather_from_host(self.index, memories, into, stream)
            return
        # In memory of ours: the program may write to its own before a copy has left.
        rows = [torch.cat([factor.to(self.dtype) for factor in part], dim=1) for part in parts]
        session.gather_on_device(self.index, [on_device(part) for part in rows], into, stream)

    def receive(self, session: _native.Session) -> None:
        """Waits for the result. Of what is on a GPU, the program's stream waits, not this thread."""
        if not self.on_gpu:
            session.receive(self.index)
        elif self.fc is None:
            stream = stream_of(self.device)
            session.receive_on_device(self.index, stream.cuda_stream)
            self._follow(stream)
        else:
            self._rebuild(session)
        self.in_flight = False
        if self.values is not None:
            self.result = None

    def _rebuild(self, session: _native.Session) -> None:
        """From factors to a gradient, beside whatever the GPU still computes."""
        assert self.fc is not None and self.matrix is not None and self.result is not None
        m, n, _ = self.fc
        into = self.result if self.local is None else self.stage
        assert into is not None
        beside, stream = Beside.stream(self.device), stream_of(self.device)
        beyond = session.receive_on_device(self.index, beside.cuda_stream)
        with torch.cuda.stream(beside), torch.no_grad():
            rows = self.matrix.to(torch.float32)
            if beyond:
                more = torch.frombuffer(beyond, dtype=torch.float32).to(self.device)
                rows = torch.cat([rows, more.view(-1, m + n)])
            u, v = rows[:, :m], rows[:, m:]
            # A mean. Factors have far fewer numbers than the gradient, but only powers of two leave them exact.
            workers = world_size()
            is_exact = workers & (workers - 1) == 0
            if is_exact:
                u.mul_(1.0 / workers)
            torch.mm(u.t(), v, out=into[: m * n].view(m, n))
            if into.numel() > m * n:
                torch.sum(u, dim=0, out=into[m * n :])
            if not is_exact:
                into.mul_(1.0 / workers)
            if self.local is not None:
                beside.wait_event(self.local.is_free)
                self.local.step(into)
        stream.wait_stream(beside)
        self._follow(stream)

    def _follow(self, stream: Any) -> None:
        """``stream`` waits for the result; so does the stream whose memory it comes to."""
        if self.stream != stream:
            self.stream.wait_stream(stream)
        self.stream = stream

    def enter(self) -> None:
        """The program's stream is about to use what another stream has waited for."""
        if self.on_gpu and self.stream is not None:
            stream = stream_of(self.device)
            if stream != self.stream:
                stream.wait_stream(self.stream)

    def slices(self, whole: Tensor) -> Iterator[Tuple[nn.Parameter, Tensor]]:
        """Each parameter and its part of ``whole``."""
        start = 0
        for p in self.parameters:
            yield p, whole[start : start + p.numel()].view(p.shape)
            start += p.numel()

    def take_parameters(self) -> None:
        """For update="server": the memory that parameters come back to, which is their own where it can be."""
        own = self.dtype == self.result_dtype
        if own and len(self.parameters) == 1 and self.parameters[0].is_contiguous():
            self.values = self.parameters[0].detach().view(-1)
        else:
            flat = [p.detach().to(self.result_dtype).reshape(-1) for p in self.parameters]
            self.values = torch.cat(flat)
            for p, part in self.slices(self.values) if own else ():
                p.data = part
        self.in_values = own
        for m in self.members if own else ():
            m.address = m.parameter.data_ptr()

    def broadcast(self, session: _native.Session) -> None:
        """Gives the shards the parameters that were taken, and every worker those of worker 0."""
        assert self.values is not None
        if self.on_gpu:
            self.stream = stream_of(self.device)
            session.broadcast_on_device(self.index, on_device(self.values), self.stream.cuda_stream)
        else:
            session.broadcast(self.index, memory(self.values, self.result_dtype))

    def receive_values(self, session: _native.Session) -> None:
        if self.on_gpu:
            session.receive_on_device(self.index, stream_of(self.device).cuda_stream)
        else:
            session.receive(self.index)

    def land_parameters(self) -> None:
        """Puts what came back where the model has it."""
        assert self.values is not None
        if not self.in_values:
            with torch.no_grad():
                for p, part in self.slices(self.values):
                    p.copy_(part)
        else:
            # Written past torch: a graph that was made with the old values must not go on with these.
            for p in self.parameters:
                torch.autograd.graph.increment_version(p)
        self.note_versions()

    def note_versions(self) -> None:
        """From here on, whoever else changes a parameter is noticed."""
        for m in self.members:
            m.version = m.parameter._version

    def _gradient(self) -> Tensor:
        """This step's gradient as one piece: where it is, if it can go out from there."""
        gradients = [p.grad for p in self.parameters]
        for member, gradient in zip(self.members, gradients):
            if gradient is not None and gradient.layout != torch.strided:
                raise TypeError(f"the gradient of '{member.name}' is sparse: expected a dense one (sparse=False)")
        gradient = gradients[0] if len(gradients) == 1 else None
        if (
            gradient is not None
            and gradient.dtype == self.dtype
            and gradient.device == self.device
            and gradient.is_contiguous()
            # torch may hand out one memory twice: here, and as what the layers below still read.
            and _holders(gradient) <= _ONE_HOLDER
        ):
            return gradient.detach()
        stage = self._stage()
        with torch.no_grad():
            copy_all(self.parts, gradients)
        return stage

    def _stage(self) -> Tensor:
        """Memory for a gradient; not that of the last one if somebody still has it."""
        if self.stage is None or _holders(self.stage) > _ONE_HOLDER + len(self.parts):
            self.stage = torch.zeros(self.len, dtype=self.result_dtype, device=self.device)
            self.parts = [part for _, part in self.slices(self.stage)] if self.fc is None else []
        return self.stage


def copy_all(into: List[Tensor], sources: List[Optional[Tensor]]) -> None:
    """Copies each of ``sources``; zeros where there is none."""
    there = [source for source in sources if source is not None]
    if len(there) == len(into):
        # One call: torch needs several microseconds for each.
        torch._foreach_copy_(into, there)
        return
    for part, source in zip(into, sources):
        part.zero_() if source is None else part.copy_(source)


def _holders(tensor: Tensor) -> int:
    """How many tensors have this one's memory, in a count of its own."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ONE_HOLDER = _holders(torch.zeros(1, device="cpu"))


def choose(weight: Tensor, rows: int, workers: "Union[int, _native.Session]", scheme: str) -> Tuple[str, str]:
    """How a Linear layer goes, and why: among so many workers with a host each, or among those of a job."""
    m, n = weight.shape
    return _native.choose(m, n, rows, workers, scheme, _ENCODINGS.get(weight.dtype, "f32"))


def units_of(members: Iterable[Member], together: bool = True) -> List[Unit]:
    """Units in forward order: layers that have theirs, by factors, and large parameters alone, small ones together.

    What is together is of one kind, and stands where its first parameter does: the next forward needs it there.
    Without ``together``, small parameters are alone, too.
    """
    units: List[Union[Unit, List[Member]]] = []
    buckets: Dict[Any, List[Member]] = {}
    for member in members:
        unit = None if member.factored is None else member.factored.unit
        if unit is not None and member in unit.members:
            if unit not in units:
                units.append(unit)
            continue
        if not together or _bytes(member) >= _OWN_MEMORY:
            units.append([member])
            continue
        kind = (member.kind, member.device, member.dtype)
        if kind not in buckets:
            buckets[kind] = []
            units.append(buckets[kind])
        bucket = buckets[kind]
        bucket.append(member)
        if sum(map(_bytes, bucket)) >= _BUCKET:
            del buckets[kind]
    return [unit if isinstance(unit, Unit) else _together(unit) for unit in units]


def _together(bucket: List[Member]) -> Unit:
    name = bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} to {bucket[-1].name}"
    return Unit(name, bucket)


def _bytes(member: Member) -> int:
    return member.parameter.numel() * member.parameter.element_size()


def factorable(module: nn.Module) -> List[nn.Linear]:
    """Linear layers whose weight's gradient is only made by their own forward, as far as one can see."""
    owners: Dict[int, int] = {}
    for m in module.modules():
        for p in m.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    # Exactly Linear: subclasses have reasons of their own, and attention uses its projection's
    # weight without calling it.
    return [
        m
        for m in module.modules()
        if type(m) is nn.Linear and m.weight.requires_grad and owners.get(id(m.weight)) == 1
        and (m.bias is None or owners.get(id(m.bias)) == 1)
        and not is_hooked(m) and all(p.dtype != torch.float64 for p in m.parameters(recurse=False))
        and ("forward" not in m.__dict__ or is_patch(m.forward))
    ]


def is_hooked(linear: nn.Linear, own: int = 0) -> bool:
    """Whether somebody wants to see or change its gradients themselves; ``own`` hooks are ours."""
    return any(
        p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > own for p in linear.parameters(recurse=False)
    )


def is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def plan(model: nn.Module, batch: int, workers: Optional[int] = None, scheme: str = "auto") -> str:
    """A table of how each trainable parameter of ``model`` would be synchronised, and why.

    ``batch`` is the number of rows a Linear layer sees per worker and step: the batch size or, for
    sequences, batch times length. Without ``workers`` it is for this job's, with their hosts and ports, or for four.
    """
    model = getattr(model, "module", model) if hasattr(model, "sessions_plan") else model
    among = workers or (Job.get() if is_initialized() else 4)
    rows = [("parameter", "size", "scheme", "why")]
    factored = {id(p): linear for linear in factorable(model) for p in linear.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            rows.append((name, str(parameter.numel()), "-", "frozen"))
        elif parameter.dtype == torch.float64:
            rows.append((name, str(parameter.numel()), "mean", WHY_MEAN))
        elif id(parameter) in factored:
            choice, why = choose(factored[id(parameter)].weight, batch, among, scheme)
            if parameter.dim() == 1:
                why = "part of its weight's factors" if choice == "sfb" else "its gradient has no factors"
            rows.append((name, str(parameter.numel()), choice, why))
        else:
            rows.append((name, str(parameter.numel()), "ps", "its gradient has no factors"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    line = "{:<%d}  {:>%d}  {:<%d}  {}" % tuple(widths)
    return "\n".join(line.format(*row) for row in rows)
