"""Tensors on a GPU give what torch's DistributedDataParallel gives there. Two or three workers share one device.

`cargo xtask bench gpu --only tests` runs these where there is a GPU.
"""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from cluster import run
from models import Mlp, batches
from test_gradients import HABITS, STEPPED, edit_one_number_on_one_worker, edit_with_numpy, same_as_stock
from test_groups import check_sides, side_by_side, uneven_with_groups, unused
from test_staleness import check_ahead, wrapped
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def exact():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)


def gloo():
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))


def distance(ours, theirs):
    """‖Δ‖/‖w‖ of two models."""
    pairs = [(p.detach().double(), q.detach().double()) for p, q in zip(ours.parameters(), theirs.parameters())]
    return (sum((p - q).pow(2).sum() for p, q in pairs) / sum(q.pow(2).sum() for _, q in pairs)).sqrt().item()


def steps(model, optimizer, data, rank, loss=F.cross_entropy, before=None):
    for x, y in data:
        optimizer.zero_grad()
        part = slice(8 * rank, 8 * rank + 8)
        loss(model(x[part].cuda()), y[part].cuda()).backward()
        if before is not None:
            before(model)
        optimizer.step()


def beside_ddp(half=False):
    """The distance from torch's wrapper after ten steps, by update and scheme."""
    import poseidon.torch as psd

    psd.init()
    gloo()
    rank, world = psd.rank(), psd.world_size()
    worst = {}
    for kind, settings in (("SGD", dict(lr=0.05, momentum=0.9)), ("AdamW", dict(lr=1e-3, eps=1e-4))):
        for update in ("worker", "server"):
            for scheme in ("ps", "sfb", "auto"):
                exact()
                plain = Mlp().cuda()
                plain = plain.bfloat16() if half else plain
                ours = psd.DistributedDataParallel(copy.deepcopy(plain), update=update, scheme=scheme)
                theirs = nn.parallel.DistributedDataParallel(plain, device_ids=[0])
                where = psd if update == "server" else torch.optim
                mine = getattr(where, kind)(ours.parameters(), **settings)
                other = getattr(torch.optim, kind)(theirs.parameters(), **settings)
                data = list(batches("mlp", 10, 8 * world))
                if half:
                    data = [(x.bfloat16(), y) for x, y in data]
                steps(ours, mine, data, rank)
                steps(theirs, other, data, rank)
                ours.synchronize()
                worst[kind, update, scheme] = distance(ours, theirs)
                ours.close()
    dist.destroy_process_group()
    psd.shutdown()
    return worst


def test_parameters_end_where_ddp_takes_them():
    for worst in run(beside_ddp, 2, timeout=240):
        assert max(worst.values()) < 1e-5, worst


def test_half_precision_ends_near_ddp():
    # DDP adds in bfloat16, ours in float32; with update="server" the shards keep masters.
    for worst in run(beside_ddp, 2, timeout=240, half=True):
        assert max(worst.values()) < 2e-2, worst


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x)


def convolutions():
    """Buffers, channels_last, accumulation, clipping, a stream of the program's own."""
    import poseidon.torch as psd

    psd.init()
    gloo()
    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, world = psd.rank(), psd.world_size()
    worst = {}
    for habit in ("plain", "channels_last", "accumulation", "clipping", "stream"):
        exact()
        plain = Convolutions().cuda()
        if habit == "channels_last":
            plain = plain.to(memory_format=torch.channels_last)
        ours = psd.DistributedDataParallel(copy.deepcopy(plain))
        theirs = nn.parallel.DistributedDataParallel(plain, device_ids=[0])
        generator = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(8 * world, 3, 16, 16, generator=generator), torch.arange(8 * world) % 10) for _ in range(8)
        ]
        for model in (ours, theirs):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            if habit == "accumulation":
                for at, (x, y) in enumerate(data):
                    part = slice(8 * rank, 8 * rank + 8)
                    if at % 2 == 0:
                        optimizer.zero_grad()
                        with model.no_sync():
                            F.cross_entropy(model(x[part].cuda()), y[part].cuda()).backward()
                    else:
                        F.cross_entropy(model(x[part].cuda()), y[part].cuda()).backward()
                        optimizer.step()
            elif habit == "stream":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    steps(model, optimizer, data, rank)
                torch.cuda.current_stream().wait_stream(stream)
            else:
                clip = (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)) if habit == "clipping" else None
                steps(model, optimizer, data, rank, before=clip)
        buffers = zip(ours.module.buffers(), theirs.module.buffers())
        apart = max((b.double() - c.double()).abs().max().item() for b, c in buffers)
        worst[habit] = max(distance(ours, theirs), apart)
        ours.close()
    dist.destroy_process_group()
    psd.shutdown()
    return worst


