"""How far parameters are from stock DDP's on Gloo after some steps, on several ranks of this machine.

Every case trains two copies of a model side by side, one of them with torch's DistributedDataParallel. Models
and data are those of bindings/python/tests. Rank 0 prints a line of JSON for each case. TF32 is off, and torch uses
deterministic algorithms where it has them. With --habits there are cases for what people do in their loops too. A
case that this machine cannot run is printed with the reason.
"""

import argparse
import contextlib
import copy
import datetime
import inspect
import itertools
import json
import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import poseidon.torch as psd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings/python/tests"))
from cluster import free_port  # noqa: E402
from models import MODELS, batches  # noqa: E402

RULES = {
    "sgd": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}),
    # With the usual eps of 1e-8 a gradient of nearly zero moves a parameter as far as any other, and its sign is
    # rounding.
    "adamw": ("AdamW", {"lr": 1e-3, "eps": 1e-4}),
}
SCHEMES = ["ps", "sfb", "auto"]
# Of each rank.
BATCH = 8
# A rank that waits longer for another is not going to see it.
PATIENCE = datetime.timedelta(minutes=2)

# What people do in their loops, and the model it is done with.
HABITS = {
    "accumulation": "mlp",
    "clipping": "mlp",
    "scaler": "mlp",
    "syncbn": "cnn",
    "channels_last": "cnn",
    "checkpointing": "mlp",
    "compile": "transformer",
    "streams": "mlp",
}
# How layers go, and who steps, in cases of a habit.
WAYS = [("ps", "worker"), ("sfb", "worker"), ("sfb", "server")]
# With update="server" there are no gradients on the worker for these.
NEEDS_GRADIENTS = ["clipping", "scaler"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--habits", action="store_true", help="also accumulation, clipping and so on")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    job = dict(os.environ, WORLD_SIZE=str(args.ranks), LOCAL_WORLD_SIZE=str(args.ranks))
    job.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    job.update(POSEIDON_SECRET="known to the benchmark", OMP_NUM_THREADS="1")
    # cuBLAS repeats itself only with a workspace of this size, which it reads when CUDA starts.
    job.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(job, RANK=str(r))) for r in range(args.ranks)]
    sys.exit(max(abs(process.wait()) for process in ranks))


def rank(args):
    """Runs every case, one after the other."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    psd.init()
    dist.init_process_group("gloo", timeout=PATIENCE)
    cases = [(*case, "plain") for case in itertools.product(MODELS, RULES, SCHEMES, updates())]
    if args.habits:
        for (habit, model), (scheme, update) in itertools.product(HABITS.items(), WAYS):
            if update in updates() and (update == "worker" or habit not in NEEDS_GRADIENTS):
                cases.append((model, "sgd", scheme, update, habit))
    for model, optimizer, scheme, update, habit in cases:
        case = {"model": model, "optimizer": optimizer, "scheme": scheme, "update": update, "habit": habit}
        missing = reason_to_skip(habit, args.device)
        found = {"skipped": missing} if missing else attempt(case, args)
        if psd.rank() == 0:
            print(json.dumps({**case, "steps": args.steps, "ranks": args.ranks, **found}), flush=True)
    dist.destroy_process_group()
    psd.shutdown()


def reason_to_skip(habit, device):
    """Why a habit cannot be had here; nothing if it can."""
    if habit in ("syncbn", "streams") and device == "cpu":
        return "needs a GPU"
    if habit == "compile":
        try:
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        except Exception as error:
            return f"torch.compile does not work here: {type(error).__name__}"
    return None


def updates():
    """Who applies the update rule, as far as this version knows."""
    known = "update" in inspect.signature(psd.DistributedDataParallel).parameters
    return ["worker", "server"] if known else ["worker"]


def attempt(case, args):
    """What a case shows, or why it failed: the other cases are worth running all the same."""
    found = why = None
    try:
        found = train_both(case, args)
    except Exception as error:
        why = f"rank {psd.rank()}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    whys = [None] * psd.world_size()
    dist.all_gather_object(whys, why)
    return next(({"failed": why} for why in whys if why), found)


def train_both(case, args):
    """How far Poseidon and Gloo are apart after training side by side: the most on any rank."""
    me, world, habit = psd.rank(), psd.world_size(), case["habit"]
    torch.manual_seed(me)  # as rank 0 begins, so do all
    ours = accustomed(MODELS[case["model"]]().to(args.device), habit)
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(ours))
    name, settings = RULES[case["optimizer"]]
    where = {"update": "server"} if case["update"] == "server" else {}
    ours = psd.DistributedDataParallel(ours, scheme=case["scheme"], **where)
    if habit == "compile":
        for net in (ours, stock):
            net.module.block.compile()
    rules = psd if where else torch.optim
    loops = [
        Loop(ours, getattr(rules, name)(ours.parameters(), **settings), habit, args.device),
        Loop(stock, getattr(torch.optim, name)(stock.parameters(), **settings), habit, args.device),
    ]
    apart = 0.0
    for x, y in batches(case["model"], args.steps, BATCH * world):
        mine = slice(BATCH * me, BATCH * (me + 1))
        x, y = x[mine].to(args.device), y[mine].to(args.device)
        if habit == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        mine_loss, stock_loss = (loop.step(x, y) for loop in loops)
        apart = max(apart, abs(mine_loss - stock_loss) / max(abs(stock_loss), 1e-6))
    ours.synchronize()
    worst = torch.tensor([difference(ours, stock), norm(ours, stock), apart], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    ours.close()
    if not worst.isfinite().all():
        raise RuntimeError(f"differences of {worst.tolist()} are no numbers")
    return dict(zip(["difference", "norm", "loss"], worst.tolist()))


class Checkpointed(nn.Module):
    """Computes its forward again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def accustomed(net, habit):
    """The model as the habit wants it before it is wrapped."""
    if habit == "syncbn":
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if habit == "channels_last":
        return net.to(memory_format=torch.channels_last)
    if habit == "checkpointing":
        net.layers = nn.Sequential(*(Checkpointed(layer) for layer in net.layers))
    return net


class Loop:
    """A training loop with a habit."""

    def __init__(self, net, optimizer, habit, device):
        self.net, self.optimizer, self.habit = net, optimizer, habit
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=10, enabled=habit == "scaler")
        self.streams = [torch.cuda.Stream() for _ in range(2)] if habit == "streams" else []

    def step(self, x, y):
        """The loss before the step."""
        self.optimizer.zero_grad()
        if self.habit == "accumulation":
            half = len(x) // 2
            with self.net.no_sync():
                (self.loss(x[:half], y[:half]) / 2).backward()
            x, y = x[half:], y[half:]
        with self.beside(0):
            loss = self.loss(x, y)
        with self.beside(1):
            self.scaler.scale(loss / 2 if self.habit == "accumulation" else loss).backward()
        if self.habit == "clipping":
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)

    @contextlib.contextmanager
    def beside(self, number):
        """On a stream of its own, if that is the habit; what comes before and after it waits as torch asks for."""
        if not self.streams:
            yield
            return
        stream, before = self.streams[number], torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)


def difference(a, b):
    """The largest difference of two sets of parameters, relative to the largest value of each."""
    pairs = zip(a.parameters(), b.parameters())
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item() for x, y in pairs)


def norm(a, b):
    """The norm of the difference of two sets of parameters, by the norm of the second."""
    flat = lambda net: torch.cat([p.detach().flatten().double() for p in net.parameters()])
    return ((flat(a) - flat(b)).norm() / flat(b).norm()).item()


if __name__ == "__main__":
    main()
