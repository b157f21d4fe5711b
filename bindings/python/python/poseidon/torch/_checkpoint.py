"""Checkpoints of a model and its optimizer, the shards' state included, in Poseidon's format."""

import hashlib
import io
import json
import os
import warnings
from typing import Any, ClassVar, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon._numbers import BYTES
from poseidon.torch import _random
from poseidon.torch._checksum import checksums
from poseidon.torch._job import LINGER, Job, rank, world_size
from poseidon.torch._parallel import DistributedDataParallel
from poseidon.torch._rules import Held, Rule
from poseidon.torch._saving import Saving, Together

# The layer of what is no tensor of the model and no vector of the optimizer: a file of torch.save's.
_REST = "(torch.save)"
# Layers of the states of each worker's random generators: their names are this, the rank, and a bracket.
_RANDOM = "(random states of rank "
# Types of numbers, as safetensors names them. Tensors of other types are in the rest.
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}
# Notes of more characters than a person reads are not shown in the manifest.
_LONGEST_NOTE = 1000
# Pieces that are on their way to the other workers at once: enough that small ones do not wait for each other.
_AT_ONCE = 64
# Of a large tensor, runs of so many numbers at so many places are compared with the other workers'.
_RUNS, _RUN = 256, 64


def save(
    place: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    *,
    step: Optional[int] = None,
    keep: Optional[int] = None,
    wait: bool = True,
    random_states: bool = True,
    **notes: Any,
) -> Saving:
    """Writes a checkpoint of ``model``, ``optimizer`` and ``notes`` to ``place``. Every worker calls it.

    ``place`` is a folder that all workers can write to, or ``s3://bucket/prefix``. ``step`` is how many steps the
    job has taken. The checkpoint is ``PLACE/step-…``: every worker writes its part, and rank 0 the manifest when all
    parts are there. Without a manifest it does not exist.

    With ``wait=False`` it returns as soon as this worker has copied what it will write, and training goes on. A thread
    of every worker writes meanwhile. ``result()`` of what is returned waits for the checkpoint. A ``save`` that comes
    before the last one is written waits for that first, and so does the end of the job.

    Buffers and notes are rank 0's. Notes are what ``torch.load(weights_only=True)`` accepts: numbers, texts, tensors,
    and lists, tuples and dictionaries of them. ``keep`` is how many checkpoints stay in ``place``, this one among them.
    The states of each worker's random generators are saved with them (torch's, Python's and numpy's), unless
    ``random_states=False``.

    If a worker cannot write, every worker gets an error, and older checkpoints are as they were.
    """
    if step is None:
        raise TypeError("psd.save needs step=...: how many steps the job has taken, which names the checkpoint")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected 1 or more checkpoints to stay")
    place = os.fspath(place)
    # One at a time: each has a copy of this worker's share.
    Saving.await_last()

    contents: Optional[_Contents] = None

    def prepare() -> Tuple[int, str]:
        model._staleness.check_together("psd.save")
        nonlocal contents
        contents = _Contents(model, optimizer, step, notes)
        return step, contents.digest()

    random = _random.take() if random_states else b""
    told = Together().do("reads what it saves", prepare, waits=True)
    if len({saved for saved, _ in told}) > 1:
        steps = ", ".join(str(saved) for saved, _ in told)
        raise _native.CheckpointError(f"workers save different steps: {steps}, by rank")
    assert contents is not None, "a worker that could not read has raised"
    # Workers whose numbers differ, such as those that left a `join` early, leave it to rank 0.
    pieces = contents.share(len({digest for _, digest in told}) == 1, copies=not wait)
    if random:
        pieces.append(_Numbers(f"{_RANDOM}{rank()})", "parameters", _bytes(random)).piece(0, len(random)))
    writes = _Writes(place, step, pieces, len(random), contents.layers, contents.program, keep)
    saving = Saving(step, writes.run, wait)
    if wait:
        saving.result()
    return saving


