"""Counters that the device moves on by itself: positions, counts of columns, numbers of draws."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch


def _reference(launch: Launch) -> list[mx.array]:
    counters, by, _ = launch.inputs
    return [counters + by]


COUNT_ON = Kernel(
    "count_on",
    ["counters", "by", "N"],
    ["counted"],
    """
uint i = thread_position_in_grid.x;
if (i < uint(N)) counted[i] = counters[i] + by[i];
""",
    reference=_reference,
    in_place={"counters": "counted"},
)


def count_on_call(counters: mx.array, by: mx.array) -> dict:
    """The arguments of `COUNT_ON`.

    Raises:
        ValueError: shapes or dtypes that differ, or no counters.
    """
    if counters.ndim != 1 or counters.shape != by.shape or {counters.dtype, by.dtype} != {mx.int32}:
        raise ValueError(
            f"counters and what they move by are int32 [N], not {counters.dtype} {counters.shape} and {by.dtype} "
            f"{by.shape}"
        )
    if not counters.size:
        raise ValueError("there is nothing to count: counters are int32 [N] with N of at least 1")
    group = min(-(-counters.size // 32) * 32, 1024)
    return {
        "inputs": [counters, by, counters.size],
        "grid": (-(-counters.size // group) * group, 1, 1),
        "threadgroup": (group, 1, 1),
        "output_shapes": [counters.shape],
        "output_dtypes": [mx.int32],
    }


def count_on(counters: mx.array, by: mx.array, *, target: str | None = None) -> mx.array:
    """counters + by, int32 [N], in a launch of labkit's own."""
    return COUNT_ON(**count_on_call(counters, by), target=target)[0]
