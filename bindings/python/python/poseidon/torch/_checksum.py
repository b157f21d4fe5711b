"""Whether values are still what they were."""

from typing import Iterable, List, Optional, Sequence

import torch
from torch import Tensor

from poseidon import _native


def checksum(gradients: Iterable[Optional[Tensor]]) -> int:
    """Changes whenever the values of any of ``gradients`` do; 0 if there are none.

    torch counts changes, but not those through ``.data`` and ``.numpy()``: only the values tell.
    """
    return checksums([list(gradients)])[0]


def checksums(several: Sequence[Sequence[Optional[Tensor]]]) -> List[int]:
    """The checksum of each of ``several``. Those on a GPU are made there, and all of them are awaited at once."""
    dense = [[_plain(gradient) for gradient in gradients] for gradients in several]
    remote = [values for gradients in dense for values in gradients if values is not None and values.device.type != "cpu"]
    if remote:
        sums = [_sums_of_bits(values) for values in remote]
        here = torch.cat([part.to(sums[0].device) for part in sums]).cpu()
        fetched = iter(here.split([part.numel() for part in sums]))
        dense = [[v if v is None or v.device.type == "cpu" else next(fetched) for v in gradients] for gradients in dense]
    return [_together([0 if values is None else _checksum(values) for values in gradients]) for gradients in dense]


class Trace:
    """Whether gradients are still as they were left.

    On a GPU nobody waits for the answer until it is needed: what is seen on the way is noted there.
    """

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "cpu"
        self._left = 0
        self._sums: List[Optional[Tensor]] = []
        # On a GPU: what each look has seen, a flag for each gradient. `awaited` tells what they are.
        self.changes: List[Tensor] = []

    def begin(self) -> None:
        """Forgets what was seen."""
        self.changes = []

    def leave(self, gradients: Sequence[Optional[Tensor]]) -> None:
        """These are the values to compare with."""
        if self._waits:
            self._left = checksum(gradients)
        else:
            self._sums = _sums(gradients)

    def look(self, gradients: Sequence[Optional[Tensor]]) -> bool:
        """Whether they have changed, as far as that is known without waiting."""
        if self._waits:
            return checksum(gradients) != self._left
        now = _sums(gradients)
        pairs = list(zip(self._sums, now))
        if any((a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape) for a, b in pairs):
            return True
        self.changes += [(a != b).any() for a, b in pairs if a is not None and b is not None]
        return False


def digests(several: Sequence[Tensor]) -> Tensor:
    """A number for each of ``several``, which are on one device, by its values and their order. Nobody waits for a device.

    Numbers of different devices are made differently, and do not compare.
    """
    plain = [tensor.detach().contiguous() for tensor in several]
    if plain[0].device.type == "cpu":
        return torch.tensor([_checksum(values) - 2**63 for values in plain], dtype=torch.int64, device="cpu")
    # All of them at once: a GPU takes longer to begin than to end with so few numbers.
    bits = [_bits(values.reshape(-1)).to(torch.int32) for values in plain]
    mixed = _mixed(torch.cat(bits), _places(sum(part.numel() for part in bits), plain[0].device))
    return torch.stack([part.sum(dtype=torch.int64) for part in mixed.split([part.numel() for part in bits])])


def awaited(several: Sequence[Sequence[Tensor]]) -> List[bool]:
    """For each of ``several``, whether one of its flags is set. Waits once for a GPU to tell, for all of them."""
    flags = [flag for some in several for flag in some]
    told = iter(torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else ())
    return [any([next(told) for _ in some]) for some in several]


def _plain(gradient: Optional[Tensor]) -> Optional[Tensor]:
    if gradient is None:
        return None
    if gradient.layout != torch.strided:
        raise TypeError("a gradient of a Linear layer is sparse: expected a dense one")
    return gradient.detach().contiguous()


def _together(sums: Sequence[int]) -> int:
    # The order counts. 0 is kept for no gradients at all.
    return hash((1, *sums)) & (2**64 - 1) if any(sums) else 0


def _checksum(values: Tensor) -> int:
    return _native.checksum(values.data_ptr(), values.numel() * values.element_size(), values)


def _sums(gradients: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
    plain = [_plain(gradient) for gradient in gradients]
    return [None if values is None else _sums_of_bits(values) for values in plain]


def _sums_of_bits(values: Tensor) -> Tensor:
    """A sum for each row, made where the values are: only a few numbers leave a device.

    Each number counts by its place in the row, and its bits are mixed before: neither values that change places nor as
    many signs that turn one way as the other leave a sum as it was.
    """
    bits = _bits(values)
    # Of a vector, each number is a row.
    rows = bits.unsqueeze(-1) if bits.dim() < 2 else bits.flatten(0, -2)
    places = _places(rows.shape[1], rows.device)
    sums = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    block = max(_BLOCK // max(rows.shape[1], 1), 1)
    for some, their_sums in zip(rows.split(block), sums.split(block)):
        torch.sum(_mixed(some.to(torch.int32, copy=True), places), -1, dtype=torch.int64, out=their_sums)
    return sums


def _bits(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int32}[values.element_size()])


def _places(count: int, device: torch.device) -> Tensor:
    # Products wrap around, as all integers of torch's do. Those with odd numbers lose nothing.
    return torch.arange(1, 2 * count + 1, 2, dtype=torch.int32, device=device) * _ODD


def _mixed(bits: Tensor, places: Tensor) -> Tensor:
    """``bits``, each with its neighbours and its place mixed in. They are overwritten."""
    bits ^= _shifted(bits, 15)
    bits *= places
    bits ^= _shifted(bits, 13)
    return bits


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: torch puts the sign there, so that a number and its complement would meet."""
    return (bits >> by).bitwise_and_(2 ** (32 - by) - 1)


# 2**32 over the golden ratio, as int32: a product with it depends on every lower bit of the other factor.
_ODD = 0x9E3779B1 - 2**32
# Numbers that are mixed at once. It takes two temporaries of 16 MiB, and a GPU is busy with so many for longer than a
# thread is with the next ones.
_BLOCK = 1 << 22
