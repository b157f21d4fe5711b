"""What torch's tensors, types and reductions are to a `poseidon._native.Group`."""

import itertools

import torch
import torch.distributed as dist

from poseidon._numbers import BYTES, DTYPES, MEAN, SUM

COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

# The numbers of poseidon_core::ReduceOp.
OPS = {
    dist.ReduceOp.SUM: SUM,
    dist.ReduceOp.AVG: MEAN,
    dist.ReduceOp.PRODUCT: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.MAX: 4,
    dist.ReduceOp.BAND: 5,
    dist.ReduceOp.BOR: 6,
    dist.ReduceOp.BXOR: 7,
}
# Their stubs do not say that they are numbers.
NAMES = {int(op): name for name, op in dist.ReduceOp.RedOpType.__members__.items()}  # type: ignore[call-overload]
NUMBERS = {int(op): number for op, number in OPS.items()}  # type: ignore[call-overload]


class Lent:
    """Tensors of one operation: what keeps them alive, and copies of those whose memory is not what they are."""

    def __init__(self, read=(), written=()):
        self.tensors = {}
        self.copies = []
        devices = {tensor.device for tensor in itertools.chain(read, written)}
        if len(devices) > 1:
            raise ValueError(f"tensors of one operation must be on one device, got {_listed(devices)}")
        device = devices.pop() if devices else torch.device("cpu")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"backend poseidon moves tensors of the CPU and of CUDA, got one on {device}")
        # The GPU they are on, if they are on one.
        self.gpu = device if device.type == "cuda" else None
        for tensor in itertools.chain(read, written):
            if tensor.is_sparse:
                raise ValueError("backend poseidon takes sparse tensors in all_reduce only")
        for tensor in written:
            if not _is_plain(tensor) and id(tensor) not in self.tensors:
                dense = _plain(tensor)
                self.copies.append((tensor, dense))
                self.tensors[id(tensor)] = dense
        for tensor in itertools.chain(read, written):
            if id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = tensor if _is_plain(tensor) else _plain(tensor)
        # Ids are only unique among those alive.
        self.given = (list(read), list(written))

    def specs(self, tensors, op=None):
        """Address, elements, type of each; `op` tells what is computed with them."""
        return [_spec(self.tensors[id(tensor)], op) for tensor in tensors]

    def bytes(self, tensors):
        dense = (self.tensors[id(tensor)] for tensor in tensors)
        return [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), BYTES) for tensor in dense]

    def parts(self, tensor, size, op=None):
        """The specs of `size` equal parts."""
        address, count, dtype = _spec(self.tensors[id(tensor)], op)
        width = tensor.numel() * tensor.element_size() // size
        return [(address + rank * width, count // size, dtype) for rank in range(size)]

    def split(self, tensor, splits, size, what):
        """The specs, in bytes, of parts of `splits` rows, or of equal parts."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(f"all_to_all of an {what} of {rows} rows among {size} ranks: give it split sizes")
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise RuntimeError(f"all_to_all: {what} of {rows} rows among {size} ranks does not split into {splits}")
        row = tensor.numel() * tensor.element_size() // rows if rows else 0
        starts = itertools.accumulate(splits, initial=0)
        address = self.tensors[id(tensor)].data_ptr()
        return [(address + start * row, count * row, BYTES) for start, count in zip(starts, splits)]

    def give_back(self):
        with torch.no_grad():
            for tensor, dense in self.copies:
                tensor.detach().copy_(dense)


def _listed(devices):
    return " and ".join(sorted(map(str, devices)))


def _is_plain(tensor):
    """Whether its memory holds its elements, in order: a view may be strided, conjugate or negative."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _spec(tensor, op):
    dtype, count = tensor.dtype, tensor.numel()
    if dtype in COMPLEX:
        if op not in (None, SUM, MEAN):
            raise ValueError(f"all reductions of {dtype} but SUM and AVG are undefined")
        dtype, count = COMPLEX[dtype], 2 * count
    number = DTYPES.get(dtype)
    if number is None:
        if op is not None:
            raise ValueError(f"backend poseidon does not compute with {dtype}")
        number, count = BYTES, count * tensor.element_size()
    return (tensor.data_ptr(), count, number)


def number_of(op):
    """The number of a torch operation."""
    number = NUMBERS.get(int(getattr(op, "op", op)))
    if number is None:
        raise ValueError(f"backend poseidon does not support ReduceOp.{NAMES.get(int(getattr(op, 'op', op)), op)}")
    return number
