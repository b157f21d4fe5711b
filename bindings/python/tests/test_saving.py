"""Checkpoints that are written beside the training, random generators, and who reads what."""

import os
import random
import signal
import threading
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from cluster import all_say, attempt, run
from test_checkpoint import KINDS, begin, digest, train
from torch import nn
from torch.nn import functional as F

# Seconds that a thread waits for another one. None of them takes as long.
PATIENCE = 60


class Held:
    """Parts are not written before ``release`` is called."""

    def __init__(self):
        from poseidon import _native

        self._module, self._write = _native, _native.write_part
        self._released = threading.Event()
        self.asked = threading.Event()
        _native.write_part = self

    def __call__(self, *arguments):
        self.asked.set()
        assert self._released.wait(PATIENCE), "nobody has released it"
        return self._write(*arguments)

    def release(self):
        self._module.write_part = self._write
        self._released.set()


def beside(folder, kind):
    """Digests: when it was saved, and after it was loaded. The writer is held until the model is another one."""
    import poseidon.torch as psd
    from poseidon.torch._job import Job

    psd.init()
    model, stepper = begin(psd, 0, *kind)
    train(psd, model, stepper, range(3))
    there = digest(model, stepper)
    held, sessions = Held(), Job.sessions
    saving = psd.save(folder, model, stepper, step=3, wait=False)
    assert Job.sessions == sessions, "workers tell each other nothing but words"
    train(psd, model, stepper, range(3, 8))
    assert held.asked.wait(PATIENCE)
    assert not saving.done() and not list(Path(folder).glob("*/*"))
    with pytest.raises(TimeoutError, match="the checkpoint of step 3 is still being written"):
        saving.result(timeout=0.01)
    assert digest(model, stepper) != there
    held.release()
    saving.result()
    assert saving.done() and Path(folder, "step-000000000003", "manifest.json").exists()
    psd.load(folder, model, stepper)
    loaded = digest(model, stepper)
    # The end of the job waits for one that is under way.
    psd.save(folder, model, stepper, step=4, wait=False)
    psd.shutdown()
    assert Path(folder, "step-000000000004", "manifest.json").exists()
    return there, loaded


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]], ids=["worker", "server", "factors"])
def test_training_goes_on_while_a_checkpoint_of_before_is_written(tmp_path, kind):
    ended = run(beside, 3, folder=str(tmp_path), kind=kind)
    # Buffers are rank 0's.
    assert {loaded for _, loaded in ended} == {ended[0][0]}


def failing(folder):
    import poseidon.torch as psd
    from poseidon import CheckpointError

    psd.init()
    model, stepper = begin(psd, 0, *KINDS[0])
    train(psd, model, stepper, range(1))
    psd.save(folder, model, stepper, step=1)
    there = digest(model, stepper)
    if psd.rank() == 1:
        Path(f"{folder}/step-000000000002/part-00001.safetensors").mkdir(parents=True)
    psd.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        saving = psd.save(folder, model, stepper, step=2, wait=False)
        train(psd, model, stepper, range(1, 3))
        # The next one waits for the end of that.
        psd.save(folder, model, stepper, step=3).result()
        assert saving.done()
    words = [str(warning.message) for warning in seen]
    assert len(words) == 1 and words[0].startswith("the checkpoint of step 2 was not written: "), words
    for _ in range(2):
        with pytest.raises(CheckpointError, match="part-00001.safetensors"):
            saving.result()
    assert psd.load(folder, model, stepper, step=1)["step"] == 1
    # Buffers are rank 0's.
    assert psd.rank() != 0 or digest(model, stepper) == there
    psd.shutdown()
    return words[0]


def test_a_checkpoint_that_fails_beside_the_training_is_a_warning_and_an_error_for_those_who_wait(tmp_path):
    first, second = run(failing, 2, folder=str(tmp_path))
    assert "worker 1 writes its part" in first and "part-00001.safetensors" in second


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5, self.training))


def noisy(folder, first, last, dies=False):
    """Steps ``first`` to ``last`` with data and dropout by everybody's generators, then a draw from each of them."""
    import poseidon.torch as psd

    psd.init()
    # Generators of a new process are elsewhere than those of the one that has saved.
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(100 * first + psd.rank())
    model = psd.DistributedDataParallel(Noisy(), deterministic=True)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first:
        assert psd.load(folder, model, stepper)["step"] == first
    for step in range(first, last):
        x = torch.randn(8, 16) * random.random() + numpy.random.randn()
        stepper.zero_grad()
        F.cross_entropy(model(x), torch.randint(0, 4, (8,))).backward()
        stepper.step()
        if step + 1 == 5 and dies:
            saving = psd.save(folder, model, stepper, step=5, wait=False)
    if dies:
        saving.result()
        # Nobody is to hear of the other one's death before its own.
        all_say(folder, "dies", psd.rank(), 2, True)
        os.kill(os.getpid(), signal.SIGKILL)
    drawn = torch.rand(1).item(), random.gauss(0, 1), numpy.random.rand()
    ended = digest(model, stepper), drawn
    psd.shutdown()
    return ended


