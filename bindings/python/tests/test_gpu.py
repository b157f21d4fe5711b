"""Tensors on a GPU give what they give on the CPU. Two workers share one device."""

import copy

import pytest
import torch
from cluster import run
from models import Mlp, batches
from torch.nn import functional as F


def on_gpu():
    """The largest difference from one process with all samples, by update and scheme."""
    import poseidon.torch as psd

    psd.init()
    rank, world = psd.rank(), psd.world_size()
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = {}
    for update in ("worker", "server"):
        for scheme in ("ps", "sfb"):
            torch.manual_seed(0)
            alone = Mlp().cuda()
            ours = psd.DistributedDataParallel(copy.deepcopy(alone), device_ids=[0], update=update, scheme=scheme)
            where = psd if update == "server" else torch.optim
            steppers = [
                (ours, slice(8 * rank, 8 * rank + 8), where.AdamW(ours.parameters(), lr=1e-3, eps=1e-4)),
                (alone, slice(None), torch.optim.AdamW(alone.parameters(), lr=1e-3, eps=1e-4)),
            ]
            for x, y in batches("mlp", 10, 8 * world):
                for model, part, stepper in steppers:
                    stepper.zero_grad()
                    F.cross_entropy(model(x[part].cuda()), y[part].cuda()).backward()
                    stepper.step()
            ours.synchronize()
            pairs = zip(ours.parameters(), alone.parameters())
            worst[update, scheme] = max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)
    psd.shutdown()
    return worst


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_parameters_on_a_gpu():
    for worst in run(on_gpu, 2):
        assert max(worst.values()) < 1e-4, worst
