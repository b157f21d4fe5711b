"""How far parameters are from stock DDP's on Gloo after some steps, on several ranks of this machine.

Every case trains two copies of a model side by side, one of them with torch's DistributedDataParallel. Models
and data are those of bindings/python/tests. Rank 0 prints a line of JSON for each case.
"""

import argparse
import copy
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    job = dict(os.environ, WORLD_SIZE=str(args.ranks), LOCAL_WORLD_SIZE=str(args.ranks))
    job.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
    job.update(POSEIDON_SECRET="bench", OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=dict(job, RANK=str(r))) for r in range(args.ranks)]
    sys.exit(max(abs(process.wait()) for process in ranks))


def rank(args):
    """Runs every case, one after the other."""
    torch.set_num_threads(1)
    psd.init()
    dist.init_process_group("gloo")
    for model, optimizer, scheme, update in itertools.product(MODELS, RULES, SCHEMES, updates()):
        worst = train_both(model, optimizer, scheme, update, args.steps)
        case = {"model": model, "optimizer": optimizer, "scheme": scheme, "update": update}
        if psd.rank() == 0:
            print(json.dumps({**case, "steps": args.steps, "ranks": args.ranks, "difference": worst}), flush=True)
    dist.destroy_process_group()
    psd.shutdown()


def updates():
    """Who applies the update rule, as far as this version knows."""
    known = "update" in inspect.signature(psd.DistributedDataParallel).parameters
    return ["worker", "server"] if known else ["worker"]


def train_both(model, optimizer, scheme, update, steps):
    """The largest difference after training on Poseidon and on Gloo side by side, on any rank."""
    me, world = psd.rank(), psd.world_size()
    torch.manual_seed(me)  # as rank 0 begins, so do all
    ours = MODELS[model]()
    stock = nn.parallel.DistributedDataParallel(copy.deepcopy(ours))
    name, settings = RULES[optimizer]
    where = {"update": "server"} if update == "server" else {}
    ours = psd.DistributedDataParallel(ours, scheme=scheme, **where)
    rules = psd if update == "server" else torch.optim
    steppers = [
        (ours, getattr(rules, name)(ours.parameters(), **settings)),
        (stock, getattr(torch.optim, name)(stock.parameters(), **settings)),
    ]
    for x, y in batches(model, steps, BATCH * world):
        mine = slice(BATCH * me, BATCH * (me + 1))
        for net, stepper in steppers:
            stepper.zero_grad()
            F.cross_entropy(net(x[mine]), y[mine]).backward()
            stepper.step()
    ours.eval()
    with torch.no_grad():
        ours(x[mine])  # where parameters are awaited before they are used, they are here after this
    worst = torch.tensor(difference(ours, stock))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def difference(a, b):
    """The largest difference of two sets of parameters, relative to the largest value of each."""
    pairs = zip(a.parameters(), b.parameters())
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item() for x, y in pairs)


if __name__ == "__main__":
    main()
