"""Makes ``torch.distributed`` know the backend ``poseidon``.

torch calls ``register`` when it is imported (the entry point ``torch.backends``), so nothing heavy is imported here:
the backend itself comes with the first process group that uses it.
"""


def register():
    """Registers the backend. Calling it again changes nothing."""
    try:
        import torch.distributed as dist
    except ImportError:
        return
    if not dist.is_available() or "POSEIDON" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("poseidon", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options, backend_options):
    from poseidon._c10d import create

    return create(options)