def test_habits_end_where_ddp_takes_them():
    for worst in run(convolutions, 2, timeout=240):
        assert max(worst.values()) < 1e-4, worst


# Tensors of a GPU have no numpy().
ON_HOSTS = (edit_with_numpy, edit_one_number_on_one_worker)


def names(habits):
    return [habit.__name__ for habit in habits if habit not in ON_HOSTS]


@pytest.mark.parametrize("scheme, beside", [("ps", False), ("sfb", False), ("sfb", True)])
def test_gradients_are_what_torch_makes_of_them(scheme, beside):
    """no_sync, clipping, penalties, gradients set by hand; also on a stream of the program's own."""
    for schemes in run(same_as_stock, 3, timeout=300, habits=names(HABITS), scheme=scheme, device="cuda", beside=beside):
        assert all(how and ("sfb" in how) == (scheme == "sfb") for how in schemes.values()), schemes


# Some milliseconds of a GPU.
LATE = 5_000_000


def late_streams(lags, **options):
    """`same_as_stock`, while one of the streams lags behind: what does not wait for it is done too early."""
    from poseidon.torch._backward import Backward
    from poseidon.torch._checksum import Trace
    from poseidon.torch._device import Beside
    from poseidon.torch._layers import Unit
    from poseidon.torch._parallel import DistributedDataParallel

    def be_late(_):
        # What was given to the stream before is done now, what follows comes late.
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(LATE)

    def before(owner, name, lag=be_late):
        original = getattr(owner, name)

        def late(self, *arguments):
            lag(self)
            return original(self, *arguments)

        setattr(owner, name, late)

    def lag_beside(unit):
        with torch.cuda.stream(Beside.stream(unit.device)):
            torch.cuda._sleep(LATE)

    def lag_of_torch(model):
        for end in model._ends:
            end.register_prehook(be_late)

    if lags == "program":
        before(Trace, "leave")
        before(Unit, "send_factors")
    elif lags == "torch":
        # The stream on which torch adds to gradients, and on which they are sent.
        before(Backward, "_on_gradient")
        before(DistributedDataParallel, "forward", lambda model: lag_of_torch(model) if not model._watched else None)
    else:
        before(Unit, "_rebuild", lag_beside)
    return same_as_stock(**options)


@pytest.mark.parametrize("lags", ["program", "torch", "beside"])
def test_no_stream_overtakes_another(lags):
    run(late_streams, 3, timeout=300, lags=lags, habits=names(HABITS), scheme="sfb", device="cuda", beside=True)


def test_gradients_are_what_torch_makes_of_them_with_steps_on_the_shards():
    run(same_as_stock, 3, timeout=300, habits=names(STEPPED), scheme="sfb", update="server", device="cuda")


def test_gradients_in_float64():
    habits = names(HABITS)
    for schemes in run(same_as_stock, 3, timeout=300, habits=habits, scheme="auto", kind=torch.float64, device="cuda"):
        assert all(how == ["mean"] for how in schemes.values()), schemes


def test_groups_with_schedules_equal_torchs():
    check_sides(run(side_by_side, 3, timeout=300, model="mlp", steps=12, device="cuda"))


def test_groups_with_schedules_and_different_numbers_of_batches():
    run(uneven_with_groups, 3, timeout=240, device="cuda")


def test_what_nobody_uses_is_not_stepped():
    run(unused, 3, timeout=300, device="cuda")


