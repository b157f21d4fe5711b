"""``torch.distributed.init_process_group("poseidon")``: process groups on Poseidon's own links.

A process group is a `poseidon._native.Group`. The first one of a process makes links: rank 0 waits for the others at
an address it leaves in the c10d store, together with a fresh secret. Later groups among the same processes share
those links. Tensors are lent to the group in place; only those that are not contiguous are copied. Tensors on a GPU
pass through pinned host memory; whoever waits for an operation on them has its stream wait, not its thread: the thread
waits for the network alone.

Two classes share one implementation. `ProcessGroup` is what programs hold: Python calls reach it directly, and get
`Work` objects that are Python's own. `Backend` is what C++ reaches through the dispatcher, such as functional
collectives.
"""

import atexit
import itertools
import threading
import time
import weakref
from typing import Any, Set

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from poseidon import _native
from poseidon._c10d_rendezvous import rendezvous
from poseidon._c10d_tensors import Lent, number_of
from poseidon._numbers import SUM

# How long a process that leaves a group waits for its connections to close.
LEAVE = 2.0
# How many threads that settle futures a group keeps when they have nothing to do: one, and another for the next
# future while that one is busy.
IDLE = 2

# What torch calls a group with a single backend that is not its own.
CUSTOM = "custom"

_groups: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Those of groups that have other backends too, until they are left: C++ does not keep the Python side of a backend
# alive.
_shared: Set[Any] = set()


def create(options):
    """The process group for what torch asks for."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    operations = _Operations(options.store, options.group_rank, ranks, options.timeout)
    # Older torch (2.11, for one) does not say: a backend cannot know then that it is one of several.
    whole = getattr(options, "process_group", None)
    if whole is not None and whole.name() != CUSTOM:
        # One backend of several, as in cpu:poseidon,cuda:nccl: torch's own group has them all.
        try:
            operations.backend = Backend(options.group_rank, options.group_size, operations)
        except TypeError as error:
            raise RuntimeError("this version of torch cannot have backend poseidon beside others") from error
        _shared.add(operations)
        return operations.backend
    return ProcessGroup(options.store, options.group_rank, options.group_size, operations)


@atexit.register
def _leave_all():
    # While Python still runs: the groups' threads must not find it gone.
    for operations in list(_groups):
        operations.leave()


class Work(c10d.Work):
    """An operation under way: one or several of the group's, and what has to be done when they are."""

    def __init__(self, operations, parts, tensors, after=None, gpu=None):
        super().__init__()
        self._operations = operations
        self._parts = parts
        self._tensors = tensors
        # What is still to be done, and where on a GPU it was done: results are there behind that.
        self._after = after
        self._concluded = None
        # The GPU its tensors are on, if they are on one.
        self._gpu = gpu
        self._lock = threading.Lock()
        self._future = None

    def wait(self, timeout=None):
        limit = timeout.total_seconds() if timeout else None
        for part in self._parts:
            if not part.wait(limit):
                raise _native.TimeoutError(f"not done within {limit} s; it goes on")
        self._conclude()
        return True

    def _make_stream_wait(self):
        """What is on a GPU is used by streams: the current one waits until results are there."""
        if self._gpu is not None:
            stream = torch.cuda.current_stream(self._gpu).cuda_stream
            for part in self._parts:
                part.make_wait(stream)

    def is_completed(self):
        if not all(part.is_done() for part in self._parts):
            return False
        if self.exception() is None:
            self._conclude()
        return True

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        failures = (part.failure() for part in self._parts if part.is_done())
        return next((failure for failure in failures if failure is not None), None)

    def source_rank(self):
        return self._parts[0].source()

    _source_rank = source_rank

    def result(self):
        return self._tensors

    def synchronize(self):
        self.wait()

    def get_future(self):
        with self._lock:
            fresh = self._future is None
            if fresh:
                devices = [] if self._gpu is None else [self._gpu]
                self._future = torch.futures.Future(devices=devices)
        if fresh:
            self._operations.follow(self)
        return self._future

    def _conclude(self):
        self._make_stream_wait()
        with self._lock:
            after, self._after = self._after, None
            if after:
                after()
                if self._gpu is not None:
                    self._concluded = torch.cuda.current_stream(self._gpu).record_event()
            elif self._concluded is not None:
                torch.cuda.current_stream(self._gpu).wait_event(self._concluded)

    def _settle(self):
        """All parts are done: whoever holds the future is told."""
        failure = self.exception()
        if failure is not None:
            self._future.set_exception(failure)
            return
        if self._gpu is None:
            self._conclude()
            self._future.set_result(self._tensors)
            return
        # Whoever waits for the future has its streams wait for this one.
        with torch.cuda.stream(torch.cuda.Stream(self._gpu)):
            self._conclude()
            self._future.set_result(self._tensors)


