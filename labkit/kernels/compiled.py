"""Loops of the native target: numba functions, compiled once a machine and kept in labkit's own cache folder.

| decorator | what it is for |
| --- | --- |
| `loop` | what Python calls: arrays and numbers |
| `inner` | what loops take in, and nobody else calls |
| `exact` | an `inner` whose arithmetic must not be regrouped |
| `entry` | what loops call by its symbol, and Python by `.call`: compiled once and not into each of them |

Modules that use them import numba, which takes most of a second: import them where a CPU is about to compute, never at
the top of a module that GPUs load too.
"""

from __future__ import annotations

import fcntl
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from labkit.kernels.artefacts import ArtefactCache, content_key

_log = logging.getLogger("labkit.kernels")

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may become vectors, products with sums one instruction; NaN and infinities keep their meaning."""

SOURCES = ("loops.py", "tiles.py", "vectors.py", "views.py", "compiled.py", "panels.py", "records.py", "stages.py")
"""Endings of the files whose functions are compiled into each other."""

_BARE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def loop(function: Callable) -> Callable:
    """Compile a function at its first call; it runs without Python's lock, in one thread."""
    with _own_cache() as cached:
        return _jit(function, FAST, cache=cached)


def inner(function: Callable) -> Callable:
    """Compile a function into those that call it."""
    return _jit(function, FAST, **_BARE)


def exact(function: Callable) -> Callable:
    """`inner`, every operation as it is written."""
    return _jit(function, {"nsz"}, **_BARE)


def _jit(function: Callable, fastmath: set[str], **options: bool) -> Callable:
    return numba.njit(fastmath=fastmath, error_model="numpy", nogil=True, **options)(function)


def entry(function: Callable) -> Callable:
    """Compile a function of whole numbers (addresses, sizes) now. Loops call it, its code stays its own; `.call` is the
    same for Python, without its lock.

    A loop gives an array where an address is wanted: so the array lives until the call is over, which the one whose
    address alone was taken does not.
    """
    names = list(inspect.signature(function).parameters)
    compiled = native_code(function)
    symbol = f"labkit_{function.__module__.replace('.', '_')}_{function.__name__}"
    binding.add_symbol(symbol, compiled.address)

    def called(builder, kind, arguments):
        return cgutils.get_or_insert_function(builder.module, kind, symbol)

    made = call_of(names, called)
    made.call = compiled.ctypes
    return made


def native_code(function: Callable) -> Any:
    """Compile a function of whole numbers for C: numba's object with its `address`, and `ctypes` to call it."""
    signature = types.void(*[types.int64] * len(inspect.signature(function).parameters))
    with _own_cache() as cached, _alone(function):
        return numba.cfunc(signature, fastmath=FAST, error_model="numpy", cache=cached)(function)


def call_of(names: list[str], called: Callable) -> Callable:
    """What loops write to call native code. called(builder, function type, arguments): where the code is."""

    def number(context, builder, value, kind):
        if isinstance(kind, types.Array):
            first = context.make_array(kind)(context, builder, value=value).data
            return builder.ptrtoint(first, ir.IntType(64))
        return context.cast(builder, value, kind, types.int64)

    def generate(context, builder, signature, args):
        numbers = [number(context, builder, *pair) for pair in zip(args, signature.args, strict=True)]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(names))
        builder.call(called(builder, kind, numbers), numbers)
        return context.get_dummy_value()

    def typed(context, *arguments):
        return types.void(*arguments), generate

    return intrinsic(_with_arguments(typed, names))


def _with_arguments(function: Callable, names: list[str]) -> Callable:
    """`function` as one that takes these names: numba counts an intrinsic's arguments by its signature."""
    listed = ", ".join(names)
    scope = {"function": function}
    exec(f"def call(context, {listed}): return function(context, {listed})", scope)
    return scope["call"]


@contextmanager
def _alone(function: Callable) -> Iterator[None]:
    """Of several processes that compile a function at once one does it, and the others wait and take it."""
    folder = _folder()
    if folder is None:
        yield
        return
    with (Path(folder) / f"lock-{function.__module__}.{function.__name__}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # it ends with its process however that ends
        yield


@contextmanager
def _own_cache() -> Iterator[bool]:
    """numba's own cache looks at one file, though a function is compiled together with those it calls from others: so
    the folder of all of them is named after the text of all of them. Yields whether there is such a folder."""
    kept, folder = numba.config.CACHE_DIR, _folder()
    numba.config.CACHE_DIR = folder or kept
    try:
        yield folder is not None
    finally:
        numba.config.CACHE_DIR = kept


def _announce(folder: Path) -> None:
    """What fills the cache's new folder comes later, function by function; whoever waits for it is told why."""
    _log.info("loops for this processor are compiled, once for this version: half a minute")


@cache
def _folder() -> str | None:
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for path in package.rglob("*.py") if path.name.endswith(SOURCES))
    key = content_key(numba.__version__, *(path.read_bytes() for path in files))
    try:
        return str(ArtefactCache().get(key, _announce))
    except OSError as error:
        _log.warning("loops are compiled anew at each start, for half a minute: %s", error)
        return None
