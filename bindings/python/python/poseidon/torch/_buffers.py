"""What all workers take from one of them: buffers before a forward, a whole model after ``join``."""

from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from poseidon import _native
from poseidon._numbers import BYTES
from poseidon.torch._device import stream_of
from poseidon.torch._job import LINGER, Job, rank, world_size


class Buffers:
    """The buffers of a module, shared when torch's DistributedDataParallel does it.

    That is before the first forward that follows one of a synchronised step, be it of the next step or an evaluation:
    all workers do it equally often if they take equally many steps, however often each of them evaluates.
    """

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()):
        self._module = module
        # Names of buffers that every worker keeps for itself.
        self._ignored = set(ignored)
        self._flat: Optional[_Flat] = None
        # Whether the next forward shares them.
        self.is_due = True
        self._group: Optional[_native.Group] = None
        # What was sent last. Whoever sends does not wait: it may be evaluating while the others wait for it.
        self._sent: Optional[_native.Work] = None

    def begin_forward(self, synchronises: bool) -> None:
        """A forward begins, which a synchronised backward will follow or not."""
        if self.is_due:
            self.share(0)
        self.is_due = synchronises

    def share(self, root: int, others: Sequence[Tensor] = ()) -> None:
        """Buffers, and ``others``, become those of worker ``root``, bit by bit, whatever their type and size."""
        self.is_due = False
        if world_size() == 1:
            return  # before all modules are searched for buffers, in every step
        tensors = self._tensors(others)
        if not tensors:
            return
        if self._group is None:
            self._group = Job.group("a model's buffers")
        is_root = rank() == root
        self._await_sent()
        flat = self._flat
        if flat is None or not flat.fits(tensors):
            flat = _Flat(tensors)
        # A whole model goes once, and needs no memory afterwards.
        self._flat = None if others else flat
        raw = flat.raw
        if is_root:
            flat.take(tensors)
        memory, timeout = (raw.data_ptr(), raw.numel(), BYTES), Job.get().timeout
        if raw.is_cuda:
            stream = stream_of(raw.device).cuda_stream
            place = (raw.device.index, stream)
            work = self._group.begin_on_device("broadcast", [memory], [], raw, timeout, *place, root=root)
        else:
            work = self._group.begin("broadcast", [memory], [], raw, timeout, not is_root, root=root)
        if is_root:
            self._sent = work
            return
        self._wait(work)
        if raw.is_cuda:
            work.make_wait(stream)
        # A graph made by an earlier forward may hold a tensor, and its backward is still to come: torch, too, does
        # not count this as a change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            flat.give(tensors)

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
        self._group.leave(LINGER)
        self._group = None

    def _tensors(self, others: Sequence[Tensor]) -> List[Tensor]:
        """``others`` and all buffers, each once."""
        if self._ignored:
            named = self._module.named_buffers()
            kept = {id(t): t for t in (*others, *(b for name, b in named if name not in self._ignored))}
            return [t.detach() for t in kept.values() if t.numel() > 0]
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
            self._wait(sent)

    @staticmethod
    def _wait(work: _native.Work) -> None:
        work.wait(session=Job.get(), what="a model's buffers")


class _Flat:
    """Memory for the bits of some tensors, one after the other."""

    # Made in an evaluation, it serves the training that follows.
    @torch.inference_mode(False)
    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = [(t.dtype, t.shape, t.device) for t in tensors]
        # On the GPU if all of them are: it gathers them faster than it hands them over one by one.
        devices = {t.device for t in tensors}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self.raw = torch.zeros(sum(t.numel() * t.element_size() for t in tensors), dtype=torch.uint8, device=device)
        self.parts = list(tensors)
        rest = self.raw
        # Large elements first: all begin where their type may, without gaps that would hide a difference in size.
        for i in sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size()):
            tensor = tensors[i]
            piece, rest = rest.tensor_split([tensor.numel() * tensor.element_size()])
            self.parts[i] = piece.view(tensor.dtype).view(tensor.shape)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        return self._kinds == [(t.dtype, t.shape, t.device) for t in tensors]

    def take(self, tensors: Sequence[Tensor]) -> None:
        for mine, theirs in self._by_type(tensors):
            torch._foreach_copy_(mine, theirs)

    def give(self, tensors: Sequence[Tensor]) -> None:
        for mine, theirs in self._by_type(tensors):
            torch._foreach_copy_(theirs, mine)

    def _by_type(self, tensors: Sequence[Tensor]) -> List[Tuple[List[Tensor], List[Tensor]]]:
        """The parts and ``tensors``, by type: a GPU copies those of one type together."""
        types: Dict[torch.dtype, Tuple[List[Tensor], List[Tensor]]] = {}
        for part, tensor in zip(self.parts, tensors):
            mine, theirs = types.setdefault(tensor.dtype, ([], []))
            mine.append(part)
            theirs.append(tensor)
        return list(types.values())
