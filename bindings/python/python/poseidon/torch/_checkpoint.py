"""Checkpoints of a model and its optimizer, the shards' state included."""

import os
from typing import Any, Dict, Optional

import torch

from poseidon.torch._job import barrier, rank
from poseidon.torch._parallel import DistributedDataParallel

# The version of the files that `save` writes and `load` reads.
VERSION = 1


def save(
    path: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    **extra: Any,
) -> None:
    """Writes ``model``, ``optimizer`` and whatever else to ``path``. Every worker calls it.

    Rank 0 writes one file, which ``torch.load`` can read: ``{"model": …, "optimizer": …, **extra}`` with
    ``state_dict``s as torch's own, and the file's version as ``"poseidon"``. The file is complete or not there: it
    is written beside and renamed.
    """
    for name in ("model", "optimizer", "poseidon"):
        if name in extra:
            raise ValueError(f"'{name}' is taken: pass it by position")
    content: Dict[str, Any] = dict(extra, poseidon=VERSION, model=model.module.state_dict())
    if optimizer is not None:
        content["optimizer"] = optimizer.state_dict()
    if rank() == 0:
        path = os.fspath(path)
        beside = f"{path}.part"
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    barrier()


def load(
    path: "os.PathLike[str] | str",
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    map_location: Any = "cpu",
) -> Dict[str, Any]:
    """Puts ``model`` and ``optimizer`` where ``path`` has them and returns the rest of it.

    Every worker calls it, and must be able to read the file. The number of workers need not be that of the run
    which saved it.
    """
    content = torch.load(path, map_location=map_location, weights_only=True)
    # Files of torch's own, and of the first version, do not say.
    version = content.pop("poseidon", VERSION)
    if version != VERSION:
        raise ValueError(
            f"{os.fspath(path)} is a checkpoint of version {version}, this build of poseidon reads version {VERSION}"
        )
    missing = [name for name in ("model", "optimizer") if name not in content]
    if "model" in missing or (optimizer is not None and missing):
        raise ValueError(f"{os.fspath(path)} is no checkpoint of this kind: it has no {' and no '.join(missing)}")
    if optimizer is None and model._rule is not None:
        model._rule.keep()
    # What is still on its way must not land on what is loaded.
    model._restart()
    model.module.load_state_dict(content.pop("model"))
    if optimizer is not None:
        optimizer.load_state_dict(content.pop("optimizer"))
    content.pop("optimizer", None)
    return content
