"""A kernel's time on this machine against MLX's own operations, both in one run, by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from labkit.kernels.registry import Bench, Entry, dtype_name
from labkit.kernels.targets import default_target, run_on


@dataclass(frozen=True)
class BenchResult:
    """One problem of one kernel.

    Attributes:
        target: where the kernel ran. seconds: its median. baseline_seconds: that of MLX's own operations, or None.
        spread: the kernel's slowest round over its fastest.
        gigabytes_per_second, gigaflops: of the least bytes and operations the problem needs, or None where not stated
            (bytes are stated for 16-bit activations only).
    """

    kernel: str
    problem: str
    dtype: str
    target: str
    seconds: float
    baseline_seconds: float | None
    spread: float
    gigabytes_per_second: float | None
    gigaflops: float | None

    @property
    def ratio(self) -> float | None:
        """How many times faster than MLX's own operations."""
        return self.baseline_seconds / self.seconds if self.baseline_seconds else None


def bench_kernel(
    entry: Entry,
    *,
    dtype: mx.Dtype | None = None,
    target: str | None = None,
    rounds: int = 7,
    seconds_per_round: float = 0.05,
    progress: Callable[[str], None] | None = None,
) -> list[BenchResult]:
    """Time every problem that a kernel registers.

    Args:
        dtype: of the activations; by default the last the kernel lists on a GPU, the first on a CPU.
        target: where the kernel runs; by default the machine's best for it.
        rounds: alternations of kernel and baseline; medians are taken over them.
        seconds_per_round: each round repeats its launch for about so long.
        progress: told what runs next.
    """
    target = target or default_target(entry.kernel)
    dtype = dtype or (entry.dtypes[-1] if target in ("metal", "cuda") else entry.dtypes[0])
    results = []
    for problem in entry.benches:
        if progress:
            progress(f"{entry.name}: {problem.label}")
        results.append(_bench(entry, problem, dtype, target, rounds, seconds_per_round))
    return results


def _bench(
    entry: Entry, problem: Bench, dtype: mx.Dtype, target: str, rounds: int, seconds_per_round: float
) -> BenchResult:
    mx.random.seed(0)
    launch = problem.make(dtype)
    mx.eval(list(launch.inputs))
    sides: list[Callable[[], Sequence[mx.array]]] = [lambda: run_on(target, entry.kernel, launch)]
    if problem.baseline:
        sides.append(lambda: problem.baseline(launch))
    repeats = [_repeats(side, seconds_per_round) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, count, taken in zip(sides, repeats, times, strict=True):
            taken.append(_time(side, count))
    medians = [statistics.median(taken) for taken in times]
    return BenchResult(
        entry.name,
        problem.label,
        dtype_name(dtype),
        target,
        medians[0],
        medians[1] if problem.baseline else None,
        max(times[0]) / min(times[0]),
        problem.bytes / medians[0] / 1e9 if problem.bytes and dtype.size == 2 else None,
        problem.operations / medians[0] / 1e9 if problem.operations else None,
    )


def _repeats(side: Callable[[], Sequence[mx.array]], seconds: float) -> int:
    """How many launches fill a round; also warms up and compiles."""
    mx.eval(side())
    return max(1, int(seconds / max(_time(side, 1), 1e-6)))


def _time(side: Callable[[], Sequence[mx.array]], count: int) -> float:
    """Seconds of one launch out of `count` in a row, launch cost and queueing included."""
    begin = time.perf_counter()
    for _ in range(count):
        outputs = side()
        mx.async_eval(outputs)
    mx.eval(outputs)
    return (time.perf_counter() - begin) / count
