"""Tensors on a GPU, as the native module takes them."""

from typing import Tuple

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> Tuple[int, int, object, int]:
    """A contiguous tensor on a GPU: where it is, how long, what keeps it, and on which one."""
    return tensor.data_ptr(), tensor.numel(), tensor, tensor.device.index


def stream_of(device: torch.device) -> "torch.cuda.Stream":
    """The stream that the program computes on now."""
    return torch.cuda.current_stream(device)


class Beside:
    """A stream of ours for each GPU: what is computed there runs beside the program's own work."""

    _streams: "dict[torch.device, torch.cuda.Stream]" = {}

    @classmethod
    def stream(cls, device: torch.device) -> "torch.cuda.Stream":
        if device not in cls._streams:
            cls._streams[device] = torch.cuda.Stream(device)
        return cls._streams[device]