def load(
    place: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    *,
    step: Optional[int] = None,
    random_states: bool = True,
) -> Dict[str, Any]:
    """Puts ``model`` and ``optimizer`` where the newest checkpoint of ``place``, or that of ``step``, has them.

    Returns the notes, and the checkpoint's step as ``"step"``. Every worker calls it, and must be able to read the
    place. Each reads a part of the numbers and gives it to the others. The number of workers need not be that of the
    run which saved it.

    Each worker's random generators go on from where they were, unless ``random_states=False``, or the checkpoint is of
    another number of workers.

    A checkpoint that is damaged, or of another model or optimizer, is an error on every worker, and nothing changes.
    """
    place = os.fspath(place)
    # The newest one may be on its way.
    Saving.await_last()

    def choose() -> Optional[int]:
        model._staleness.check_together("psd.load")
        # One worker chooses: the newest one may change meanwhile.
        return _choose(place, step) if rank() == 0 else None

    together = Together()
    chosen = together.do("looks for a checkpoint", choose, waits=True)[0]
    reads = _Reads(place, chosen)
    together.do("reads a checkpoint", reads.read, model, optimizer, waits=True)
    reads.share()
    if optimizer is None and model._rule is not None:
        model._rule.keep()
    # What is still on its way must not land on what is loaded.
    model._restart()
    model.module.load_state_dict(reads.found["model"])
    if optimizer is not None:
        optimizer.load_state_dict(reads.found["optimizer"])
    if random_states:
        reads.restore_generators()
    return dict(reads.found["notes"], step=chosen)


class _Numbers(NamedTuple):
    """Numbers that become pieces of a layer."""

    layer: str
    what: str
    tensor: Tensor
    # Runs of elements that this worker has and no other. Everybody has all of them if nothing is told.
    held: Optional[List[Tuple[int, int]]] = None

    def piece(self, first: int, last: int, copies: "Optional[_Copies]" = None) -> "_native.PieceSpec":
        part = self.tensor.detach().reshape(-1)[first:last]
        flat = part.cpu().contiguous() if copies is None else copies.of(part)
        return self.layer, self.what, first, _TYPES[flat.dtype], (flat.data_ptr(), _size(flat), flat)


class _Copies:
    """Memory for what is written beside the training. It is kept for the next checkpoint, whose copies are of the same
    size: fresh memory would take longer to get than to fill."""

    _memory: ClassVar[Tensor] = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __init__(self, bytes_: int) -> None:
        if len(_Copies._memory) < bytes_:
            _Copies._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old one first
            _Copies._memory = torch.empty(bytes_, dtype=torch.uint8, device="cpu")
        self._rest = _Copies._memory

    def of(self, part: Tensor) -> Tensor:
        """A copy of ``part``, which may change afterwards."""
        size = _size(part)
        copy, self._rest = self._rest[:size].view(part.dtype), self._rest[_padded(size) :]
        return copy.copy_(part)


