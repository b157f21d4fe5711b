"""Poseidon makes data-parallel training scale on ordinary Ethernet.

``poseidon.torch`` is the plug-in for PyTorch. This module has what every framework shares: the
session and the exceptions, which carry the facts (``node``, ``layer``, ``chunk``, ``clock``) as
attributes where there are any. ``set_bandwidth_budget`` changes what this process may send.
"""

from poseidon._budget import set_bandwidth_budget

__all__ = [
    "AbortedError",
    "CheckpointError",
    "ConfigError",
    "ConnectionError",
    "LostError",
    "ModelMismatchError",
    "PoseidonError",
    "ProtocolError",
    "Session",
    "TimeoutError",
    "UsageError",
    "__version__",
    "set_bandwidth_budget",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from poseidon._native import (
        AbortedError,
        CheckpointError,
        ConfigError,
        ConnectionError,
        LostError,
        ModelMismatchError,
        PoseidonError,
        ProtocolError,
        Session,
        TimeoutError,
        UsageError,
        __version__,
    )


def __getattr__(name):
    # Not before it is used: torch imports this package to learn of its backend.
    if name in __all__:
        from poseidon import _native

        return getattr(_native, name)
    raise AttributeError(f"module 'poseidon' has no attribute '{name}'")
