"""Prompts' beginnings, kept: a hash chain of blocks in memory and on disk, exact for every kind of cache.

`store` is the door, `shared` and `private` are what it opens. `hashing`, `grid` and `chains` say when two prefixes are
the same; `codec` turns caches into bytes and back; `retention` and `tree` decide which states to keep; `tiers` keeps
records in `memory` and, through a `writer`, in a `disk` tier's `folder`. Names are imported on first use: a process
that only writes files needs no MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "PrefixStore": "store",
    "Committed": "shared",
    "Lease": "lease",
    "Retention": "retention",
    "Grid": "grid",
}

__all__ = ["Committed", "Grid", "Lease", "PrefixStore", "Retention"]

if TYPE_CHECKING:
    from labkit.engine.prefix.grid import Grid
    from labkit.engine.prefix.lease import Lease
    from labkit.engine.prefix.retention import Retention
    from labkit.engine.prefix.shared import Committed
    from labkit.engine.prefix.store import PrefixStore


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.engine.prefix' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.engine.prefix.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
