"""Whether PyTorch goes on bit by bit after a kill -9, for `cargo xtask bench resume`.

Four ranks, two on each of two hosts, train a small net in every case: by shards, by factors and as the plan chooses;
with momentum and Adam; stepped by workers and by shards; in float32 and bfloat16. They do so three times: all steps at
once; half of them, a checkpoint, ten more and the death of a rank; and the rest, from the checkpoints. All cases are
under way when the rank is killed. A line of JSON for each case has the digests of both ways.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import poseidon.torch as psd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings/python/tests"))
from cluster import free_port  # noqa: E402

RANKS, PER_HOST = 4, 2
RULES = {"momentum": ("SGD", {"lr": 0.02, "momentum": 0.9}), "Adam": ("Adam", {"lr": 1e-3})}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = list(itertools.product(["ps", "sfb", "auto"], RULES, ["worker", "server"], TYPES))
# Steps after the checkpoint, which are lost.
LOST = 10
# Seconds that a phase may take.
PATIENCE = 500


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", required=True, help="where checkpoints go")
    parser.add_argument("--phase", choices=PHASES, help="be one rank")
    args = parser.parse_args()
    if args.phase:
        rank(args)
        return
    whole = phase(args, "whole")
    phase(args, "killed")
    resumed = phase(args, "resumed")
    for case, one, other in zip(CASES, whole, resumed, strict=True):
        print(json.dumps({"case": ", ".join(case), "device": args.device, "whole": one, "resumed": other}), flush=True)


def phase(args, name):
    """Starts the ranks, and waits for their end. Returns the digests of the cases, if there are any."""
    job = dict(os.environ, WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(PER_HOST))
    job.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    job.update(POSEIDON_SECRET="known to the benchmark", OMP_NUM_THREADS="1")
    # cuBLAS repeats itself only with a workspace of this size, which it reads when CUDA starts.
    job.update(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    folder = pathlib.Path(args.folder)
    ranks = []
    for number in range(RANKS):
        mine = dict(job, RANK=str(number), LOCAL_RANK=str(number % PER_HOST), POSEIDON_HOST=f"host{number // PER_HOST}")
        with open(folder / f"{name}-{number}.log", "w") as log:
            words = [sys.executable, *sys.argv, "--phase", name]
            ranks.append(subprocess.Popen(words, env=mine, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + PATIENCE
    try:
        if name == "killed":
            while not all((folder / f"ready-{number}").exists() for number in range(RANKS)):
                assert all(process.poll() is None for process in ranks), said(folder, name)
                assert time.monotonic() < deadline, "the ranks did not come to the kill in time"
                time.sleep(0.01)
            ranks[-1].send_signal(signal.SIGKILL)
        statuses = [process.wait(max(deadline - time.monotonic(), 1)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if name == "killed":
        assert statuses[-1] == -signal.SIGKILL and all(statuses), f"ranks ended with {statuses}"
        return None
    assert not any(statuses), f"ranks ended with {statuses}:\n{said(folder, name)}"
    return json.loads((folder / f"digests-{name}.json").read_text())


def said(folder, name):
    """The end of what the ranks of a phase have written."""
    return "\n".join((folder / f"{name}-{number}.log").read_text()[-2000:] for number in range(RANKS))


def rank(args):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    psd.init()
    PHASES[args.phase](args)
    psd.shutdown()


def whole(args):
    digests = []
    for case in CASES:
        run = Run(case, args.device, seed=0)
        run.train(range(args.steps))
        digests.append(run.digest())
        run.model.close()
    keep(args, digests)


def killed(args):
    half, runs = args.steps // 2, []
    for number, case in enumerate(CASES):
        run = Run(case, args.device, seed=0)
        run.train(range(half))
        psd.save(f"{args.folder}/{number}", run.model, run.optimizer, step=half)
        runs.append(run)
    for run in runs:
        run.train(range(half, half + LOST))
    pathlib.Path(args.folder, f"ready-{psd.rank()}").touch()
    # Until a rank is killed: the others then get an error.
    for step in itertools.count(half + LOST):
        runs[-1].train([step])


def resumed(args):
    digests = []
    for number, case in enumerate(CASES):
        run = Run(case, args.device, seed=1)
        notes = psd.load(f"{args.folder}/{number}", run.model, run.optimizer)
        run.train(range(notes["step"], args.steps))
        digests.append(run.digest())
        run.model.close()
    keep(args, digests)


def keep(args, digests):
    if psd.rank() == 0:
        pathlib.Path(args.folder, f"digests-{args.phase}.json").write_text(json.dumps(digests))


PHASES = {"whole": whole, "killed": killed, "resumed": resumed}


class Net(nn.Module):
    """Wide enough for factors to be fewer bytes, with dropout, whose random numbers must go on too."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(48, 192), nn.Linear(192, 192), nn.Linear(192, 10)
        self.scale = nn.Parameter(torch.ones(192))

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(F.dropout(torch.tanh(self.second(x)), 0.1, self.training))


class Run:
    """The training of one case."""

    def __init__(self, case, device, seed):
        scheme, rule, update, kind = case
        self.device, self.type = device, TYPES[kind]
        torch.manual_seed(seed)
        net = Net().to(device, self.type)
        self.model = psd.DistributedDataParallel(net, update=update, scheme=scheme, deterministic=True)
        name, settings = RULES[rule]
        rules = psd if update == "server" else torch.optim
        self.optimizer = getattr(rules, name)(self.model.parameters(), **settings)
        # Workers drop different numbers, and repeat them only if the generators are where they were.
        torch.manual_seed(100 * seed + psd.rank())

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + psd.rank())
            x, y = torch.randn(8, 48, generator=generator), torch.randint(0, 10, (8,), generator=generator)
            self.optimizer.zero_grad()
            answer = self.model(x.to(self.device, self.type))
            F.cross_entropy(answer.float(), y.to(self.device)).backward()
            self.optimizer.step()

    def digest(self):
        """Of the model and the optimizer's state. Every rank calls it."""
        self.model.synchronize()
        content = hashlib.sha256()
        state = self.optimizer.state_dict()["state"]
        states = sorted((index, name, value) for index, entry in state.items() for name, value in entry.items())
        for tensor in [*self.model.module.state_dict().values(), *(value for _, _, value in states)]:
            tensor = tensor.detach().cpu().contiguous()
            content.update(str(tensor.dtype).encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return content.hexdigest()


if __name__ == "__main__":
    main()
