"""Checkpoints of a model and its optimizer, the shards' state included, in Poseidon's format."""

import hashlib
import io
import json
import os
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon.torch._job import Job, rank, world_size
from poseidon.torch._parallel import DistributedDataParallel

# The layer of what is no tensor of the model and no vector of the optimizer: a file of torch.save's.
_REST = "(torch.save)"
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


def save(
    place: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    *,
    step: Optional[int] = None,
    keep: Optional[int] = None,
    **notes: Any,
) -> None:
    """Writes a checkpoint of ``model``, ``optimizer`` and ``notes`` to ``place``. Every worker calls it.

    ``place`` is a folder that all workers can write to, or ``s3://bucket/prefix``. ``step`` is how many steps the
    job has taken. The checkpoint is ``PLACE/step-…``: every worker writes its part, and rank 0 the manifest when all
    parts are there. Without a manifest it does not exist.

    Buffers and notes are rank 0's. Notes are what ``torch.load(weights_only=True)`` accepts: numbers, texts, tensors,
    and lists, tuples and dictionaries of them. ``keep`` is how many checkpoints stay in ``place``, this one among them.

    If a worker cannot write, every worker gets an error, and older checkpoints are as they were.
    """
    if step is None:
        raise TypeError("psd.save needs step=...: how many steps the job has taken, which names the checkpoint")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected 1 or more checkpoints to stay")
    place = os.fspath(place)

    def own_step() -> int:
        model._staleness.check_together("psd.save")
        return step

    steps = _together("saves at step", own_step)
    if len(set(steps)) > 1:
        raise _native.CheckpointError(f"workers save different steps: {', '.join(map(str, steps))}, by rank")
    contents = _Contents(model, optimizer, step)
    numbers = _together("reads what it saves", contents.prepare if rank() == 0 else contents.digest, notes)
    # Workers whose numbers differ, such as those that left a `join` early, leave it to rank 0.
    shared = len(set(numbers)) == 1
    try:
        parts = _together("writes its part", _write_part, place, step, contents.share(shared))
        _together("writes the manifest", _commit, place, contents, parts, keep)
    except _native.CheckpointError:
        if rank() == 0:
            _native.discard(place, step)
        raise


def load(
    place: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    *,
    step: Optional[int] = None,
) -> Dict[str, Any]:
    """Puts ``model`` and ``optimizer`` where the newest checkpoint of ``place``, or that of ``step``, has them.

    Returns the notes, and the checkpoint's step as ``"step"``. Every worker calls it, and must be able to read the
    place. The number of workers need not be that of the run which saved it.

    A checkpoint that is damaged, or of another model or optimizer, is an error on every worker, and nothing changes.
    """
    place = os.fspath(place)

    def choose() -> Optional[int]:
        model._staleness.check_together("psd.load")
        # One worker chooses: the newest one may change meanwhile.
        return _choose(place, step) if rank() == 0 else None

    chosen = _together("looks for a checkpoint", choose)[0]
    found: Dict[str, Any] = {}
    _together("reads a checkpoint", lambda: found.update(_read(place, chosen, model, optimizer)))
    if optimizer is None and model._rule is not None:
        model._rule.keep()
    # What is still on its way must not land on what is loaded.
    model._restart()
    model.module.load_state_dict(found["model"])
    if optimizer is not None:
        optimizer.load_state_dict(found["optimizer"])
    return dict(found["notes"], step=chosen)


class _Numbers(NamedTuple):
    """Numbers that become pieces of a layer."""

    layer: str
    what: str
    tensor: Tensor

    def piece(self, first: int, last: int) -> "_native.PieceSpec":
        flat = self.tensor.detach().reshape(-1)[first:last].cpu().contiguous()
        return self.layer, self.what, first, _TYPES[flat.dtype], (flat.data_ptr(), _size(flat), flat)


