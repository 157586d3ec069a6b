"""Where a kernel's text can run, one module a target; each has `run(kernel, launch)` and `unavailable(kernel)`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from labkit.kernels.launch import Kernel
    from labkit.kernels.signature import Launch

TARGETS = ("metal", "cuda", "native", "reference", "simulator")
"""All targets, the best for a machine first: a GPU's own, then functions on the CPU, then the simulated text."""

SURE_ON_METAL = 256
"""Threads of a threadgroup that an M1 launches at the most registers a thread can have: 128 of 32 bits leave room for
384 (dougallj/applegpu)."""

Watcher = Callable[["Kernel", "Launch", list[mx.array]], None]
"""Is told of each launch, and of its outputs."""

_chosen: ContextVar[str | None] = ContextVar("labkit_kernel_target", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("labkit_kernel_watcher", default=None)


def _check_name(name: str) -> None:
    if name not in TARGETS:
        raise ValueError(f"no kernel target {name!r}; there are {', '.join(TARGETS)}")


@cache
def _module(name: str):
    return importlib.import_module(f"labkit.kernels.targets.{name}")


@contextlib.contextmanager
def use_target(name: str) -> Iterator[None]:
    """Run every kernel called inside on one target, unless a call names another.

    Raises:
        ValueError: no such target.
    """
    _check_name(name)
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every launch inside, in this thread."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@cache
def device_target() -> str | None:
    """The GPU target of MLX's default device: "metal", "cuda", or None where MLX computes on the CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda"


def target_in_use(target: str | None = None) -> str | None:
    """The target that a call is told to use, by its argument or by `use_target`, else the GPU's; None on a CPU left
    alone.

    For operations that choose among kernels before any of them is called.
    """
    return target or _chosen.get() or device_target()


def threads_that_fit(wanted: int, least: int = 32) -> int:
    """Of a threadgroup: as many as wanted, on Metal no more than every GPU launches whatever registers a text takes.

    The registers that a text needs lower the threads that Metal starts, and MLX refuses a launch of more when it is
    evaluated: 896 were left of 1,024 for a kernel of a few dozen registers on an M2 Ultra (Blaizzy/mlx-vlm #1799).

    Args:
        least: threads that the text cannot do without, such as one for each expert.
    """
    return max(least, min(wanted, SURE_ON_METAL)) if target_in_use() == "metal" else wanted


def default_target(kernel: Kernel) -> str:
    """Where a kernel runs by default: the GPU; on a CPU its native function, its reference, or the simulator."""
    if device := device_target():
        return device
    if kernel.native is not None:
        return "native"
    return "reference" if kernel.reference is not None else "simulator"


def targets_for(kernel: Kernel) -> list[str]:
    """The targets that can run a kernel on this machine."""
    return [name for name in TARGETS if not _module(name).unavailable(kernel)]


def run_on(target: str | None, kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Run a launch on a target, or on the one that applies.

    Raises:
        ValueError: no such target. RuntimeError: it is not there, with the reason.
    """
    name = target or _chosen.get() or default_target(kernel)
    _check_name(name)
    module = _module(name)
    if reason := module.unavailable(kernel):
        raise RuntimeError(f"kernel {kernel.name} cannot run on target {name!r}: {reason}")
    outputs = list(module.run(kernel, launch))
    if (watcher := _watcher.get()) is not None:
        watcher(kernel, launch, outputs)
    return outputs
