"""Data-parallel training with PyTorch, synchronised by Poseidon.

    import poseidon.torch as psd

    psd.init()                                   # torchrun, mpirun, srun or poseidon launch
    model = psd.DistributedDataParallel(model)   # instead of torch's
    ...                                          # the training loop stays as it is

A parameter's gradient leaves the moment its backward ends and travels while the layers below are
computed. Linear layers whose factors (gradient of the output, input) are smaller than their gradient
go as factors; their weight's gradient is never computed locally. When ``backward`` returns, every
``grad`` is the mean over all workers, bit by bit the same on each.

With ``update="server"`` and one of ``psd.SGD``, ``psd.Adam``, ``psd.AdamW`` the shards take the
steps: each keeps the optimizer's state of its part only, parameters come back instead of gradients,
and a layer is awaited when its next forward begins.
"""

from poseidon._c10d_register import register
from poseidon.torch._checkpoint import load, save
from poseidon.torch._job import barrier, init, is_initialized, rank, shutdown, world_size
from poseidon.torch._layers import plan
from poseidon.torch._parallel import DistributedDataParallel
from poseidon.torch._replicas import ReplicasDiffer
from poseidon.torch._report import metrics_address, record, report, scalar
from poseidon.torch._rules import SGD, Adam, AdamW
from poseidon.torch._saving import Saving

# So that torch.distributed knows "poseidon" also where the package was not installed, only found.
register()

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "DistributedDataParallel",
    "ReplicasDiffer",
    "Saving",
    "barrier",
    "init",
    "is_initialized",
    "load",
    "metrics_address",
    "plan",
    "rank",
    "record",
    "report",
    "save",
    "scalar",
    "shutdown",
    "world_size",
]