class _Contents:
    """What a checkpoint consists of, as this worker has it."""

    def __init__(self, model: DistributedDataParallel, optimizer: Optional[torch.optim.Optimizer], step: int):
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
            # Every worker: shards tell each other what they have.
            self.rest["optimizer"] = self._take_vectors(model, optimizer)

    def digest(self, *_: Any) -> str:
        """Differs if the common numbers do."""
        facts = []
        for numbers in self.common:
            flat = numbers.piece(0, numbers.tensor.numel())[4]
            facts.append((numbers.layer, numbers.what, str(numbers.tensor.dtype), _native.checksum(*flat)))
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def prepare(self, notes: Dict[str, Any]) -> str:
        """Rank 0 adds what only it writes. Returns the digest."""
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
        self.own.append(_Numbers(_REST, "parameters", torch.frombuffer(bytearray(content), dtype=torch.uint8)))
        # For people: `load` reads them from the rest.
        self.program["notes"] = {name: value for name, value in notes.items() if _is_short(value)}
        return self.digest()

    def share(self, shared: bool) -> "List[_native.PieceSpec]":
        """What this worker writes: as many bytes as the others of what all have, if that is ``shared``."""
        pieces = [n.piece(0, n.tensor.numel()) for n in self.own] if rank() == 0 else []
        workers, mine = (world_size(), rank()) if shared else (1, rank())
        total = sum(_size(numbers.tensor) for numbers in self.common)
        begin, end = total * mine // workers, total * (mine + 1) // workers
        offset = 0
        for numbers in self.common:
            width, size = numbers.tensor.element_size(), _size(numbers.tensor)
            first, last = (-(-min(max(at - offset, 0), size) // width) for at in (begin, end))
            if first < last:
                pieces.append(numbers.piece(first, last))
            offset += size
        return pieces

    def _take_vectors(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
        """The optimizer's state without what is as large as its parameter, which becomes the layer's."""
        state = optimizer.state_dict()
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
                into.extend(_Numbers(name, f"state.{i}", entry.pop(key)) for i, key in enumerate(vectors))
        return state

    def _add(self, name: str, shape: List[int], elements: int, **facts: Any) -> None:
        tensors = [{"name": name, "shape": shape}]
        self.layers[name] = {
            "name": name, "len": elements, "rule": "none", "steps": 0, "vectors": 0, "tensors": tensors, **facts
        }  # fmt: skip


def _write_part(place: str, step: int, pieces: "List[_native.PieceSpec]") -> Optional[str]:
    return _native.write_part(place, step, rank(), pieces) if any(piece[4][1] for piece in pieces) else None


def _commit(place: str, contents: _Contents, parts: List[Optional[str]], keep: Optional[int]) -> None:
    if rank() != 0:
        return
    layers, program = json.dumps(list(contents.layers.values())), json.dumps({"torch": contents.program})
    written = [part for part in parts if part is not None]
    warning = _native.commit(place, contents.step, world_size(), layers, written, program, keep)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)


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


def _read(
    place: str, step: int, model: DistributedDataParallel, optimizer: Optional[torch.optim.Optimizer]
) -> Dict[str, Any]:
    """The states and the notes. Refuses those that are not of this model and this optimizer."""
    checkpoint = _native.Checkpoint(place, step)
    where = f"the checkpoint of step {step} in {place}"
    program, layers = json.loads(checkpoint.program()), json.loads(checkpoint.layers())
    if not isinstance(program, dict) or "torch" not in program:
        raise _native.CheckpointError(
            f"{where} was not written by psd.save: 'poseidon checkpoint export' makes a file of it that torch can load"
        )
    shapes = {layer["name"]: layer["tensors"][0]["shape"] for layer in layers}
    content = io.BytesIO(checkpoint.read(_REST, "parameters")[1])
    rest: Dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    saved = {name: shape for name, shape in shapes.items() if name != _REST}
    _check_model(where, dict.fromkeys(rest["model"], None) | saved, model.module)
    for name, shape in saved.items():
        rest["model"][name] = _tensor(*checkpoint.read(name, "parameters")).view(shape)
    if optimizer is None:
        return rest
    _check_optimizer(where, program["torch"]["optimizer"], rest, optimizer)
    for name, facts in program["torch"]["state"].items():
        entry = rest["optimizer"]["state"].setdefault(facts["index"], {})
        for position, vector in enumerate(facts["vectors"]):
            entry[vector] = _tensor(*checkpoint.read(name, f"state.{position}")).view(shapes[name])
    return rest


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


def _together(purpose: str, work: Callable[..., Any], *arguments: Any) -> List[Any]:
    """What ``work`` has returned on each worker. If it fails on one of them, all of them get an error."""
    failure: Optional[Exception] = None
    word: Tuple[str, Any]
    try:
        word = "done", work(*arguments)
    except Exception as error:
        failure, word = error, ("failed", str(error))
    Job.checkpoints += 1
    words = [json.loads(w) for w in Job.get().gather(f"checkpoint {Job.checkpoints}: {purpose}", json.dumps(word))]
    if isinstance(failure, _native.CheckpointError):
        raise failure
    if failure is not None:
        raise _native.CheckpointError(f"worker {rank()} {purpose}: {failure}") from failure
    for worker, (outcome, value) in enumerate(words):
        if outcome == "failed":
            raise _native.CheckpointError(f"worker {worker} {purpose}: {value}")
    return [value for _, value in words]


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


def _tensor(dtype: str, content: bytearray) -> Tensor:
    if dtype not in _DTYPES:
        raise _native.CheckpointError(f"numbers of type {dtype}, which this version of poseidon.torch does not know")
    # No memory is not a buffer.
    return torch.frombuffer(content, dtype=_DTYPES[dtype]) if content else torch.empty(0, dtype=_DTYPES[dtype])
