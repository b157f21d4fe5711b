"""The backend ``poseidon`` of torch.distributed: every collective equals Gloo's, and so does stock DDP."""

import copy
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cluster import attempt, run
from models import MODELS, batches
from torch.nn import functional as F

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
FLOATS = DTYPES[:4]
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def start():
    import poseidon._c10d_register

    poseidon._c10d_register.register()
    dist.init_process_group("poseidon", timeout=timedelta(seconds=60))
    return dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo")


def numbers(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def equal_to_gloo(operation):
    """Runs `operation(group)` on both and compares all the tensors it returns."""
    ours, theirs = operation(None), operation(GLOO[0])
    assert len(ours) == len(theirs)
    for mine, stock in zip(ours, theirs):
        assert torch.equal(mine, stock), (mine, stock)


GLOO = []


def reductions():
    rank, size, gloo = start()
    GLOO.append(gloo)
    for dtype in DTYPES:
        for name in OPS:
            if dtype in FLOATS and name.startswith("B"):
                continue
            op = getattr(dist.ReduceOp, name)
            for length in (1, 37, 40_000):
                x = numbers(rank, length, dtype=dtype)

                def all_reduce(group):
                    y = x.clone()
                    dist.all_reduce(y, op, group=group)
                    return [y]

                def reduce(group):
                    y = x.clone()
                    dist.reduce(y, size - 1, op, group=group)
                    return [y] if rank == size - 1 else []

                equal_to_gloo(all_reduce)
                equal_to_gloo(reduce)
    x = torch.full((10,), float(rank))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x, torch.full((10,), (size - 1) / 2))
    strided = torch.arange(12.0).reshape(3, 4).t()
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.arange(12.0).reshape(3, 4).t() * size)
    turning = torch.tensor([1 + 2j, 3j])
    dist.all_reduce(turning)
    assert torch.equal(turning, torch.tensor([1 + 2j, 3j]) * size)
    with pytest.raises(ValueError, match="xor of float32"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)
    dist.destroy_process_group()


def movements():
    rank, size, gloo = start()
    GLOO.append(gloo)
    for length in (0, 1, 1001, 300_000):
        x = numbers(rank, length)
        row = lambda n=length: [torch.zeros(n) for _ in range(size)]

        def broadcast(group):
            y = x.clone()
            dist.broadcast(y, size - 1, group=group)
            return [y]

        def all_gather(group):
            out = row()
            dist.all_gather(out, x, group=group)
            return out

        def all_gather_into_tensor(group):
            out = torch.zeros(size * length)
            dist.all_gather_into_tensor(out, x, group=group)
            return [out]

        def gather(group):
            out = row() if rank == 0 else None
            dist.gather(x, out, 0, group=group)
            return out or []

        def scatter(group):
            out = torch.zeros(length)
            dist.scatter(out, [x + i for i in range(size)] if rank == 0 else None, 0, group=group)
            return [out]

        def reduce_scatter_tensor(group):
            out = torch.zeros(length)
            dist.reduce_scatter_tensor(out, x.repeat(size), group=group)
            return [out]

        def all_to_all_single(group):
            # Rank r sends r + s + 1 rows to rank s.
            rows = [rank + s + 1 for s in range(size)]
            given = numbers(rank, sum(rows), 3)
            out = torch.zeros(sum(rows), 3)
            dist.all_to_all_single(out, given, rows, rows, group=group)
            return [out]

        for operation in (
            broadcast,
            all_gather,
            all_gather_into_tensor,
            gather,
            scatter,
            reduce_scatter_tensor,
            all_to_all_single,
        ):
            equal_to_gloo(operation)
        # Gloo has no list form of these.
        out, parts = torch.zeros(length), [x + i for i in range(size)]
        dist.reduce_scatter(out, parts)
        assert torch.equal(out, sum(numbers(r, length) + rank for r in range(size)))
        out = row()
        dist.all_to_all(out, [x * (s + 1) for s in range(size)])
        assert all(torch.equal(out[r], numbers(r, length) * (rank + 1)) for r in range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()
    dist.destroy_process_group()


def messages():
    rank, size, _ = start()
    if rank == 0:
        seen = set()
        for _ in range(1, size):
            x = torch.zeros(100_000)
            source = dist.recv(x, tag=3)
            assert torch.equal(x, torch.full_like(x, float(source)))
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((100_000,), float(rank)), 0, tag=3)
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(5)
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), right),
        dist.P2POp(dist.irecv, got, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, torch.full((5,), float(left)))
    dist.destroy_process_group()


def handles():
    rank, size, _ = start()
    x = torch.ones(200_000)
    work = dist.all_reduce(x, async_op=True)
    seen = []
    then = work.get_future().then(lambda done: seen.append(done.value()[0][0].item()))
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    then.wait()
    assert seen == [size] and torch.equal(work.result()[0], torch.full_like(x, size))
    pair = dist.new_group([0, 1])
    if rank < 2:
        y = torch.ones(3)
        dist.all_reduce(y, group=pair)
        assert torch.equal(y, torch.full((3,), 2.0))
    import torch.distributed._functional_collectives as functional

    z = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert torch.equal(z + 0, torch.full((4,), float(size)))
    dist.destroy_process_group()