class _Operations:
    """The operations of one process group."""

    def __init__(self, store, rank, ranks, timeout):
        self.rank, self.size, self.ranks = rank, len(ranks), ranks
        self.timeout = timeout.total_seconds()
        self.sequence = 0
        self._group = rendezvous(store, rank, ranks, timeout, list(_groups))
        self._names = itertools.count()
        # Work whose future somebody holds, and how many of its parts are not done.
        self._followed = {}
        self._lock = threading.Lock()
        # Threads that settle futures, and how many of them have nothing to do.
        self._reporters = set()
        self._idle = 0
        _groups.add(self)

    # What is done with tensors.

    def allreduce(self, tensors, opts=None, timeout=None):
        tensors, opts = _listed(tensors), _with_op(opts, c10d.AllreduceOptions)
        op = number_of(opts.reduceOp)
        if any(tensor.is_sparse for tensor in tensors):
            return self._allreduce_sparse(tensors, opts)
        lent = Lent(written=tensors)
        begun = [self._begin("all_reduce", opts, lent, [t], [], op=op) for t in lent.specs(tensors, op)]
        return self._work(begun, tensors, lent)

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensors, opts):
        if number_of(opts.reduceOp) != SUM:
            raise ValueError("sparse tensors can only be summed")
        for tensor in tensors:
            own = tensor.coalesce()
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            self.allgather([sizes], [torch.tensor([own._nnz()], device="cpu")], opts).wait()
            indices, values = own.indices().contiguous(), own.values().contiguous()
            all_indices = [indices.new_empty((indices.shape[0], int(n))) for n in sizes]
            all_values = [values.new_empty((int(n), *values.shape[1:])) for n in sizes]
            self.allgather([all_indices], [indices], opts).wait()
            self.allgather([all_values], [values], opts).wait()
            sums = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape)
            tensor.copy_(sums.coalesce())
        return Work(self, [], tensors)

    def broadcast(self, tensors, opts=None, timeout=None):
        tensors = _listed(tensors)
        opts = _with(opts, c10d.BroadcastOptions, rootRank=opts)
        lent = Lent(written=tensors)
        begun = [self._begin("broadcast", opts, lent, [t], [], root=opts.rootRank) for t in lent.specs(tensors)]
        return self._work(begun, tensors, lent)

    def reduce(self, tensors, opts=None, op=None, timeout=None):
        tensors = _listed(tensors)
        opts = _with(opts, c10d.ReduceOptions, rootRank=opts)
        op = number_of(opts.reduceOp)
        lent = Lent(written=tensors)
        begun = [
            self._begin("reduce", opts, lent, [t], [], root=opts.rootRank, op=op) for t in lent.specs(tensors, op)
        ]
        return self._work(begun, tensors, lent)

    def allgather(self, outputs, inputs, opts=None):
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = opts or c10d.AllgatherOptions()
        flat = [tensor for row in outputs for tensor in row]
        lent = Lent(read=inputs, written=flat)
        begun = []
        for tensor, row in zip(inputs, outputs):
            _same_type(tensor, row)
            if len(row) != self.size:
                raise RuntimeError(f"all_gather: expected an output for each of {self.size} ranks, got {len(row)}")
            begun.append(self._begin("all_gather", opts, lent, lent.specs([tensor]), lent.specs(row)))
        return self._work(begun, outputs, lent)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        # One list for each rank here, one for each input there.
        return self.allgather([list(row) for row in zip(*outputs)], inputs, opts)

    def all_gather_single(self, output, tensor, opts=None):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.AllgatherOptions()
        lent = Lent(read=inputs, written=outputs)
        begun = []
        for output, tensor in zip(outputs, inputs):
            _same_type(tensor, [output])
            if output.numel() != tensor.numel() * self.size:
                raise ValueError(
                    f"all_gather of {tensor.numel()} elements on each of {self.size} ranks into {output.numel()}"
                )
            begun.append(self._begin("all_gather", opts, lent, lent.specs([tensor]), lent.parts(output, self.size)))
        return self._work(begun, outputs, lent)

    def reduce_scatter(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _with_op(opts, c10d.ReduceScatterOptions)
        op = number_of(opts.reduceOp)
        lent = Lent(read=[tensor for row in inputs for tensor in row], written=outputs)
        begun = []
        for output, row in zip(outputs, inputs):
            _same_type(output, row)
            begun.append(
                self._begin("reduce_scatter", opts, lent, lent.specs(row, op), lent.specs([output], op), op=op)
            )
        return self._work(begun, outputs, lent)

    def reduce_scatter_single(self, output, tensor, opts=None):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = _with_op(opts, c10d.ReduceScatterOptions)
        op = number_of(opts.reduceOp)
        lent = Lent(read=inputs, written=outputs)
        begun = []
        for output, tensor in zip(outputs, inputs):
            _same_type(output, [tensor])
            if tensor.numel() != output.numel() * self.size:
                raise ValueError(
                    f"reduce_scatter of {tensor.numel()} elements among {self.size} ranks into {output.numel()}"
                )
            parts = lent.parts(tensor, self.size, op)
            begun.append(self._begin("reduce_scatter", opts, lent, parts, lent.specs([output], op), op=op))
        return self._work(begun, outputs, lent)

    def gather(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _with(opts, c10d.GatherOptions, rootRank=opts)
        rows = outputs if opts.rootRank == self.rank else []
        flat = [tensor for row in rows for tensor in row]
        lent = Lent(read=inputs, written=flat)
        for tensor in inputs:
            _same_type(tensor, flat)
        begun = [
            self._begin("gather", opts, lent, lent.specs(inputs), lent.specs(flat), root=opts.rootRank),
        ]
        return self._work(begun, outputs, lent)

    def scatter(self, outputs, inputs, opts=None, timeout=None):
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _with(opts, c10d.ScatterOptions, rootRank=opts)
        flat = [tensor for row in inputs for tensor in row] if opts.rootRank == self.rank else []
        lent = Lent(read=flat, written=outputs)
        for tensor in outputs:
            _same_type(tensor, flat)
        begun = [
            self._begin("scatter", opts, lent, lent.specs(flat), lent.specs(outputs), root=opts.rootRank),
        ]
        return self._work(begun, outputs, lent)

    def alltoall(self, outputs, inputs, opts=None):
        lent = Lent(read=inputs, written=outputs)
        specs = lent.bytes(inputs), lent.bytes(outputs)
        begun = [self._begin("all_to_all", opts or c10d.AllToAllOptions(), lent, *specs)]
        return self._work(begun, outputs, lent)

    def all_to_all_single(self, output, tensor, output_splits=None, input_splits=None, opts=None):
        _same_type(tensor, [output])
        opts = opts if isinstance(opts, c10d.AllToAllOptions) else c10d.AllToAllOptions()
        lent = Lent(read=[tensor], written=[output])
        specs = (
            lent.split(tensor, input_splits, self.size, "input"),
            lent.split(output, output_splits, self.size, "output"),
        )
        begun = [self._begin("all_to_all", opts, lent, *specs)]
        return self._work(begun, [output], lent)

    def barrier(self, opts=None):
        opts = opts if isinstance(opts, c10d.BarrierOptions) else c10d.BarrierOptions()
        return self._work([self._begin("barrier", opts, None, [], [])], [], None)

    def send(self, tensors, rank, tag=0):
        _check_tag(tag)
        lent = Lent(read=tensors)
        parts = [self._begin("send", None, lent, [t], [], peer=rank, tag=tag) for t in lent.bytes(tensors)]
        return self._work(parts, tensors, lent)

    def recv(self, tensors, rank, tag=0):
        _check_tag(tag)
        lent = Lent(written=tensors)
        parts = [self._begin("receive", None, lent, [], [t], peer=rank, tag=tag) for t in lent.bytes(tensors)]
        return self._work(parts, tensors, lent)

    def recv_anysource(self, tensors, tag=0):
        return self.recv(tensors, None, tag)

    # How it is done.

    def _begin(self, operation, opts, lent, inputs, outputs, **more):
        timeout, waits = self.timeout, False
        if opts is not None:
            asked = opts.timeout.total_seconds()
            timeout = asked if asked > 0 else timeout
            # False: whoever asks waits for it right away, and so does the work.
            waits = not getattr(opts, "asyncOp", True)
            self.sequence += 1
        if lent is not None and lent.gpu is not None:
            stream = torch.cuda.current_stream(lent.gpu).cuda_stream
            place = (lent.gpu.index, stream)
            return self._group.begin_on_device(operation, inputs, outputs, lent, timeout, *place, **more)
        return self._group.begin(operation, inputs, outputs, lent, timeout, waits, **more)

    def _work(self, parts, tensors, lent):
        if lent is None:
            return Work(self, parts, tensors)
        return Work(self, parts, tensors, lent.give_back if lent.copies else None, lent.gpu)

    def follow(self, work):
        """Has the future of `work` settled when its last part is done."""
        with self._lock:
            name = next(self._names)
            pending = sum(part.follow(name) for part in work._parts)
            if pending:
                self._followed[name] = [work, pending]
                if not self._reporters:
                    self._add_reporter()
                return
        work._settle()

    def _add_reporter(self):
        self._idle += 1
        reporter = threading.Thread(target=self._report, name="poseidon-c10d", daemon=True)
        self._reporters.add(reporter)
        reporter.start()

    def _report(self):
        """The body of a thread that settles futures. What waits for a future may wait for another one there, so
        there is always a thread more than are settling."""
        while (name := self._group.completed()) is not None:
            with self._lock:
                entry = self._followed[name]
                entry[1] -= 1
                if entry[1]:
                    continue
                del self._followed[name]
                self._idle -= 1
                if not self._idle:
                    self._add_reporter()
            entry[0]._settle()
            # Not kept alive until the next one is done.
            del entry
            with self._lock:
                if self._idle >= IDLE:
                    break
                self._idle += 1
        with self._lock:
            self._reporters.discard(threading.current_thread())

    def group(self):
        return self._group

    def links(self):
        """The identity of the links, if another group can share them."""
        return self._group.identity

    def leave(self):
        _groups.discard(self)
        _shared.discard(self)
        self._group.leave(LEAVE)
        with self._lock:
            reporters = self._reporters - {threading.current_thread()}
        deadline = time.monotonic() + LEAVE
        for reporter in reporters:
            reporter.join(max(0.0, deadline - time.monotonic()))

    def abort(self):
        self._group.abort("the program aborted its process group")


def _listed(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _with_op(opts, kind):
    """Options from what the shorter signatures take instead: an operation."""
    return _with(opts, kind, reduceOp=opts)


def _with(opts, kind, **fields):
    if isinstance(opts, kind) or hasattr(opts, "timeout"):
        return opts
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def _same_type(tensor, others):
    for other in others:
        if other.dtype != tensor.dtype:
            raise ValueError(f"tensors of one operation must have the same type, got {tensor.dtype} and {other.dtype}")


def _check_tag(tag):
    if tag < 0:
        raise ValueError(f"a tag must not be negative, got {tag}")


COLLECTIVES = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "allreduce_sparse": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "allgather_coalesced": "allgather_coalesced",
    "all_gather_single": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "alltoall",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}


def _offers_operations(cls):
    """Gives `cls` every operation under all the names torch has for it."""

    def forward(name):
        def method(self, *args, **kwargs):
            return getattr(self._operations, name)(*args, **kwargs)

        return method

    for theirs, ours in COLLECTIVES.items():
        setattr(cls, theirs, forward(ours))
    return cls


class _Named:
    """What is asked of a process group and of a backend alike."""

    def getBackendName(self):
        return "poseidon"

    def name(self):
        return "poseidon"

    def set_timeout(self, timeout):
        self._operations.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._operations.sequence

    def shutdown(self):
        self._operations.leave()

    def abort(self):
        self._operations.abort()


@_offers_operations
class Backend(_Named, c10d.Backend):
    """What the dispatcher finds."""

    # torch's own properties of these names ask Python, which would ask them.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False

    def __init__(self, rank, size, operations):
        super().__init__(rank, size)
        self._operations = operations


@_offers_operations
class ProcessGroup(_Named, dist.ProcessGroup):
    """What `init_process_group` and `new_group` return."""

    def __init__(self, store, rank, size, operations):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # In some versions of torch, 2.11 among them, a class in Python can only be made this way.
            super().__init__(rank, size)
        self._operations = operations
        kind = dist.ProcessGroup.BackendType.CUSTOM
        try:
            # Held here: C++ does not keep the Python side of a backend alive.
            self._backend = Backend(rank, size, operations)
        except TypeError:
            # The same versions have no backends in Python. What asks the group itself, as stock DDP does, works.
            return
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, self._backend)
