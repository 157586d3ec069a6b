"""What one forward reads and writes of the caches: their memory, with room for the new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, Recurrent
from labkit.caches.contiguous import Columns
from labkit.models.hybrid.native.records import CACHE, address
from labkit.models.hybrid.native.spans import Spans


class CacheRecords:
    """A record a layer, of all rows, and the arrays that the records name."""

    def __init__(self, caches: Sequence[Cache], spans: Spans):
        self._spans = spans
        self._held: list[np.ndarray] = []
        self._recorded: list[tuple[Recurrent, np.ndarray, np.ndarray]] = []
        records = [self._columns(cache) if isinstance(cache, Columns) else self._states(cache) for cache in caches]
        # Addresses, and the bytes from row to row of what lies there.
        self._first, self._row = np.array(records, np.int64).reshape(-1, 2, len(CACHE.names)).swapaxes(0, 1)

    def from_row(self, row: int) -> np.ndarray:
        """CACHE [layers], as if this row were the first."""
        return np.ascontiguousarray(self._first + row * self._row).view(CACHE)

    def record(self) -> None:
        """Give the caches what a checkpoint wants, once the forward is over."""
        for cache, tails, states in self._recorded:
            cache.record(0, mx.array(tails))
            cache.record(1, mx.array(states))

    def _columns(self, cache: Columns) -> tuple[int, ...]:
        keys, values, first, column = _columns(cache, self._spans)
        named, rest = (keys, values, first, column), [0] * 5
        self._held += named
        at, row = [address(array) for array in named], [array.strides[0] for array in named]
        return *at[:2], keys.shape[2], *at[2:], *rest, *row[:2], 0, *row[2:], *rest

    def _states(self, cache: Recurrent) -> tuple[int, ...]:
        spans = self._spans
        named, rest = [*cache.host_states(spans.count)], [0] * 5
        recorded, recording = 0, [0, 0]
        if cache.recording and spans.whole:
            # The cache may be asked to keep some of the tokens only.
            recorded = spans.length
            tails, states = (np.empty((spans.count, recorded, *x.shape[1:]), np.float32) for x in named)
            self._recorded.append((cache, tails, states))
            named, recording = [*named, states, tails], []
        self._held += named
        at, row = [address(array) for array in named], [array.strides[0] for array in named]
        at, row = at + recording, row + recording
        return *rest, *at[:2], recorded, *at[2:], *rest, *row[:2], 0, *row[2:]


def _columns(cache: Columns, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buffers with room for the tokens; for each row its first column in use, and that of its first new token.

    Rows stay right-justified: those that take fewer tokens than the longest move to the right first.
    """
    filled = cache.size()
    if not isinstance(cache, BatchedContiguous):
        keys, values = cache.host_columns(spans.longest, spans.count)
        return keys, values, np.zeros(spans.count, np.int64), np.full(spans.count, filled)
    padding = np.asarray(cache.left_padding).astype(np.int64)
    if spans.whole:
        keys, values = cache.host_columns(spans.length, spans.count)
        return keys, values, padding, np.full(spans.count, filled)
    shift = spans.shift
    start = min(filled, *padding[shift > 0]) if shift.any() else filled
    keys, values = cache.host_columns(spans.length, spans.count, start=int(start))
    for row in np.flatnonzero(shift):
        begin, by = int(padding[row]), int(shift[row])
        if begin < filled:
            for buffer in (keys, values):
                buffer[row, :, begin + by : filled + by] = buffer[row, :, begin:filled].copy()
    return keys, values, padding + shift, filled + shift + spans.first
