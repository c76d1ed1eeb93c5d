"""NIXL itself: how it is loaded, and what is asked of UCX before (clients reference §8)."""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PACKAGE = "nixl_cu12"
MISSING = (
    "moves real bytes with NIXL, which is not installed here: pip install --no-deps nixl nixl-cu12 "
    "(without --no-deps it brings CUDA and torch, which are not needed)"
)
UCX_SETTINGS: Mapping[str, str] = MappingProxyType({"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,sm,self"})
"""Loopback always: UCX takes any interface otherwise. Without tcp no agent can be made."""
_QUIET: Mapping[str, str] = MappingProxyType({"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"})
"""Unless the environment says otherwise."""


def installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def load() -> Any:
    """The module with `nixl_agent`. UCX reads its environment as the first agent is made. Raises ValueError without NIXL."""
    if not installed():
        raise ValueError(f"the transfer backend nixl {MISSING}")
    os.environ.update(UCX_SETTINGS)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    return importlib.import_module(f"{PACKAGE}._api")


def errors() -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which have no base of their own."""
    bindings = importlib.import_module(f"{PACKAGE}._bindings")
    return tuple(one for one in vars(bindings).values() if isinstance(one, type) and issubclass(one, Exception))
