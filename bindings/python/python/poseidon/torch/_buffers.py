"""What all workers take from one of them: buffers before a forward, a whole model after ``join``."""

from typing import List, Optional, Sequence

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon.torch._job import Job, rank, world_size

# How a group's native part calls memory without a type.
_BYTES = 0
# Seconds for last words; those they are for may be gone.
_LINGER = 5.0


class Buffers:
    """The buffers of a module, shared when torch's DistributedDataParallel does it.

    That is before the first forward that follows one of a synchronised step, be it of the next step or an evaluation:
    all workers do it equally often if they take equally many steps, however often each of them evaluates.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._flat: Optional[_Flat] = None
        self._is_due = True
        self._group: Optional[_native.Group] = None
        # What was sent last. Whoever sends does not wait: it may be evaluating while the others wait for it.
        self._sent: Optional[_native.Work] = None

    def begin_forward(self, synchronises: bool) -> None:
        """A forward begins, which a synchronised backward will follow or not."""
        if self._is_due:
            self.share(0)
        self._is_due = synchronises

    def share(self, root: int, others: Sequence[Tensor] = ()) -> None:
        """Buffers, and ``others``, become those of worker ``root``, bit by bit, whatever their type and size."""
        self._is_due = False
        tensors = self._tensors(others)
        if not tensors or world_size() == 1:
            return
        if self._group is None:
            self._group = Job.group()
        is_root = rank() == root
        self._await_sent()
        flat = self._flat
        if flat is None or not flat.fits(tensors):
            flat = _Flat(tensors)
        # A whole model goes once, and needs no memory afterwards.
        self._flat = None if others else flat
        raw = flat.raw
        if is_root:
            torch._foreach_copy_(flat.parts, tensors)
        memory = (raw.data_ptr(), raw.numel(), _BYTES)
        work = self._group.begin("broadcast", [memory], [], raw, Job.get().timeout, not is_root, root=root)
        if is_root:
            self._sent = work
            return
        work.wait()
        # A graph made by an earlier forward may hold a tensor, and its backward is still to come: torch, too, does
        # not count this as a change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            torch._foreach_copy_(tensors, flat.parts)

    def close(self, because: Optional[str] = None) -> None:
        """Without a reason, after every other goodbye."""
        if self._group is None:
            return
        try:
            if because is not None:
                self._group.abort(because)
            else:
                # Another worker may be evaluating, which takes all of them.
                self.begin_forward(synchronises=False)
                self._await_sent()
        except _native.PoseidonError:
            pass  # they have left: nobody needs it
        self._group.leave(_LINGER)
        self._group = None

    def _tensors(self, others: Sequence[Tensor]) -> List[Tensor]:
        """``others`` and all buffers, each once."""
        # All modules there are now. torch's own walk takes as long as to send their buffers.
        modules = [self._module]
        for module in modules:
            modules.extend(child for child in module._modules.values() if child is not None)
        buffers = (b for m in modules if m._buffers for b in m._buffers.values() if b is not None)
        found = {id(t): t for t in (*others, *buffers)}
        return [t.detach() for t in found.values() if t.numel() > 0]

    def _await_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait()


class _Flat:
    """Memory for the bits of some tensors, one after the other."""

    # Made in an evaluation, it serves the training that follows.
    @torch.inference_mode(False)
    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = [(t.dtype, t.shape) for t in tensors]
        self.raw = torch.zeros(sum(t.numel() * t.element_size() for t in tensors), dtype=torch.uint8, device="cpu")
        self.parts = list(tensors)
        rest = self.raw
        # Large elements first: all begin where their type may, without gaps that would hide a difference in size.
        for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size()):
            tensor = tensors[i]
            piece, rest = rest.tensor_split([tensor.numel() * tensor.element_size()])
            self.parts[i] = piece.view(tensor.dtype).view(tensor.shape)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return self._kinds == [(t.dtype, t.shape) for t in tensors]