class _Contents:
    """What a checkpoint consists of, as this worker has it."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optional[torch.optim.Optimizer],
        step: int,
        notes: Dict[str, Any],
    ):
        self.step = step
        # What all workers have alike, and what rank 0 writes.
        self.common: List[_Numbers] = []
        self.own: List[_Numbers] = []
        self.layers: Dict[str, Dict[str, Any]] = {}
        self.program: Dict[str, Any] = {"version": torch.__version__, "optimizer": None, "state": {}}
        state = model.module.state_dict()
        for name, value in list(state.items()):
            if _is_plain(value):
                del state[name]
                self._add(name, list(value.shape), value.numel())
                numbers = self.common if name in model._trainable else self.own
                numbers.append(_Numbers(name, "parameters", value))
        self.rest: Dict[str, Any] = {"model": state}
        if optimizer is not None:
            self.rest["optimizer"] = self._take_vectors(model, optimizer)
        if rank() == 0:
            self._add_rest(notes)

    def digest(self) -> str:
        """Differs if the common numbers are of another training, such as that of a worker which left a `join` early.

        A training that differs at all differs in every tensor it steps, so samples tell, and they cost next to nothing
        of a step. A number that went wrong by itself is what the comparison of replicas looks for.
        """
        common = [numbers for numbers in self.common if numbers.held is None]
        kinds = [(numbers.layer, numbers.what, str(numbers.tensor.dtype)) for numbers in common]
        facts = kinds, checksums([[_sample(numbers.tensor)] for numbers in common])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def _add_rest(self, notes: Dict[str, Any]) -> None:
        """What only rank 0 writes."""
        file = io.BytesIO()
        torch.save(dict(self.rest, notes=notes), file)
        content = file.getvalue()
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:
            raise _native.CheckpointError(
                "what is saved could not be loaded again: expected numbers, texts, tensors, and lists, tuples and "
                f"dictionaries of them in notes and in states: {error}"
            ) from error
        self._add(_REST, [len(content)], len(content), private=True)
        self.own.append(_Numbers(_REST, "parameters", _bytes(content)))
        # For people: `load` reads them from the rest.
        self.program["notes"] = {name: value for name, value in notes.items() if _is_short(value)}

    def share(self, shared: bool, copies: bool) -> "List[_native.PieceSpec]":
        """What this worker writes: as many bytes as the others of what all have, if that is ``shared``.

        With ``copies``, the tensors may change afterwards.
        """
        runs = [(n, 0, n.tensor.numel()) for n in self.own] if rank() == 0 else []
        workers, mine = (world_size(), rank()) if shared else (1, rank())
        common = [numbers for numbers in self.common if numbers.held is None]
        total = sum(_size(numbers.tensor) for numbers in common)
        begin, end = total * mine // workers, total * (mine + 1) // workers
        offset = 0
        for numbers in common:
            width, size = numbers.tensor.element_size(), _size(numbers.tensor)
            first, last = (-(-min(max(at - offset, 0), size) // width) for at in (begin, end))
            if first < last:
                runs.append((numbers, first, last))
            offset += size
        of_runs = (_padded((last - first) * n.tensor.element_size()) for n, first, last in runs)
        room = _Copies(sum(of_runs)) if copies else None
        # What shards have was copied when they were asked.
        held = [n.piece(first, last) for n in self.common for first, last in n.held or ()]
        return held + [n.piece(first, last, room) for n, first, last in runs]

    def _take_vectors(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
        """The optimizer's state without what is as large as its parameter, which becomes the layer's."""
        held: Optional[Held] = None
        state, held = optimizer.own_state_dict() if isinstance(optimizer, Rule) else (optimizer.state_dict(), None)
        state["state"] = {index: dict(entry) for index, entry in state["state"].items()}
        rule = self.program["optimizer"] = type(optimizer).__name__
        names = {id(p): name for name, p in model.module.named_parameters()}
        for group, packed in zip(optimizer.param_groups, state["param_groups"]):
            for p, index in zip(group["params"], packed["params"]):
                name, entry = names.get(id(p), ""), state["state"].get(index, {})
                if name not in self.layers:
                    continue
                steps = int(entry["step"]) if "step" in entry else packed.get("steps", self.step)
                vectors = [key for key, value in entry.items() if _is_plain(value) and value.shape == p.shape]
                self.layers[name].update(rule=rule, steps=steps if entry else 0, vectors=len(vectors))
                if vectors:
                    self.program["state"][name] = {"index": index, "vectors": vectors}
                into = self.common if name in model._trainable else self.own
                runs = None if held is None or name not in model._trainable else held[p]
                into.extend(_Numbers(name, f"state.{i}", entry.pop(key), runs) for i, key in enumerate(vectors))
        return state

    def _add(self, name: str, shape: List[int], elements: int, **facts: Any) -> None:
        self.layers[name] = _layer(name, shape, elements, **facts)


class _Writes(NamedTuple):
    """What a thread writes of a checkpoint."""

    place: str
    step: int
    pieces: "List[_native.PieceSpec]"
    # Bytes of the states of this worker's random generators.
    random: int
    layers: Dict[str, Dict[str, Any]]
    program: Dict[str, Any]
    keep: Optional[int]

    def run(self, together: Together) -> None:
        try:
            parts = together.do("writes its part", self._write_part)
            together.do("writes the manifest", self._commit, parts)
        except _native.CheckpointError:
            if rank() == 0:
                _native.discard(self.place, self.step)
            raise

    def _write_part(self) -> Tuple[Optional[str], int]:
        has_numbers = any(piece[4][1] for piece in self.pieces)
        return _native.write_part(self.place, self.step, rank(), self.pieces) if has_numbers else None, self.random

    def _commit(self, parts: List[Tuple[Optional[str], int]]) -> None:
        if rank() != 0:
            return
        of_ranks = [_layer(f"{_RANDOM}{r})", [size], size, private=True) for r, (_, size) in enumerate(parts) if size]
        layers, program = json.dumps([*self.layers.values(), *of_ranks]), json.dumps({"torch": self.program})
        written = [part for part, _ in parts if part is not None]
        warning = _native.commit(self.place, self.step, world_size(), layers, written, program, self.keep)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)


def _layer(name: str, shape: List[int], elements: int, **facts: Any) -> Dict[str, Any]:
    tensors = [{"name": name, "shape": shape}]
    return {"name": name, "len": elements, "rule": "none", "steps": 0, "vectors": 0, "tensors": tensors, **facts}


def _choose(place: str, step: Optional[int]) -> int:
    if os.path.isfile(place):
        raise _native.CheckpointError(
            f"{place} is a file, and checkpoints are in folders. If it is one of torch.save's, load it so: "
            f'model.module.load_state_dict(torch.load("{place}")["model"])'
        )
    checkpoint = _native.Checkpoint(place, step)
    for words in checkpoint.passed_over:
        warnings.warn(words, stacklevel=2)
    return checkpoint.step


class _Reads:
    """What a checkpoint has for this model and this optimizer. Every byte is read by one worker, which tells the others."""

    def __init__(self, place: str, step: int):
        self._place, self._step = place, step
        # The states and the notes.
        self.found: Dict[str, Any] = {}
        # Who reads which bytes of what, the same on all workers.
        self._pieces: List[Tuple[int, Tensor]] = []
        self._random = b""

    def read(self, model: DistributedDataParallel, optimizer: Optional[torch.optim.Optimizer]) -> None:
        """Reads this worker's share. Refuses a checkpoint that is not of this model and this optimizer."""
        checkpoint = _native.Checkpoint(self._place, self._step)
        where = f"the checkpoint of step {self._step} in {self._place}"
        program, layers = json.loads(checkpoint.program()), json.loads(checkpoint.layers())
        if not isinstance(program, dict) or "torch" not in program:
            raise _native.CheckpointError(
                f"{where} was not written by psd.save: 'poseidon checkpoint export' makes a file of it that torch can load"
            )
        private = {layer["name"]: layer["len"] for layer in layers if layer.get("private")}
        shapes = {layer["name"]: layer["tensors"][0]["shape"] for layer in layers if not layer.get("private")}
        content = io.BytesIO(checkpoint.read(_REST, "parameters", 0, private[_REST]))
        rest: Dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
        _check_model(where, dict.fromkeys(rest["model"], None) | shapes, model.module)
        wanted = [(rest["model"], name, name, "parameters") for name in shapes]
        if optimizer is not None:
            _check_optimizer(where, program["torch"]["optimizer"], rest, optimizer)
            for name, facts in program["torch"]["state"].items():
                entry = rest["optimizer"]["state"].setdefault(facts["index"], {})
                wanted += [(entry, vector, name, f"state.{i}") for i, vector in enumerate(facts["vectors"])]
        loads = [0] * world_size()
        for into, key, name, what in wanted:
            dtype, ranges = checkpoint.pieces(name, what)
            whole = torch.empty(shapes[name], dtype=_dtype(dtype))
            into[key] = whole
            for first, last in ranges:
                piece = whole.view(-1)[first:last].view(torch.uint8)
                # Who has least to read so far.
                reader = loads.index(min(loads))
                loads[reader] += len(piece)
                self._pieces.append((reader, piece))
                if reader == rank():
                    piece.copy_(_bytes(checkpoint.read(name, what, first, last)))
        of_ranks = [name for name in private if name.startswith(_RANDOM)]
        mine = f"{_RANDOM}{rank()})"
        # Those of another number of workers would repeat what some of them have drawn, and not what others have.
        if len(of_ranks) == world_size() and mine in private:
            self._random = bytes(checkpoint.read(mine, "parameters", 0, private[mine]))
        self.found = rest

    def share(self) -> None:
        """Every worker gets what the others have read."""
        if world_size() == 1:
            return
        group, timeout = Job.group("a checkpoint"), Job.get().timeout
        works: List[_native.Work] = []
        for position, (reader, piece) in enumerate(self._pieces):
            if position >= _AT_ONCE:
                works[position - _AT_ONCE].wait(session=Job.get(), what="a checkpoint")
            memory = piece.data_ptr(), piece.numel(), BYTES
            works.append(group.begin("broadcast", [memory], [], piece, timeout, False, root=reader))
        for work in works[-_AT_ONCE:]:
            work.wait(session=Job.get(), what="a checkpoint")
        group.leave(LINGER)

    def restore_generators(self) -> None:
        if self._random:
            _random.put_back(self._random)


