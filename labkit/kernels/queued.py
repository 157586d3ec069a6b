"""Time of a device kernel from many launches queued in one evaluation, on buffers that no cache holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

LAST_CACHE = 60 << 20
"""Bytes of an H200's L2: buffers rotate through twice as much."""


def copies_for(nbytes: int) -> int:
    """How many sets of buffers of `nbytes` a rotation needs so that none is in cache when its turn comes."""
    return max(2, math.ceil(2 * LAST_CACHE / max(nbytes, 1)) + 1)


def queued(calls: Sequence[Callable[[], Sequence[mx.array]]], *, launches: int = 64, rounds: int = 5) -> float:
    """Seconds a call takes when many are queued: the median over rounds of one evaluation's time over its calls.

    Args:
        calls: the same work on different buffers, by turns.
        launches: calls in one evaluation. rounds: evaluations, after one that is not counted.

    The calls depend on nothing, so that the device may overlap them; the host's cost to launch is inside where it is
    the larger: compare with an empty kernel's time.
    """
    times = []
    for round_ in range(rounds + 1):
        outputs = [array for i in range(launches) for array in calls[i % len(calls)]()]
        begin = time.perf_counter()
        mx.eval(outputs)
        mx.synchronize()
        if round_:
            times.append((time.perf_counter() - begin) / launches)
    return statistics.median(times)
