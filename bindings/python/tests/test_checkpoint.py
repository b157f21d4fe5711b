"""Checkpoints of `psd.save`: exact, whole, and readable by others."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from cluster import attempt, run
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[3]


class Net(nn.Module):
    """All kinds of tensors: some go by factors, one is frozen, buffers are of several types."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(48, 192)
        self.norm = nn.BatchNorm1d(192)
        self.second = nn.Linear(192, 10).to(dtype)
        self.frozen = nn.Parameter(torch.ones(192), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("doubles", torch.full((2,), 0.1, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0, 4))

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)) * self.frozen)
        return self.second(x.to(self.second.weight.dtype)).float()


def begin(psd, seed, update, scheme, optimizer, dtype):
    torch.manual_seed(seed)
    model = psd.DistributedDataParallel(Net(dtype), update=update, scheme=scheme, deterministic=True)
    where = psd if update == "server" else torch.optim
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = dict(lr=0.02, momentum=0.9) if optimizer == "SGD" else dict(lr=1e-3)
    return model, getattr(where, optimizer)(trained, **settings)


def train(psd, model, stepper, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + psd.rank())
        x, y = torch.randn(8, 48, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        stepper.zero_grad()
        F.cross_entropy(model(x), y).backward()
        stepper.step()


def digest(model, stepper):
    """Of the model and the optimizer's state, as rank 0 has them. Every worker calls it."""
    content = hashlib.sha256()
    state = stepper.state_dict()["state"]
    states = sorted((index, name, value) for index, entry in state.items() for name, value in entry.items())
    tensors = [*model.module.state_dict().values(), *(value for _, _, value in states)]
    for tensor in tensors:
        content.update(str(tensor.dtype).encode() + tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


# Any two settings meet in one of these.
KINDS = [
    ("worker", "ps", "SGD", torch.float32),
    ("worker", "auto", "AdamW", torch.bfloat16),
    ("server", "ps", "AdamW", torch.bfloat16),
    ("server", "auto", "SGD", torch.bfloat16),
    ("server", "auto", "AdamW", torch.float32),
]


def through(kinds):
    """200 steps of each kind, never interrupted."""
    import poseidon.torch as psd

    psd.init()
    digests = []
    for kind in kinds:
        model, stepper = begin(psd, 0, *kind)
        train(psd, model, stepper, range(200))
        digests.append(digest(model, stepper))
        assert ("sfb" in {row[2] for row in model.sessions_plan()}) == (kind[1] == "auto")
        model.close()
    psd.shutdown()
    return digests


def killed(folder, kinds):
    """100 steps of each kind, and a death that nobody is told of."""
    import poseidon.torch as psd

    psd.init()
    for number, kind in enumerate(kinds):
        model, stepper = begin(psd, 0, *kind)
        train(psd, model, stepper, range(100))
        psd.save(f"{folder}/{number}", model, stepper, step=100, epoch=number, rates=(0.1, None), seen={3: [True]})
        there = digest(model, stepper)
        if psd.rank() == 0:
            Path(folder, f"digest-{number}").write_text(there)
        if number + 1 == len(kinds):
            train(psd, model, stepper, range(100, 110))
            os.kill(os.getpid(), signal.SIGKILL)
        model.close()


def resumed(folder, kinds, until=200):
    """Goes on from there, in another model."""
    import poseidon.torch as psd

    psd.init()
    digests = []
    for number, kind in enumerate(kinds):
        model, stepper = begin(psd, 1, *kind)
        fresh = digest(model, stepper)
        notes = psd.load(f"{folder}/{number}", model, stepper)
        assert notes == {"epoch": number, "rates": (0.1, None), "seen": {3: [True]}, "step": 100}
        assert digest(model, stepper) == Path(folder, f"digest-{number}").read_text() != fresh
        train(psd, model, stepper, range(notes["step"], until))
        digests.append(digest(model, stepper))
        model.close()
    psd.shutdown()
    return digests


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Places of runs of two workers that were killed, by the number of their kind."""
    folder = tmp_path_factory.mktemp("killed")
    for status, _, errors in attempt(killed, 2, folder=str(folder), kinds=KINDS):
        assert status == -signal.SIGKILL, errors
    return folder


def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(saved):
    expected = run(through, 2, kinds=KINDS)
    assert len(set(expected[0])) == len(KINDS), "kinds that end alike show nothing"
    assert run(resumed, 2, folder=str(saved), kinds=KINDS)[0] == expected[0]


def test_any_number_of_workers_loads_it(saved):
    for workers in (1, 3):
        run(resumed, workers, folder=str(saved), kinds=KINDS[:4], until=101)


@pytest.fixture(scope="module")
def poseidon():
    """The command `poseidon checkpoint` of this checkout."""
    subprocess.run(["cargo", "build", "--quiet", "--package", "poseidon-cli", "--features", "one-build"], cwd=ROOT, check=True)
    command = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "debug", "poseidon")
    return lambda *words: subprocess.run([command, "checkpoint", *map(str, words)], capture_output=True, text=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_command_verifies_it_and_plain_torch_reads_its_export(saved, poseidon, tmp_path):
    import safetensors.torch
    import torch.distributed.checkpoint as dcp

    for number, (*_, dtype) in enumerate(KINDS):
        place = saved / str(number)
        verified = poseidon("verify", place)
        assert verified.returncode == 0 and "step 100" in verified.stdout, verified
        facts = json.loads(poseidon("inspect", place, "--json").stdout)
        assert len(facts["parts"]) == 2 and facts["program"]["torch"]["notes"]["epoch"] == number
        exported = tmp_path / str(number)
        exported.mkdir()
        ended = poseidon("export", place, exported / "model.safetensors")
        assert ended.returncode == 0, ended
        plain = safetensors.torch.load_file(exported / "model.safetensors")
        assert plain["second.weight"].dtype == dtype and plain["norm.num_batches_tracked"].item() == 100
        net = Net(dtype)
        net.load_state_dict(plain)
        # torch's own distributed checkpoints, into a model of its own.
        state = Net(dtype).state_dict()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(exported)))
        assert state.keys() == plain.keys()
        assert all(torch.equal(value, plain[name]) for name, value in state.items())
        assert all(value.dtype == plain[name].dtype for name, value in state.items() if value.numel())


def refusals(places, kind):
    """What each worker says of each place; its model and its optimizer stay as they are."""
    import poseidon.torch as psd
    from poseidon import CheckpointError

    psd.init()
    model, stepper = begin(psd, 2, *kind)
    train(psd, model, stepper, range(2))
    before = digest(model, stepper)
    words = {}
    for name, (place, step) in places.items():
        loaded = (model, stepper)
        if name == "no such optimizer":
            loaded = model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        if name == "other groups":
            groups = [{"params": [p]} for p in model.parameters() if p.requires_grad]
            loaded = model, torch.optim.AdamW(groups)
        if name == "other model":
            loaded = psd.DistributedDataParallel(nn.Linear(48, 64)), None
        if name == "other shape":
            other = Net(torch.bfloat16)
            other.second = nn.Linear(192, 11).bfloat16()
            loaded = psd.DistributedDataParallel(other), None
        with pytest.raises(CheckpointError) as refused:
            psd.load(place, *loaded, step=step)
        words[name] = str(refused.value)
    assert digest(model, stepper) == before, "a load that was refused has changed something"
    train(psd, model, stepper, range(2, 4))
    psd.shutdown()
    return words


def test_what_cannot_be_loaded_is_refused_in_words(saved, tmp_path):
    good, folder = saved / "1", "step-000000000100"

    def copy(name):
        return Path(shutil.copytree(good, tmp_path / name), folder)

    damaged = copy("damaged") / "part-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (copy("missing") / "part-00001.safetensors").unlink()
    (copy("unfinished") / "manifest.json").unlink()
    newer = copy("newer") / "manifest.json"
    newer.write_text(newer.read_text().replace('"version": 1,', '"version": 2,'))
    old = tmp_path / "old"
    torch.save({"model": {}}, old)
    expected = {
        "damaged": ("part-00001.safetensors", "is damaged: the checksum of"),
        "missing": ("there is no complete checkpoint", "part-00001.safetensors", "is missing"),
        "unfinished": ("there is no complete checkpoint",),
        "newer": ("manifest.json", "upgrade poseidon"),
        "old": ("is a file, and checkpoints are in folders", "torch.load"),
        "no such step": ("there is no complete checkpoint of step 50", "complete are 100"),
        "no such optimizer": ("it has AdamW, this is Adam",),
        "other groups": ("another optimizer: it has groups of [6] parameters, this has groups of [1, 1, 1, 1, 1, 1]",),
        "other model": ("is of another model: layer", "the model has it, the checkpoint does not"),
        "other shape": ("layer 'second.weight': the model's has shape [11, 192], the checkpoint's [10, 192]",),
        "no optimizer": ("was not written by psd.save",),
    }
    places = {name: (str(tmp_path / name), None) for name in expected}
    for name in ("no such step", "no such optimizer", "other groups", "other model", "other shape"):
        places[name] = str(good), 50 if name == "no such step" else None
    # A checkpoint of `poseidon train` has other notes.
    foreign = copy("no optimizer") / "manifest.json"
    rewrite(foreign, lambda manifest: manifest.update(program=None))
    for rank, words in enumerate(run(refusals, 2, places=places, kind=KINDS[1])):
        for name, parts in expected.items():
            assert all(part in words[name] for part in parts), f"worker {rank}, {name}: {words[name]}"


def rewrite(path, change):
    """Changes a manifest and makes its checksum right again."""
    from poseidon import _native

    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["checksum"] = "0" * 16
    content = bytearray(json.dumps(manifest, indent=2).encode() + b"\n")
    tensor = torch.frombuffer(content, dtype=torch.uint8)
    checksum = _native.checksum(tensor.data_ptr(), len(content), tensor)
    path.write_bytes(bytes(content).replace(b"0" * 16, b"%016x" % checksum, 1))


def habits(folder):
    """What else people do with `save` and `load`."""
    import poseidon.torch as psd
    from poseidon import CheckpointError

    psd.init()
    model, stepper = begin(psd, 0, "worker", "ps", "SGD", torch.float32)
    train(psd, model, stepper, range(2))
    with pytest.raises(TypeError, match="needs step="):
        psd.save(folder, model, stepper)
    with pytest.raises(CheckpointError, match="different steps: 0, 1, by rank"):
        psd.save(folder, model, stepper, step=psd.rank())
    with pytest.raises(CheckpointError, match="could not be loaded again"):
        psd.save(folder, model, stepper, step=1, note=Path("a"))
    # Optimizers that differ, as after a `join`: what is saved is rank 0's, and nothing of others is between.
    moments = [entry["momentum_buffer"] for entry in stepper.state.values()]
    for moment in moments:
        moment.fill_(psd.rank() + 1)
    psd.save(folder, model, stepper, step=1, random_states=False, mine=torch.full((2,), psd.rank()))
    assert [part.name for part in Path(folder, "step-000000000001").glob("part-*")] == ["part-00000.safetensors"]
    notes = psd.load(folder, model, stepper)
    assert notes["mine"].tolist() == [0, 0]
    for entry in stepper.state.values():
        assert torch.equal(entry["momentum_buffer"], torch.ones_like(entry["momentum_buffer"]))
    # A complete one is not written over, and is as it was.
    with pytest.raises(CheckpointError, match="step 1 has a complete checkpoint"):
        psd.save(folder, model, step=1)
    assert psd.load(folder, model, stepper, step=1)["step"] == 1
    # A worker that cannot write is an error everywhere, and the last one stays.
    blocked = f"{folder}/step-000000000002/part-00001.safetensors"
    if psd.rank() == 1:
        Path(blocked).mkdir(parents=True)
    psd.barrier()
    with pytest.raises(CheckpointError, match="part-00001.safetensors") as refused:
        psd.save(folder, model, stepper, step=2)
    assert psd.rank() == 1 or "worker 1 writes its part" in str(refused.value)
    assert psd.load(folder, model, stepper)["step"] == 1
    # Only so many stay.
    for step in (3, 4, 5):
        psd.save(folder, model, step=step, keep=2)
    steps = sorted(path.parent.name for path in Path(folder).glob("*/manifest.json"))
    assert steps == ["step-000000000004", "step-000000000005"]
    with pytest.raises(CheckpointError, match="no optimizer's state"):
        psd.load(folder, model, stepper)
    psd.load(folder, model)
    psd.shutdown()


def test_object_stores_are_places():
    """The crate's own tests speak to a store. Here it is shown that the package was built with them."""
    from poseidon import CheckpointError, _native

    with pytest.raises(CheckpointError, match="expected a bucket"):
        _native.Checkpoint("s3://")


def test_saving_is_all_or_nothing_and_says_what_it_needs(tmp_path):
    run(habits, 2, folder=str(tmp_path))
