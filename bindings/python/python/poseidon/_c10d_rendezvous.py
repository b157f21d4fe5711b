"""How the ranks of a process group find each other: over links that are there, or over new ones."""

import contextlib
import socket
import time
import uuid
from datetime import timedelta
from typing import Any, List, NamedTuple

import torch.distributed as dist

from poseidon import _native

# How long a rank that finds an old address waits before it looks again.
PAUSE = 0.1

# What rank 0 leaves in the store if the group is to share links that are there.
SHARED = "shared"


def rendezvous(store, rank, ranks, timeout, others):
    """The group of those who share `store`, if all of them come within `timeout`.

    ``others`` are the operations of the groups this process has already.
    """
    key, name = "poseidon", "c10d"
    names = [f"rank {r}" for r in ranks]
    patience = timeout.total_seconds()
    if rank == 0:
        linked = _linked(others, ranks[rank], ranks)
        if linked is None:
            host = _native.Host(_near(store), name, patience)
            store.set(key, f"{host.address} {host.secret}")
            group = _native.Group(rank, host.address, name, host.secret, names, patience, host)
        else:
            token = uuid.uuid4().hex
            store.set(key, f"{SHARED} {linked.identity} {token}")
            group = linked.subgroup(token, ranks, names, patience)
        with contextlib.suppress(RuntimeError):
            # The next group of this store should not find it. Not every store can forget.
            store.delete_key(key)
        return group
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=left))
        except dist.DistStoreError:
            break
        # What is found may be from a group that was here before: then rank 0 is still on its way.
        found = store.get(key).decode().split()
        if found[0] == SHARED:
            _, identity, token = found
            linked = _linked(others, ranks[rank], ranks, identity)
            if linked is not None:
                return linked.subgroup(token, ranks, names, left)
        else:
            address, secret = found
            if _native.Host.is_open(address, name, secret):
                return _native.Group(rank, address, name, secret, names, patience)
        time.sleep(PAUSE)
    raise _native.ConnectionError(f"{names[0]} did not come to make a process group within {patience:g} s")


class _Linked(NamedTuple):
    """A group whose links another one can share."""

    group: Any
    ranks: List[int]
    identity: str

    def subgroup(self, token, ranks, names, patience):
        channel = f"process group {token[:8]} of {len(ranks)} ranks"
        return self.group.subgroup(channel, [self.ranks.index(r) for r in ranks], names, patience)


def _linked(others, me, ranks, identity=None):
    """A group of this process, which is global rank `me`, that has links to all of `ranks`: the largest, or one with
    this identity."""
    found = []
    for operations in others:
        if operations.ranks[operations.rank] == me and set(ranks) <= set(operations.ranks):
            its = operations.links()
            if its is not None and identity in (None, its):
                found.append(_Linked(operations.group(), operations.ranks, its))
    return max(found, key=lambda linked: len(linked.ranks), default=None)


def _near(store):
    """An address that all ranks reach: the store's own, if it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return f"{store.host}:{store.port}"
    try:
        socket.getaddrinfo(socket.gethostname(), 1)
        return f"{socket.gethostname()}:1"
    except OSError:
        return "127.0.0.1:1"
