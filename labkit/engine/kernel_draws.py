"""The next tokens of rows by two launches, whatever each row's options are: where kernels run (a GPU).

A draw is as `labkit.kernels.sampling.sample` says: it depends on the row's seed, its step and its logits alone. The
noise is not that of MLX's generator: a seed that gives one text on a CPU gives another one here, each time the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.placement import on_device
from labkit.kernels.sampling import sample

WIDE = 16
"""Entries of the smallest array of steps: MLX on CUDA keeps arrays of up to 8 bytes in the host's memory."""


class Options(NamedTuple):
    """What the kernels need of a row. `seed`: 64 bits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


def draws(
    logits: mx.array, rows: Sequence[Options], steps: Sequence[int], masks: Sequence[mx.array | None]
) -> tuple[mx.array, mx.array]:
    """The tokens of rows, uint32 [B], and their log-probabilities, fp32 [B]: not finite where none could be chosen.

    Args:
        logits: [B, V]. steps: of each row, the number of the token to choose.
        masks: each row's permitted tokens as bits, uint32 [ceil(V / 32)], lowest bit first, or None for all.
    """
    table = _table(tuple(rows))
    mask = None
    if any(one is not None for one in masks):
        everything = mx.full((-(-logits.shape[-1] // 32),), 0xFFFFFFFF, dtype=mx.uint32)
        mask = mx.stack([everything if one is None else one for one in masks])
    return sample(logits, **table.columns, step=table.steps(tuple(steps)), mask=mask)


def columns_of(rows: tuple[Options, ...]) -> dict[str, mx.array]:
    """The options of rows as `sample` takes them, [B] each, on the device."""
    return _table(rows).columns


class _Table:
    """The options of the rows of a batch as arrays, made once and kept on the device while the same rows decode."""

    def __init__(self, rows: tuple[Options, ...]):
        dtypes = mx.float32, mx.int32, mx.float32, mx.float32, mx.uint64
        values = zip(*rows, strict=True)
        self.columns = {
            name: on_device(_array(column, dtype))
            for name, column, dtype in zip(Options._fields, values, dtypes, strict=True)
        }
        self._one = mx.array(1, dtype=mx.uint32)
        self._known: tuple[int, ...] = ()
        self._counted = self._one

    def steps(self, steps: tuple[int, ...]) -> mx.array:
        """uint32 [B]; counted on by the device where each row has taken one step."""
        if steps == tuple([step + 1 for step in self._known]):
            self._counted = self._counted + self._one
        elif steps != self._known:
            padding = (0,) * max(0, WIDE - len(steps))
            self._counted = on_device(mx.array(steps + padding, dtype=mx.uint32))
        self._known = steps
        return self._counted[: len(steps)]


_made = threading.local()


def _table(rows: tuple[Options, ...]) -> _Table:
    """This thread's table of these rows: a table counts steps in arrays that no other thread may touch, and engines in
    several threads may well decode rows of equal options."""
    if not hasattr(_made, "table"):
        _made.table = lru_cache(maxsize=64)(_Table)
    return _made.table(rows)


def _array(column: tuple, dtype: mx.Dtype) -> mx.array:
    if dtype != mx.uint64:
        return mx.array(column, dtype=dtype)
    words = [
        word for value in column for word in (value & 0xFFFFFFFF, value >> 32)
    ]  # no Python int above 2^63 is taken
    return mx.array(words, dtype=mx.uint32).view(mx.uint64)
