"""Cases of counting on the device."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.recording.counting import COUNT_ON, count_on_call
from labkit.kernels.registry import Case, Entry, Tolerance
from labkit.kernels.signature import Launch


def _launch(counters: int) -> Launch:
    """Some near the end of int32, where a number more turns over."""
    numbers = mx.random.randint(0, 1 << 20, (counters,))
    numbers[-1] = (1 << 31) - 2
    return COUNT_ON.launch(**count_on_call(numbers, mx.random.randint(0, 2, (counters,))))


ENTRIES = [
    Entry(
        COUNT_ON,
        cases=(
            Case("9 counters", lambda _: _launch(9)),
            Case("1 counter", lambda _: _launch(1)),
            Case("1060 counters, two threadgroups", lambda _: _launch(1060)),
        ),
        summary="counters of a recorded step, moved on by the device",
        dtypes=(mx.int32,),
        tolerance={mx.int32: Tolerance(0, 0)},
    ),
]
