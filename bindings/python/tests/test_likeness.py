"""What torch's DistributedDataParallel has besides training: arguments, attributes, float64, and libraries that ask."""

import copy
import inspect

import pytest
import torch
from cluster import run
from models import Mlp, batches
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("name", list(inspect.signature(nn.parallel.DistributedDataParallel).parameters))
def test_arguments_are_torchs(name):
    import poseidon.torch as psd

    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters.values())
    ours = list(inspect.signature(psd.DistributedDataParallel).parameters.values())
    position = [p.name for p in theirs].index(name)
    assert ours[position].name == name, "the same place"
    # Older versions of torch say True, which None means.
    assert ours[position].default == theirs[position].default or name == "broadcast_buffers"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


def unwrap(model):
    """As Accelerate, transformers, timm and Lightning do."""
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    return model


def interface():
    """Everything that needs no second process to be wrong."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import _apply_optimizer_in_backward

    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    world, rank = psd.world_size(), psd.rank()
    torch.manual_seed(rank)
    net = Norm()
    model = psd.DistributedDataParallel(net)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net))

    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert issubclass(psd.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    assert not isinstance(net, nn.parallel.DistributedDataParallel)
    assert unwrap(model) is net
    assert isinstance(copy.deepcopy(model), nn.parallel.DistributedDataParallel)
    names = get_model_state_dict(model)
    assert list(names) == list(net.state_dict()), "torch's checkpoints leave the wrapper's name out"

    for name in ("device_ids", "output_device", "dim", "static_graph", "device", "device_type", "parameters_to_ignore",
                 "find_unused_parameters", "forward_sync_buffers", "broadcast_buffers", "gradient_as_bucket_view",
                 "process_group", "mixed_precision", "is_multi_device_module", "bucket_bytes_cap", "broadcast_bucket_size",
                 "require_backward_grad_sync", "require_forward_param_sync", "require_manual_backward_finalization"):
        if hasattr(stock, name):  # older versions of torch lack some
            assert getattr(model, name) == getattr(stock, name), name
    assert model.will_sync_module_buffers() and stock.will_sync_module_buffers()
    model.forward_sync_buffers = False
    assert not model.will_sync_module_buffers() and not model.broadcast_buffers
    model.forward_sync_buffers = True
    facts, theirs = model._get_ddp_logging_data(), stock._get_ddp_logging_data()
    for name in set(facts) - {"backend_name", "dtypes"}:
        assert facts[name] == theirs[name], name
    model._set_ddp_runtime_logging_sample_rate(10)
    with pytest.raises(RuntimeError, match="finished by itself"):
        model.finalize_backward()
    with pytest.raises(NotImplementedError, match='update="server"'):
        model.require_manual_backward_finalization = True

    # The default hook is what happens anyway.
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model.register_comm_hook(torch.distributed.group.WORLD, default_hooks.allreduce_hook)
    model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, powerSGD_hook.powerSGD_hook):
        with pytest.raises(NotImplementedError, match=f'{hook.__name__}.*no buckets.*init_process_group\\("poseidon"\\)'):
            model.register_comm_hook(None, hook)
    with pytest.raises(NotImplementedError, match="FP16_COMPRESS"):
        model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(NotImplementedError, match='SGD in the backward pass: pass update="server"'):
        model._register_fused_optim(torch.optim.SGD, 0.1)

    # What Accelerate's trigger_sync_in_backward and Lightning's manual optimisation do: forward within no_sync,
    # backward that synchronises.
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    for ddp in (model, stock):
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
            loss = ddp(x).square().mean()
        assert ddp.require_backward_grad_sync
        before = ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([])
        loss.backward()
        ddp.require_forward_param_sync = before
        ddp.require_backward_grad_sync = False
        ddp(x).square().mean().backward()
        ddp.require_backward_grad_sync = True
        ddp(x).square().mean().backward()
    for p, q in zip(model.parameters(), stock.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(AttributeError, match="_autograd_hook is a part of torch's own engine"):
        model.reducer._autograd_hook
    with pytest.raises(RuntimeError, match="static_graph before it"):
        model._set_static_graph()

    mesh = init_device_mesh("cpu", (world,))
    assert psd.DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh).process_group.size() == world
    squared = init_device_mesh("cpu", (world, 1))
    with pytest.raises(ValueError, match="2 dimensions: expected 1"):
        psd.DistributedDataParallel(nn.Linear(2, 2), device_mesh=squared)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("all", "one"))["one"]
    with pytest.raises(ValueError, match=f"device_mesh has 1 workers: expected None or one of all {world}"):
        psd.DistributedDataParallel(nn.Linear(2, 2), device_mesh=alone)
    with pytest.raises(ValueError, match="expected one of them"):
        psd.DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh, process_group=torch.distributed.group.WORLD)
    with pytest.raises(ValueError, match="torch.autocast"):
        psd.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=object())
    with pytest.raises(ValueError, match="expected None|Expected None"):
        psd.DistributedDataParallel(nn.Linear(2, 2), delay_all_reduce_named_params=[])
    stepping = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), dict(lr=0.1))
    with pytest.raises(ValueError, match="'weight' has an optimizer that steps during backward"):
        psd.DistributedDataParallel(stepping)
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_attributes_and_methods_are_torchs():
    run(interface, 2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(1))


class Ignoring(Norm):
    """Torch is told to leave some parameters and buffers alone."""

    def __init__(self):
        super().__init__()
        self.own = Own()
        self.unused = nn.Linear(3, 3)
        self._ddp_params_and_buffers_to_ignore = ["own.scale", "own.seen"]

    def forward(self, x):
        return super().forward(x) * self.own.scale


class Mixed(nn.Module):
    """Two parameters in float64 between others, one of them used by rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(6, 5)
        self.exact = nn.Linear(5, 5, dtype=torch.float64)
        self.sometimes = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.above = nn.Linear(5, 3)

    def forward(self, x, branch):
        y = self.exact(self.below(x).double())
        return self.above((y * self.sometimes if branch else y).float())


