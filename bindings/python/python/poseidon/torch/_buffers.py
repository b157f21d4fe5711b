"""What all workers take from one of them: buffers before a forward, a whole model after ``join``."""

from typing import Optional, Sequence

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
        tensors = [t for t in (*others, *self._module.buffers()) if t.numel() > 0]
        if not tensors or world_size() == 1:
            return
        if self._group is None:
            self._group = Job.group()
        sizes = [t.numel() * t.element_size() for t in tensors]
        is_root = rank() == root
        raw = torch.cat([_bytes(t) for t in tensors]) if is_root else torch.empty(sum(sizes), dtype=torch.uint8)
        memory = (raw.data_ptr(), raw.numel(), _BYTES)
        self._await_sent()
        work = self._group.begin("broadcast", [memory], [], raw, Job.get().timeout, not is_root, root=root)
        if is_root:
            self._sent = work
            return
        work.wait()
        for tensor, part in zip(tensors, raw.split(sizes)):
            value = part.clone().view(tensor.dtype).view(tensor.shape)
            # A graph made by an earlier forward may hold the tensor, and its backward is still to come: torch, too,
            # does not count this as a change.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)

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

    def _await_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