def test_random_generators_go_on_without_a_word_of_the_program(tmp_path):
    expected = run(noisy, 2, folder="", first=0, last=10)
    assert expected[0][1] != expected[1][1], "workers have generators of their own"
    for status, _, errors in attempt(noisy, 2, folder=str(tmp_path), first=0, last=7, dies=True):
        assert status == -signal.SIGKILL, errors
    assert run(noisy, 2, folder=str(tmp_path), first=5, last=10) == expected


def generators(folder):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(7)
    model = psd.DistributedDataParallel(nn.Linear(2, 2))
    before = torch.get_rng_state()
    psd.load(folder, model)
    others = torch.equal(torch.get_rng_state(), before)
    psd.load(folder, model, random_states=False)
    psd.shutdown()
    return others


def save_generators(folder):
    import poseidon.torch as psd

    psd.init()
    torch.manual_seed(psd.rank())
    psd.save(folder, psd.DistributedDataParallel(nn.Linear(2, 2)), step=1)
    psd.shutdown()


def test_generators_of_another_number_of_workers_are_left_alone(tmp_path):
    run(save_generators, 2, folder=str(tmp_path))
    assert run(generators, 2, folder=str(tmp_path)) == [False, False]
    assert run(generators, 1, folder=str(tmp_path)) == [True]


def counted(folder):
    """Bytes of numbers that this worker has read, and the digest."""
    import poseidon.torch as psd
    from poseidon import _native

    psd.init()
    read = {}

    class Counting:
        def __init__(self, *arguments):
            self._inner = checkpoint(*arguments)

        def read(self, layer, *which):
            content = self._inner.read(layer, *which)
            read.setdefault((layer, *which), len(content))
            return content

        def __getattr__(self, name):
            return getattr(self._inner, name)

    checkpoint, _native.Checkpoint = _native.Checkpoint, Counting
    model, stepper = begin(psd, 1, *KINDS[0])
    psd.load(folder, model, stepper)
    loaded = digest(model, stepper)
    psd.shutdown()
    return {key: size for key, size in read.items() if not key[0].startswith("(")}, loaded


def write(folder):
    import poseidon.torch as psd

    psd.init()
    model, stepper = begin(psd, 0, *KINDS[0])
    train(psd, model, stepper, range(2))
    psd.save(folder, model, stepper, step=2)
    psd.shutdown()
    return digest(model, stepper)


def test_every_number_is_read_by_one_worker(tmp_path):
    written = run(write, 2, folder=str(tmp_path))[0]
    (all_of_them, alone), *_ = run(counted, 1, folder=str(tmp_path))
    shares = run(counted, 3, folder=str(tmp_path))
    assert {alone, *(loaded for _, loaded in shares)} == {written}
    keys = [key for share, _ in shares for key in share]
    assert sorted(keys) == sorted(all_of_them), "all of them, and none of them twice"
    sizes = [sum(share.values()) for share, _ in shares]
    assert max(sizes) < sum(sizes), sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_samples_are_few_and_from_all_over_a_tensor(dtype):
    from poseidon.torch._checkpoint import _sample

    whole = torch.arange(3 * 100_000).remainder(251).to(dtype)
    sample = _sample(whole)
    assert sample.numel() == 256 * 64
    # Whatever tenth of it is another one, the sample is.
    for tenth in range(10):
        other = whole.clone()
        other[tenth * 30_000 : (tenth + 1) * 30_000] += 1
        assert not torch.equal(_sample(other), sample)
    small = torch.arange(100).to(dtype)
    assert torch.equal(_sample(small), small)
    assert _sample(torch.empty(0, 3, dtype=dtype)).numel() == 0


def test_a_sample_is_of_the_memory_as_it_lies():
    from poseidon.torch._checkpoint import _sample

    weight = torch.randn(64, 32, 5, 5).to(memory_format=torch.channels_last)
    assert _sample(weight).data_ptr() == weight.data_ptr(), "nothing is copied"
    gaps = torch.randn(300, 400)[:, ::2]
    assert _sample(gaps).numel() == 256 * 64