def _check_model(where: str, saved: Dict[str, Any], module: nn.Module) -> None:
    mine = {name: list(t.shape) if _is_plain(t) else None for name, t in module.state_dict().items()}
    for name in {**mine, **saved}:
        if name not in saved:
            difference = "the model has it, the checkpoint does not"
        elif name not in mine:
            difference = "the checkpoint has it, the model does not"
        elif mine[name] != saved[name]:
            difference = f"the model's has shape {mine[name]}, the checkpoint's {saved[name]}"
        else:
            continue
        raise _native.CheckpointError(f"{where} is of another model: layer '{name}': {difference}")


def _check_optimizer(where: str, rule: Optional[str], rest: Dict[str, Any], mine: torch.optim.Optimizer) -> None:
    if rule is None:
        raise _native.CheckpointError(f"{where} has no optimizer's state: it was saved without, so load it without")
    if rule != type(mine).__name__:
        raise _native.CheckpointError(f"{where} is of another optimizer: it has {rule}, this is {type(mine).__name__}")
    sizes = [len(group["params"]) for group in mine.param_groups]
    saved = [len(group["params"]) for group in rest["optimizer"]["param_groups"]]
    if sizes != saved:
        raise _native.CheckpointError(
            f"{where} is of another optimizer: it has groups of {saved} parameters, this has groups of {sizes}"
        )


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers lie in memory as safetensors has them."""
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return is_plain and value.dtype in _TYPES and not value.is_meta


def _is_short(value: Any) -> bool:
    try:
        return len(json.dumps(value, allow_nan=False)) <= _LONGEST_NOTE
    except (TypeError, ValueError):
        return False


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(size: int) -> int:
    """So many bytes from where numbers of any type may begin to where the next may."""
    return -(-size // 64) * 64


def _bytes(content: "bytes | bytearray") -> Tensor:
    # No memory is not a buffer.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _sample(tensor: Tensor) -> Tensor:
    """Runs of numbers from all over ``tensor``, or all of them if they are few, in the type that a GPU can sum."""
    flat = _as_it_lies(tensor.detach())
    if flat.numel() > _RUNS * _RUN:
        flat = flat[: flat.numel() // _RUNS * _RUNS].view(_RUNS, -1)[:, :_RUN]
    if flat.is_cuda and flat.element_size() not in (2, 4):
        flat = flat.contiguous().view(torch.int32) if flat.element_size() > 4 else flat.to(torch.int32)
    return flat


def _as_it_lies(tensor: Tensor) -> Tensor:
    """All numbers of ``tensor`` in the order of its memory, without a copy where there are no gaps."""
    if tensor.numel() == sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1:
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _dtype(name: Optional[str]) -> torch.dtype:
    if name is None:
        return torch.float32  # of no numbers
    if name not in _DTYPES:
        raise _native.CheckpointError(f"numbers of type {name}, which this version of poseidon.torch does not know")
    return _DTYPES[name]