def beside_torch():
    import poseidon.torch as psd

    psd.init()
    torch.distributed.init_process_group("gloo")
    rank = psd.rank()

    def both(net, **settings):
        stock = nn.parallel.DistributedDataParallel(copy.deepcopy(net), **settings)
        return psd.DistributedDataParallel(net, **settings), stock

    def equal(ours, stock, what):
        for (name, p), q in zip(ours.named_parameters(), stock.parameters()):
            assert (p.grad is None) == (q.grad is None), f"{what}: {name}"
            if q.grad is not None:
                assert p.grad.dtype == q.grad.dtype
                tolerance = 1e-13 if q.dtype == torch.float64 else 1e-4
                torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance / 100, msg=f"{what}: {name}: {p.grad} {q.grad}")

    # A static graph finds by itself what is not used; ignored ones stay each worker's own.
    torch.manual_seed(rank)
    net = Ignoring()
    with torch.no_grad():
        net.own.scale += rank
        net.own.seen += rank
    pair = both(net, static_graph=True)
    for step in range(3):
        for model in pair:
            model.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            own = model.module.own
            assert own.seen.item() == rank and own.scale[0].item() == 1 + rank
        equal(*pair, "static graph")

    # What begins as rank 0's: all, or parameters only, or nothing.
    for settings in (dict(), dict(broadcast_buffers=False), dict(forward_sync_buffers=False), dict(init_sync=False)):
        if not settings.keys() <= inspect.signature(nn.parallel.DistributedDataParallel).parameters.keys():
            continue
        torch.manual_seed(rank)
        net = Norm()
        net.norm.running_mean += rank
        for ours, theirs in zip(*(model.state_dict().values() for model in both(net, **settings))):
            assert torch.equal(ours, theirs), settings

    # Float64 among others, with unused ones, accumulated, and in join.
    torch.manual_seed(0)
    pair = both(Mixed(), find_unused_parameters=True)
    for step in range(4):
        for model in pair:
            model.zero_grad()
            x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            with model.no_sync():
                model(x[0], False).square().mean().backward()
            model(x[1], rank == 0 and step < 2).square().mean().backward()
        equal(*pair, f"float64 in step {step}")
    assert [row[2] for row in pair[0].sessions_plan()][-1] == "mean"
    torch.manual_seed(0)
    pair = both(Mlp().double())
    steppers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in pair]
    for model, stepper in zip(pair, steppers):
        with model.join():
            for x, y in batches("mlp", 2 + rank, 4):
                stepper.zero_grad()
                F.cross_entropy(model(x.double()), y).backward()
                stepper.step()
    for p, q in zip(pair[0].parameters(), pair[1].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    pair[0].close()
    with pytest.raises(TypeError, match="'weight' is torch.float64: .*Expected update=\"worker\""):
        psd.DistributedDataParallel(nn.Linear(2, 2, dtype=torch.float64), update="server")
    torch.distributed.destroy_process_group()
    psd.shutdown()


def test_float64_static_graphs_and_what_begins_equal():
    run(beside_torch, 2)
