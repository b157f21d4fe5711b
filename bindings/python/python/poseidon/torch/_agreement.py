"""Whether all workers have described the same."""

import hashlib
import json
from typing import Any, Dict, Iterable, List, Tuple

from torch import Tensor, nn

from poseidon import _native
from poseidon.torch._job import Job

# As many differences as a person reads.
_MOST_WORDS = 5


def describe(
    parameters: Iterable[Tuple[str, nn.Parameter]], buffers: Iterable[Tuple[str, Tensor]], settings: Dict[str, Any]
) -> Dict[str, str]:
    """What of a model has to be the same on all workers."""
    description = {}
    for name, p in parameters:
        description[f"parameter '{name}'"] = f"{_kind(p)}, {'trained' if p.requires_grad else 'frozen'}"
    for name, buffer in buffers:
        if buffer.numel() > 0:
            description[f"buffer '{name}'"] = _kind(buffer)
    description.update((name, str(value)) for name, value in settings.items())
    return description


def check_same(what: str, mine: Dict[str, str]) -> None:
    """Raises on every worker, in the same words, if the workers' descriptions of ``what`` differ. Every worker calls it."""
    text = json.dumps(mine)
    # Descriptions may be long, and hardly ever differ: digests go first.
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if len(set(Job.get().gather(what, json.dumps(digest)))) == 1:
        return
    everybodys = [json.loads(theirs) for theirs in Job.get().gather(f"{what}, in full", text)]
    words = _differences(everybodys)
    more = f", and {len(words) - _MOST_WORDS} more" if len(words) > _MOST_WORDS else ""
    raise _native.ModelMismatchError(f"{what} is not the same on all workers: {'; '.join(words[:_MOST_WORDS])}{more}")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"


def _differences(everybodys: List[Dict[str, str]]) -> List[str]:
    """Where each worker differs from worker 0."""
    first = everybodys[0]
    words = []
    for rank, theirs in enumerate(everybodys):
        different = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
        words += [
            f"{key} is {first.get(key, 'missing')} on worker 0 and {theirs.get(key, 'missing')} on worker {rank}"
            for key in different
        ]
        if not different and list(theirs) != list(first):
            words.append(f"worker {rank} has the same as worker 0 in another order")
    return words
