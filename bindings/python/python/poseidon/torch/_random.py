"""The states of random generators: those of torch, on the CPU and on GPUs, of Python, and of numpy if it is there."""

import io
import random
import sys
from typing import Any, Dict

import torch


def take() -> bytes:
    """The states that this process's generators have now, as a file of torch.save's."""
    states: Dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def put_back(content: bytes) -> None:
    """The generators go on from the states that :func:`take` has returned. GPUs that are not here are left out."""
    states: Dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    for device, state in enumerate(states.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        # It was in use, so it will be.
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