def ddp(model):
    rank, size, gloo = start()
    torch.manual_seed(rank)
    ours = MODELS[model]()
    stock = copy.deepcopy(ours)
    ours = torch.nn.parallel.DistributedDataParallel(ours)
    stock = torch.nn.parallel.DistributedDataParallel(stock, process_group=gloo)
    worst = 0.0
    steppers = [(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)) for net in (ours, stock)]
    for x, y in batches(model, 5, 8 * size):
        mine = slice(8 * rank, 8 * rank + 8)
        for net, stepper in steppers:
            stepper.zero_grad()
            F.cross_entropy(net(x[mine]), y[mine]).backward()
            stepper.step()
    for a, b in zip(ours.parameters(), stock.parameters()):
        worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item())
    digest = [p.detach().clone() for p in ours.parameters()]
    dist.destroy_process_group()
    return worst, digest


def dies():
    rank, _, _ = start()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(100_000))
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "nothing happened", 0.0


def disagrees():
    rank, _, _ = start()
    try:
        dist.all_reduce(torch.ones(10 + rank))
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("function", [reductions, movements, messages, handles])
def test_operations_equal_gloos(function):
    run(function, 3)


def test_one_rank_is_enough():
    run(movements, 1)


@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_stock_ddp_equals_gloos(model):
    results = run(ddp, 2, model=model)
    for worst, digest in results:
        assert worst < 1e-5
        assert all(torch.equal(a, b) for a, b in zip(digest, results[0][1]))


def test_a_rank_that_dies_is_named_on_every_other():
    ended = attempt(dies, 3)
    assert ended[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        words, seconds = ended[rank][1]
        assert "rank 1" in words and seconds < 10


def test_ranks_that_differ_are_told_what_each_had():
    for words in run(disagrees, 2):
        assert "of 10 float32 on rank 0" in words and "of 11 float32 on rank 1" in words


def test_the_backend_is_registered_without_loading_it():
    import subprocess
    import sys

    program = (
        "import sys, torch.distributed as dist\n"
        "from poseidon._c10d_register import register\n"
        "register(); register()\n"
        "assert dist.Backend('poseidon') == 'poseidon'\n"
        "assert 'poseidon._native' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def groups_of_groups():
    rank, size, _ = start()
    everybody, pair = list(range(size)), [0, size - 1]
    first = dist.new_group(everybody)
    descriptors = len(os.listdir("/proc/self/fd"))
    groups = [(everybody, first), (everybody, dist.new_group(everybody)), (pair, dist.new_group(pair))]
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a group has opened connections"
    for ranks, group in groups:
        if rank in ranks:
            tensor = torch.full((100_000,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.full_like(tensor, float(sum(ranks))))
    # Groups outlive the one that made the links.
    dist.destroy_process_group(first)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=groups[1][1])
    assert tensor.tolist() == [size] * 3
    dist.destroy_process_group()


def test_groups_share_connections():
    run(groups_of_groups, 3)


def fully_sharded():
    """Training with torch's FSDP on the backend, beside the same on Gloo."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank, _, gloo = start()
    meshes = [DeviceMesh.from_group(group, "cpu") for group in (dist.group.WORLD, gloo)]
    ends = []
    for mesh in meshes:
        torch.manual_seed(0)
        model = MODELS["mlp"]()
        for layer in model.layers:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in batches("mlp", 3, 4, seed=rank):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ends.append([p.full_tensor() for p in model.parameters()])
    dist.destroy_process_group()
    for ours, theirs in zip(*ends):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_fully_sharded_models_train_as_on_gloo():
    import torch.distributed.fsdp

    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this version of torch has none")
    run(fully_sharded, 2)


class Stream:
    """In the place of a GPU's stream: notes what is put on it."""

    def __init__(self, name, log):
        self.cuda_stream, self._log = name, log

    def record_event(self):
        self._log.append((self.cuda_stream, "event"))
        return f"event of {self.cuda_stream}"

    def wait_event(self, event):
        self._log.append((self.cuda_stream, event))


class Part:
    """In the place of an operation that is done."""

    def __init__(self, log):
        self._log = log

    def wait(self, limit):
        return True

    def make_wait(self, stream):
        self._log.append((stream, "network"))


def test_every_stream_waits_for_what_is_copied_back(monkeypatch):
    from poseidon._c10d import Work

    log = []
    now = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[-1])
    work = Work(None, [Part(log)], [], lambda: log.append((now[-1].cuda_stream, "copy")), torch.device("cuda", 0))
    for name in ("first", "second"):
        now.append(Stream(name, log))
        work.wait()
    first = [("first", "network"), ("first", "copy"), ("first", "event")]
    assert log == first + [("second", "network"), ("second", "event of first")]
