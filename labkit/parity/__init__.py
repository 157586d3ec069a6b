"""Parity: the implementation that already does it is the oracle.

`teacher_forced(reference, candidate, windows)` lets two sides predict every token from the same prefix and reports how
far apart they are. A side is anything that gives logits for positions: mlx-lm's own model, labkit's model, transformers
on torch, or a golden file that one of them left behind.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_HOMES = {
    "teacher_forced": "teacher_forcing",
    "ParityReport": "report",
    "Form": "forms",
    "Side": "sides",
    "MlxLmSide": "sides",
    "LabkitSide": "sides",
    "GoldenSide": "goldens",
    "TorchSide": "torch_side",
    "Interval": "statistics",
    "MUTATIONS": "mutations",
    "windows_of": "windows",
}

__all__ = [
    "MUTATIONS",
    "Form",
    "GoldenSide",
    "Interval",
    "LabkitSide",
    "MlxLmSide",
    "ParityReport",
    "Side",
    "TorchSide",
    "teacher_forced",
    "windows_of",
]

if TYPE_CHECKING:
    from labkit.parity.forms import Form
    from labkit.parity.goldens import GoldenSide
    from labkit.parity.mutations import MUTATIONS
    from labkit.parity.report import ParityReport
    from labkit.parity.sides import LabkitSide, MlxLmSide, Side
    from labkit.parity.statistics import Interval
    from labkit.parity.teacher_forcing import teacher_forced
    from labkit.parity.torch_side import TorchSide
    from labkit.parity.windows import windows_of


def __getattr__(name: str):
    # Lazy, so that the torch side can be used in an environment that has torch and no MLX.
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit.parity' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.parity.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