def resumed():
    """Steps on the shards, and those of layers by factors on the GPU, go on from what was saved, bit by bit."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    data = list(batches("mlp", 8, 8 * world))
    worst = {}
    for kind in ("SGD", "AdamW"):
        for scheme in ("ps", "sfb"):
            exact()
            settings = dict(lr=0.05, momentum=0.9) if kind == "SGD" else dict(lr=1e-3)
            straight = psd.DistributedDataParallel(Mlp().cuda(), update="server", scheme=scheme, deterministic=True)
            optimizer = getattr(psd, kind)(straight.parameters(), **settings)
            steps(straight, optimizer, data[:4], rank)
            model, state = copy.deepcopy(straight.module.state_dict()), copy.deepcopy(optimizer.state_dict())
            steps(straight, optimizer, data[4:], rank)
            straight.synchronize()
            again = Mlp().cuda()
            again.load_state_dict(model)
            again = psd.DistributedDataParallel(again, update="server", scheme=scheme, deterministic=True)
            optimizer = getattr(psd, kind)(again.parameters(), **settings)
            optimizer.load_state_dict(state)
            steps(again, optimizer, data[4:], rank)
            again.synchronize()
            worst[kind, scheme] = distance(again, straight)
            straight.close()
            again.close()
    psd.shutdown()
    return worst


def test_training_resumes_bit_by_bit():
    for worst in run(resumed, 2, timeout=240):
        assert max(worst.values()) == 0.0, worst


def test_workers_go_ahead_of_a_slow_one(tmp_path):
    # By the bytes alone, the first layer would go by factors.
    options = dict(scheme="auto", sync="ssp:2", lead=2, device="cuda", hidden=4096)
    for rule in ("sgd", "adamw"):
        (tmp_path / rule).mkdir()
        check_ahead(tmp_path / rule, rule=rule, **options)


def factors_apart():
    import poseidon.torch as psd

    psd.init()
    try:
        wrapped("sgd", "ssp:2", "sfb", device="cuda")
    except ValueError as error:
        return str(error)


def test_factors_of_workers_at_different_steps_are_refused_in_words():
    for words in run(factors_apart, 2):
        assert 'scheme="auto"' in words and "ssp:2" in words, words


def collectives():
    """Operations of the torch.distributed backend on CUDA tensors."""
    import poseidon.torch  # noqa: F401
    from poseidon._c10d_register import register

    register()
    dist.init_process_group("poseidon", timeout=datetime.timedelta(minutes=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    right = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
        x = torch.full((1000,), rank + 1, dtype=dtype, device="cuda")
        dist.all_reduce(x)
        right["all_reduce", dtype] = bool((x == sum(range(1, size + 1))).all())
    strided = torch.full((50, 40), float(rank), device="cuda").t()[::2]
    dist.all_reduce(strided)
    right["strided"] = bool((strided == sum(range(size))).all())
    x = torch.full((300_000,), float(rank), device="cuda")
    dist.broadcast(x, src=size - 1)
    right["broadcast"] = bool((x == size - 1).all())
    parts = [torch.empty(7, device="cuda") for _ in range(size)]
    dist.all_gather(parts, torch.full((7,), float(rank), device="cuda"))
    right["all_gather"] = all(bool((p == r).all()) for r, p in enumerate(parts))
    out = torch.empty(5, device="cuda")
    dist.reduce_scatter(out, [torch.full((5,), float(r), device="cuda") for r in range(size)])
    right["reduce_scatter"] = bool((out == rank * size).all())
    sent, got = torch.arange(2.0 * size, device="cuda") + 100 * rank, torch.empty(2 * size, device="cuda")
    dist.all_to_all_single(got, sent)
    expected = torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)]).cuda()
    right["all_to_all"] = torch.equal(got, expected)
    message = torch.full((3,), float(rank), device="cuda")
    if rank == 0:
        dist.send(message, 1)
    elif rank == 1:
        dist.recv(message, 0)
        right["recv"] = bool((message == 0).all())
    # Asynchronous, with work on the stream before and after, and one in host memory between.
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(20):
        x = x * 1.0
    work = dist.all_reduce(x, async_op=True)
    host = torch.ones(3)
    dist.all_reduce(host)
    work.wait()
    right["asynchronous"] = bool((x * 2 == 2 * size).all()) and bool((host == size).all())
    future = dist.all_reduce(torch.ones(5, device="cuda"), async_op=True).get_future()
    right["future"] = bool((future.then(lambda f: f.value()[0] * 3).wait() == 3 * size).all())
    # Stock DDP on it, beside the same model by itself with all samples.
    exact()
    alone = Mlp().cuda()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone), device_ids=[0])
    data = list(batches("mlp", 5, 8 * size))
    steps(model, torch.optim.SGD(model.parameters(), lr=0.05), data, rank)
    whole = torch.optim.SGD(alone.parameters(), lr=0.05)
    for x, y in data:
        whole.zero_grad()
        F.cross_entropy(alone(x.cuda()), y.cuda()).backward()
        whole.step()
    right["ddp"] = distance(model, alone) < 1e-5
    dist.barrier()
    dist.destroy_process_group()
    return right


def test_collectives_on_cuda_tensors():
    for right in run(collectives, 2, timeout=240):
        assert all(right.values()), right


def captured():
    import poseidon.torch as psd

    psd.init()
    model = psd.DistributedDataParallel(Mlp().cuda(), scheme="ps")
    x, y = next(batches("mlp", 1, 8))
    x, y = x.cuda(), y.cuda()
    F.cross_entropy(model(x), y).backward()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            F.cross_entropy(model(x), y).backward()
        words = ""
    except Exception as error:
        words = repr(error)
    return words


def test_a_captured_backward_is_refused_in_words():
    from cluster import attempt

    ended = attempt(captured, 2)
    assert any("CUDA graph" in (words or "") + errors for _, words, errors in ended), ended
