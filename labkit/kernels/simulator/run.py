"""Run a Metal text on the CPU: build it, lend it buffers, and put what was found into words."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np

from labkit.kernels.artefacts import ArtefactCache
from labkit.kernels.signature import Launch, MetalText, Parameter, parameters, threadgroup_size
from labkit.kernels.simulator import faults as kinds
from labkit.kernels.simulator.compiler import Build, build_library
from labkit.kernels.simulator.diagnosis import diagnose
from labkit.kernels.simulator.faults import Fault, KernelFault
from labkit.kernels.simulator.library import INITIALISED_OUTPUT, INPUT, OUTPUT, BufferSpec, Library
from labkit.kernels.simulator.symbols import SymbolTable
from labkit.kernels.simulator.traffic import Traffic, count_traffic
from labkit.kernels.simulator.translation import translate

THREADGROUP_MEMORY_LIMIT = 32 * 1024
THREADS_LIMIT = 1024
RESIDENT_THREADS_LIMIT = 1 << 18

Order = Literal["forward", "reverse"] | int
"""A schedule: threadgroups, simdgroups and lanes in ascending order, descending, or shuffled from a seed."""

# What makes the values of a run meaningless: nothing is handed out then.
STOPPING = {
    kinds.OUT_OF_BOUNDS_READ,
    kinds.OUT_OF_BOUNDS_WRITE,
    kinds.WRITE_TO_INPUT,
    kinds.MISALIGNED,
    kinds.DEADLOCK,
    kinds.CRASH,
    kinds.STOPPED,
}


@dataclass(frozen=True)
class Run:
    """One launch in the simulator.

    Attributes:
        outputs: the output arrays; empty if the launch was stopped.
        faults: what the checks found; a plain run only knows what stopped it.
        traffic: what was read and written; None for a plain run.
        seconds: time of the launch itself, without building.
    """

    kernel: str
    outputs: list[mx.array]
    faults: list[Fault]
    traffic: Traffic | None
    seconds: float

    @property
    def clean(self) -> bool:
        """No fault was found."""
        return not self.faults

    def raise_for_faults(self) -> Run:
        """This run, if it is clean. Raises KernelFault otherwise."""
        if self.faults:
            raise KernelFault(self.faults)
        return self

    def __str__(self) -> str:
        head = f"{self.kernel}: clean" if self.clean else "\n".join(str(fault) for fault in self.faults)
        return head if self.traffic is None else f"{head}\n{self.traffic}"


def run(
    text: MetalText,
    launch: Launch,
    *,
    check: bool = False,
    order: Order = "forward",
    resident: bool = False,
    in_place: Mapping[str, str] | None = None,
    time_limit: float | None = 600,
    compiler: tuple[str, ...] = (),
    portable_switch: bool = False,
) -> Run:
    """Run one launch of a Metal text on the CPU.

    Args:
        check: look for faults and count traffic (9 to 19 times slower than a plain run).
        order: the schedule; a correct kernel gives the same bits under each.
        resident: keep all threadgroups alive at once, for kernels with a grid-wide barrier.
        in_place: inputs that lie in an output's memory, by the output's name: a thread that reads there what another
            one writes is then a race.
        time_limit: seconds until the launch is stopped; None for no limit.
        compiler: the C++ compiler's command; by default the first one found.
        portable_switch: switch between threads by ucontext instead of by hand-written assembly.

    Raises:
        KernelFault: the launch breaks one of Metal's limits.
        ValueError: `in_place` of two sizes, or a resident grid that is too large.
        CompileError, CompilerMissing: the text was not built.
    """
    _check_limits(text, launch, resident)
    build = Build(check, tuple(compiler), portable_switch)
    if launch.verbose:
        print(translate(text, launch))
    library = _library(text, launch, build)
    memory = sum(array.bytes for array in library.storage)
    if memory > THREADGROUP_MEMORY_LIMIT:
        message = f"{memory} bytes of threadgroup memory; Metal gives {THREADGROUP_MEMORY_LIMIT}"
        raise KernelFault([Fault(kinds.THREADGROUP_MEMORY, text.name, message, library.storage[0].line)])
    found = parameters(text, launch)
    mx.eval(list(launch.inputs))
    specs = _sharing(_buffers(text, launch, found), found, in_place or {})
    number = {"forward": 0, "reverse": 1}.get(order, 2)
    seed = order if isinstance(order, int) else 0
    begin = time.perf_counter()
    result, raw, sites = library.launch(
        specs,
        launch.grid,
        launch.threadgroup,
        check=check,
        order=number,
        seed=seed,
        resident=resident,
        time_limit=time_limit,
    )
    seconds = time.perf_counter() - begin
    symbols = _symbols(library.path)
    faults = diagnose(text, launch, found, library, result, symbols)
    stopped = any(fault.kind in STOPPING for fault in faults)
    outputs = [] if stopped else _outputs(launch, raw)
    traffic = count_traffic(text, found, library, result, sites, symbols) if check else None
    return Run(text.name, outputs, faults, traffic, seconds)


def _check_limits(text: MetalText, launch: Launch, resident: bool) -> None:
    threads = math.prod(threadgroup_size(launch))
    if threads > THREADS_LIMIT:
        message = f"{threads} threads in a threadgroup; Metal allows {THREADS_LIMIT}"
        raise KernelFault([Fault(kinds.TOO_MANY_THREADS, text.name, message)])
    if resident and math.prod(launch.grid) > RESIDENT_THREADS_LIMIT:
        raise ValueError(
            f"kernel {text.name}: resident mode keeps {math.prod(launch.grid)} threads alive at once, more than the "
            f"{RESIDENT_THREADS_LIMIT} it has room for: use a smaller grid, as a persistent kernel does"
        )


def _shape_key(launch: Launch) -> tuple:
    """What of a launch shapes the translation."""
    inputs = tuple((str(a.dtype), a.ndim) for a in launch.inputs)
    template = tuple((name, type(value).__name__, str(value)) for name, value in launch.template)
    return inputs, tuple(str(d) for d in launch.output_dtypes), template


_loaded: dict[tuple, Library] = {}


def _library(text: MetalText, launch: Launch, build: Build) -> Library:
    key = (text, _shape_key(launch), build)
    if key not in _loaded:
        unit = translate(text, launch)
        try:
            _loaded[key] = Library(build_library(unit, build, _cache()))
        except OSError:  # trimmed from the cache by another process between finding and loading it
            _loaded[key] = Library(build_library(unit, build, _cache()))
    return _loaded[key]


@lru_cache(maxsize=1)
def _cache() -> ArtefactCache:
    return ArtefactCache()


@cache
def _symbols(library: Path) -> SymbolTable:
    return SymbolTable(library)


def _buffers(text: MetalText, launch: Launch, found: list[Parameter]) -> list[BufferSpec]:
    views = [_host_view(array) for array in launch.inputs]
    # Where MLX would copy to rows in order, so do we; elsewhere the kernel sees the array's own layout.
    if text.ensure_row_contiguous:
        views = [np.ascontiguousarray(view).reshape(view.shape) for view in views]
    specs = []
    for parameter in found:
        if parameter.kind == "output":
            dtype, shape = launch.output_dtypes[parameter.array], launch.output_shapes[parameter.array]
            if launch.init_value is None:
                specs.append(BufferSpec(math.prod(shape) * dtype.size, dtype.size, OUTPUT))
            else:
                filled = _host_view(mx.full(shape, launch.init_value, dtype=dtype))
                specs.append(BufferSpec(np.ascontiguousarray(filled), dtype.size, INITIALISED_OUTPUT))
            continue
        view = views[parameter.array]
        if parameter.kind == "shape":
            content = np.array(view.shape, np.int32)
        elif parameter.kind == "strides":
            content = np.array([stride // view.itemsize for stride in view.strides], np.int64)
        elif parameter.kind == "ndim":
            content = np.array([view.ndim], np.int32)
        else:
            content = _memory_of(view)
        specs.append(BufferSpec(content, content.itemsize, INPUT))
    return specs


def _sharing(specs: list[BufferSpec], found: list[Parameter], in_place: Mapping[str, str]) -> list[BufferSpec]:
    """Inputs in outputs' memory: the outputs hold their content when the launch begins."""
    at = {parameter.name: index for index, parameter in enumerate(found)}
    for old, new in in_place.items():
        source, target = at[old], at[new]
        if specs[source].content.nbytes != specs[target].content:
            raise ValueError(f"input {old} and output {new} are not of one size: neither is the other in place")
        specs[target] = replace(specs[target], content=specs[source].content, kind=INITIALISED_OUTPUT)
        specs[source] = replace(specs[source], lies_in=target)
    return specs


def _host_view(array: mx.array) -> np.ndarray:
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
        mx.eval(array)
    view = np.array(array, copy=False)
    return view if all(stride >= 0 for stride in view.strides) else np.ascontiguousarray(view)


def _memory_of(view: np.ndarray) -> np.ndarray:
    """The memory from the first to the last element of a view, gaps included."""
    if view.flags.c_contiguous:
        return view
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    size = last // view.itemsize + 1 if view.size else 0
    raw = ctypes.string_at(view.ctypes.data, size * view.itemsize)
    return np.frombuffer(raw, view.dtype)


def _outputs(launch: Launch, raw: list[np.ndarray]) -> list[mx.array]:
    arrays = []
    for data, shape, dtype in zip(raw, launch.output_shapes, launch.output_dtypes, strict=True):
        stored = np.uint16 if dtype == mx.bfloat16 else np.dtype(str(dtype).removeprefix("mlx.core.").rstrip("_"))
        array = mx.array(data.view(stored).reshape(shape))
        arrays.append(array.view(mx.bfloat16) if dtype == mx.bfloat16 else array)
    return arrays
