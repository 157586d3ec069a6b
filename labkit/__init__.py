"""labkit: local LLM inference with MLX, as a working engine and as a laboratory that takes it apart.

The names below are imported on first use, so that ``import labkit`` costs nothing.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

try:
    __version__ = version("labkit")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

_HOMES = {
    "load": "labkit.models",
    "LoadedModel": "labkit.models",
    "Engine": "labkit.engine",
    "Request": "labkit.engine",
    "SamplingParams": "labkit.engine",
    "Event": "labkit.engine",
}

__all__ = ["Engine", "Event", "LoadedModel", "Request", "SamplingParams", "__version__", "load"]

if TYPE_CHECKING:
    from labkit.engine import Engine, Event, Request, SamplingParams
    from labkit.models import LoadedModel, load


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
