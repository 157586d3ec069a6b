"""A kernel's time on this machine against MLX's own operations, both in one run, by turns.

Every launch has the same inputs, so small ones may lie in a cache; a mechanism's own `bench.py` rotates its buffers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from labkit.kernels.device_clock import device_times
from labkit.kernels.registry import Bench, Entry, dtype_name
from labkit.kernels.targets import default_target, run_on

Side = Callable[[], Sequence[mx.array]]
"""One call of what is timed."""

ROUND = 0.05
"""Seconds that the launches of a round take, about."""


@dataclass(frozen=True)
class BenchResult:
    """One problem of one kernel.

    Attributes:
        target: where the kernel ran. seconds: its median, with what the host needs for a launch where that is longer.
        baseline_seconds: that of MLX's own operations, or None.
        device_seconds, baseline_device_seconds: of one call on the device alone, waited for, or None where that cannot
            be measured (`labkit.kernels.device_clock`).
        spread: the kernel's slowest round over its fastest.
        gigabytes_per_second, gigaflops: of the least bytes and operations the problem needs, or None where not stated
            (bytes are stated for 16-bit activations only); of the device's time where it is there.
    """

    kernel: str
    problem: str
    dtype: str
    target: str
    seconds: float
    baseline_seconds: float | None
    device_seconds: float | None
    baseline_device_seconds: float | None
    spread: float
    gigabytes_per_second: float | None
    gigaflops: float | None

    @property
    def ratio(self) -> float | None:
        """How many times faster than MLX's own operations, launches and all."""
        return self.baseline_seconds / self.seconds if self.baseline_seconds else None

    @property
    def device_ratio(self) -> float | None:
        """How many times faster on the device alone."""
        both = self.baseline_device_seconds and self.device_seconds
        return self.baseline_device_seconds / self.device_seconds if both else None


def bench_kernel(
    entry: Entry,
    *,
    target: str | None = None,
    rounds: int = 7,
    progress: Callable[[str], None] | None = None,
) -> list[BenchResult]:
    """Time every problem that a kernel registers.

    Args:
        target: where the kernel runs; by default the machine's best for it.
        rounds: alternations of kernel and baseline; medians are taken over them.
        progress: told what runs next.
    """
    target = target or default_target(entry.kernel)
    dtype = entry.dtypes[-1 if target in ("metal", "cuda") else 0]
    results = []
    for problem in entry.benches:
        if progress:
            progress(f"{entry.name}: {problem.label}")
        results.append(_bench(entry, problem, dtype, target, rounds))
    return results


def _bench(entry: Entry, problem: Bench, dtype: mx.Dtype, target: str, rounds: int) -> BenchResult:
    mx.random.seed(0)
    launch = problem.make(dtype)
    mx.eval(list(launch.inputs))
    sides: dict[str, Side] = {"kernel": lambda: run_on(target, entry.kernel, launch)}
    if problem.baseline:
        sides["baseline"] = lambda: problem.baseline(launch)
    repeats = {name: _repeats(side) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(_time(side, repeats[name]))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    found = device_times({name: [side] for name, side in sides.items()}) if target == "cuda" else {}
    alone = {name: measured.us / 1e6 for name, measured in found.items()}
    taken = alone.get("kernel", medians["kernel"])
    return BenchResult(
        entry.name,
        problem.label,
        dtype_name(dtype),
        target,
        medians["kernel"],
        medians.get("baseline"),
        alone.get("kernel"),
        alone.get("baseline"),
        max(times["kernel"]) / min(times["kernel"]),
        problem.bytes / taken / 1e9 if problem.bytes and dtype.size == 2 else None,
        problem.operations / taken / 1e9 if problem.operations else None,
    )


def _repeats(side: Side) -> int:
    """How many launches fill a round; also warms up and compiles."""
    mx.eval(side())
    return max(1, int(ROUND / max(_time(side, 1), 1e-6)))


def _time(side: Side, count: int) -> float:
    """Seconds of one launch out of `count` in a row, launch cost and queueing included."""
    begin = time.perf_counter()
    for _ in range(count):
        outputs = side()
        mx.async_eval(outputs)
    mx.eval(outputs)
    return (time.perf_counter() - begin) / count
