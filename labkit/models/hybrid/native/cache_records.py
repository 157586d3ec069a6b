"""What one forward reads and writes of the caches: their memory, with room for the new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, Recurrent
from labkit.caches.contiguous import Columns
from labkit.models.hybrid.native.records import CACHE, address
from labkit.models.hybrid.native.spans import Spans

Numbers = tuple[int, ...]
_NONE = (0,) * 5  # the fields of the other kind


class CacheRecords:
    """The arrays that a forward reads and writes. The caches hold them: records that are kept for the next forward keep
    no memory of caches that went.

    Attributes:
        first: CACHE [layers], of all rows. row: for each address in it the bytes from row to row; CACHE [layers].
    """

    def __init__(self, caches: Sequence[Cache], spans: Spans):
        self._spans = spans
        self._memory: list[ref[np.ndarray]] = []
        self._standing: list[tuple[np.ndarray, np.ndarray]] = []
        self._recorded: list[tuple[Recurrent, np.ndarray, np.ndarray]] = []
        places = [self._columns(cache) if isinstance(cache, Columns) else self._states(cache) for cache in caches]
        self.first, self.row = (np.array(numbers, np.int64).view(CACHE) for numbers in zip(*places, strict=True))

    def again(self, caches: Sequence[Cache]) -> bool:
        """Whether these caches' memory lies where the records say; then they tell where as many tokens more stand.

        For rows without padding, as many of them, and caches without a checkpoint.
        """
        memory, standing = [], []
        for cache in caches:
            if cache.kind == "recurrent":
                memory += cache.host_states(self._spans.count).arrays
            else:
                keys, values, *numbers = _columns(cache, self._spans)
                memory += (keys, values)
                standing.append(numbers)
        if any(kept() is not array for kept, array in zip(self._memory, memory, strict=True)):
            return False
        for kept, new in zip(self._standing, standing, strict=True):
            for numbers, moved in zip(kept, new, strict=True):
                numbers[:] = moved
        return True

    def record(self) -> None:
        """Give the caches what a checkpoint wants, once the forward is over."""
        for cache, tails, states in self._recorded:
            cache.record(0, mx.array(tails))
            cache.record(1, mx.array(states))

    def _columns(self, cache: Columns) -> tuple[Numbers, Numbers]:
        """The fields of CACHE, and for those that are addresses the bytes from row to row of what lies there."""
        named = _columns(cache, self._spans)
        self._memory += map(ref, named[:2])
        self._standing.append(named[2:])
        at, row = [address(array) for array in named], [array.strides[0] for array in named]
        return (*at[:2], named[0].shape[2], *at[2:], *_NONE), (*row[:2], 0, *row[2:], *_NONE)

    def _states(self, cache: Recurrent) -> tuple[Numbers, Numbers]:
        """As `_columns`."""
        spans = self._spans
        views = cache.host_states(spans.count)
        self._memory += map(ref, views.arrays)
        at, row = views.places
        if not (cache.recording and spans.whole):
            return (*_NONE, *at, 0, 0, 0), (*_NONE, *row, 0, 0, 0)
        # The cache may be asked to keep some of the tokens only.
        tails, states = (np.empty((spans.count, spans.length, *x.shape[1:]), np.float32) for x in views.arrays)
        self._recorded.append((cache, tails, states))
        recorded = address(states), address(tails)
        return (*_NONE, *at, spans.length, *recorded), (*_NONE, *row, 0, states.strides[0], tails.strides[0])


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
