"""What this process may send to other hosts."""

import sys
from typing import Any, List, Optional


def set_bandwidth_budget(rate: Optional[str]) -> None:
    """Changes what this process may send to other hosts, from now on.

    ``rate`` is written like ``"400mbit"``; ``None`` is no limit. Other processes keep their budgets. A model of
    ``poseidon.torch`` and a process group of ``torch.distributed`` have connections of their own: a process that has
    both may send this much over each. Before there are connections, set ``POSEIDON_BANDWIDTH_BUDGET`` instead.
    """
    links = _links()
    if not links:
        raise RuntimeError(
            "this process is in no job and no process group of Poseidon: "
            "set POSEIDON_BANDWIDTH_BUDGET, or call this after init"
        )
    for link in links:
        link.set_bandwidth_budget(rate)


def _links() -> List[Any]:
    """A session or a group on all connections of this process. What was not imported has made none."""
    found: List[Any] = []
    job = sys.modules.get("poseidon.torch._job")
    if job is not None and job.Job.is_here():
        found.append(job.Job.get())
    c10d = sys.modules.get("poseidon._c10d")
    if c10d is not None:
        found.extend(operations.group() for operations in list(c10d._groups))
    return found
