"""Loops of the native target: numba functions, compiled once a machine and kept in labkit's own cache folder.

Modules that use `loop` import numba, which takes most of a second: import them where a CPU is about to compute, never
at the top of a module that GPUs load too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numba

from labkit.kernels.artefacts import ArtefactCache, content_key

Function = TypeVar("Function", bound=Callable)

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may become vectors, products with sums one instruction; NaN and infinities keep their meaning."""

SOURCES = ("loops.py", "tiles.py", "vectors.py", "compiled.py")
"""Endings of the files whose functions are compiled into each other."""


def loop(function: Function) -> Function:
    """Compile a function over arrays and numbers at its first call; it runs without Python's lock, in one thread.

    numba's own cache looks at one file, though a function is compiled together with those it calls from others: so the
    folder of all of them is named after the text of all of them.
    """
    return _compiled(function, FAST)


def exact(function: Function) -> Function:
    """`loop` for arithmetic whose order matters: nothing is regrouped."""
    return _compiled(function, {"nsz"})


def _compiled(function: Function, fastmath: set[str]) -> Function:
    kept = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_folder())
    try:
        return numba.njit(nogil=True, fastmath=fastmath, error_model="numpy", cache=True)(function)
    finally:
        numba.config.CACHE_DIR = kept


@cache
def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for path in package.rglob("*.py") if path.name.endswith(SOURCES))
    key = content_key(numba.__version__, *(path.read_bytes() for path in files))
    return ArtefactCache().get(key, lambda folder: None)
