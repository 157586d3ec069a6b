"""The fastest rates that this device shows: bytes a second from memory, operations a second in a matrix product.

A floor is measured for the access pattern at hand, never read off a data sheet: it is the best that any of several
plain programs reaches here. Each program walks over buffers that are together larger than the caches, so that nothing
it reads is still there from the round before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from labkit.devices import Device, this_device
from labkit.measure.paired import time_call


@dataclass(frozen=True)
class Rate:
    """The rate of one access pattern.

    Attributes:
        value: the best rate, per second: bytes or operations.
        program: which program reached it.
        programs: every program's best rate.
    """

    value: float
    program: str
    programs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Floors:
    """What this device can do at best.

    Attributes:
        device: the device measured.
        read: bytes a second when a large buffer is read once.
        matmul: operations a second of a large square matrix product (a multiply and an add count as two).
    """

    device: Device
    read: Rate
    matmul: Rate

    def seconds(self, bytes: float = 0.0, operations: float = 0.0) -> float:
        """The least time for that work: memory and arithmetic may overlap, so the longer of the two."""
        return max(bytes / self.read.value, operations / self.matmul.value)


def measure(*, quick: bool = True) -> Floors:
    """Measure this device. Quick takes about two seconds on two CPU cores; otherwise larger buffers, more rounds."""
    return Floors(this_device(), read_rate(quick=quick), matmul_rate(quick=quick))


def read_rate(*, quick: bool = True) -> Rate:
    """Bytes a second, reading buffers that are together at least four times the last cache and 128 MiB or more."""
    import mlx.core as mx

    on_gpu = this_device().kind != "cpu"
    total = max(128 << 20, 4 * last_cache_bytes()) * (8 if on_gpu else 1) * (1 if quick else 4)
    each, rounds = total // 4, 6 if quick else 40
    arrays = [mx.arange(each // 4, dtype=mx.float32) for _ in range(4)]
    mx.eval(arrays)
    programs = {"mlx sum": _best(cycle([lambda x=x: mx.sum(x) for x in arrays]), rounds, each)}
    # A copy reads and writes: it may well outrun a reduction, whose adds can be the slower part.
    copies = cycle([lambda x=x: x + 1 for x in arrays])
    programs["mlx copy, read and written"] = _best(copies, rounds, 2 * each)
    if not on_gpu:
        # MLX computes on one core here; numpy's max releases the interpreter, so threads reach what all cores can read.
        host = [np.asarray(x) for x in arrays]
        cores = os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            parts = [np.array_split(x, cores) for x in host]
            calls = cycle([lambda p=p: list(pool.map(np.max, p)) for p in parts])
            programs[f"numpy max, {cores} threads"] = _best(calls, 3 * rounds, each)
    return _fastest(programs)


def matmul_rate(*, quick: bool = True) -> Rate:
    """Operations a second of a square product: bfloat16 and float32 on a GPU, float32 on a CPU (MLX's and BLAS's)."""
    import mlx.core as mx

    on_gpu = this_device().kind != "cpu"
    size = (4096 if quick else 8192) if on_gpu else (512 if quick else 1536)
    operations, rounds = 2 * size**3, 5 if quick else 15
    programs = {}
    for dtype in (mx.bfloat16, mx.float32) if on_gpu else (mx.float32,):
        # On a CPU MLX's product is many times slower than BLAS's: a smaller one says so as well.
        own = size if on_gpu else size // 2
        a, b = (mx.random.normal((own, own)).astype(dtype) for _ in range(2))
        mx.eval(a, b)
        name = f"mlx {str(dtype).removeprefix('mlx.core.')}"
        programs[name] = _best(cycle([lambda a=a, b=b: a @ b]), rounds if on_gpu else 2, 2 * own**3)
    if not on_gpu:
        left, right = (np.random.default_rng(seed).standard_normal((2 * size,) * 2, np.float32) for seed in (0, 1))
        programs["BLAS float32"] = _best(cycle([lambda: left @ right]), rounds, 8 * operations)
    return _fastest(programs)


def last_cache_bytes() -> int:
    """Size of the CPU's last-level cache, in bytes; 64 MiB where the system does not say."""
    found = 0
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found = max(found, int(text.rstrip("KM")) * unit)
    return found or 64 << 20


def _best(calls: Iterator[Callable[[], Any]], rounds: int, work: float) -> float:
    time_call(next(calls))
    return work / min(time_call(next(calls)) for _ in range(rounds))


def _fastest(programs: dict[str, float]) -> Rate:
    name = max(programs, key=programs.__getitem__)
    return Rate(programs[name], name, programs)
