"""Poseidon makes data-parallel training scale on ordinary Ethernet.

``poseidon.torch`` is the plug-in for PyTorch. This module has what every framework shares: the
session and the exceptions, which carry the facts (``node``, ``layer``, ``chunk``, ``clock``) as
attributes where there are any.
"""

from poseidon._native import (
    AbortedError,
    ConfigError,
    ConnectionError,
    LostError,
    PoseidonError,
    ProtocolError,
    Session,
    TimeoutError,
    UsageError,
    __version__,
)

__all__ = [
    "AbortedError",
    "ConfigError",
    "ConnectionError",
    "LostError",
    "PoseidonError",
    "ProtocolError",
    "Session",
    "TimeoutError",
    "UsageError",
    "__version__",
]
