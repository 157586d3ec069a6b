"""What the serial and the batched ring share: size, growth, trims, and spans that are taken back by a copy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from labkit.caches.base import Cache, Unsupported
from labkit.caches.by_row import to_trim
from labkit.caches.incoming import check_tokens
from labkit.caches.layout import Layout, keys_and_values

STEP = 256  # tokens by which a ring grows until it has its full size, as in mlx-lm


class Ring(Cache):
    """Keys and values of a sliding window, the last `max_size` tokens, in a ring.

    Attributes:
        keys, values: [B, H, columns, D]. `_idx` is the column after the newest token's.
    """

    kind = "rotating"
    keys: mx.array | None
    values: mx.array | None
    max_size: int
    _idx: int

    @property
    @abstractmethod
    def _seen(self) -> int:
        """Tokens so far, in the longest row."""

    @abstractmethod
    def _take_back(self, n: int) -> None:
        """Forget the newest `n` tokens, which no other has overwritten."""

    @abstractmethod
    def attend_mask(self, length: int) -> mx.array:
        """Which columns of the whole ring the `length` newest tokens of each row see."""

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        return min(self._seen, self.max_size)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        # A block leaves max_size - 1 + chunk columns; single tokens allocate in steps up to the full size.
        columns = max(min(tokens, layout.window - 1 + chunk), min(math.ceil(tokens / STEP) * STEP, layout.window))
        return layout.bytes_per_token * columns

    def _accept(self, keys: mx.array, values: mx.array) -> None:
        """New tokens are about to be written: refused if they do not fit, remembered within a span."""
        check_tokens(self, keys, values)
        self._know(keys, values)
        self._remember(keys, values)

    def _know(self, keys: mx.array, values: mx.array) -> None:
        if self.layout is None:
            self.layout = keys_and_values(self.kind, keys, values, self.max_size)

    def _grow_ring(self, filled: int, keys: mx.array, values: mx.array) -> None:
        """Room for one more column after `filled`, until the ring has its full size."""

        def grown(buffer: mx.array | None, like: mx.array) -> mx.array:
            batch, heads, _, dim = like.shape
            room = mx.zeros((batch, heads, min((filled // STEP + 1) * STEP, self.max_size) - filled, dim), like.dtype)
            return room if buffer is None else mx.concatenate([buffer, room], axis=2)

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)

    def append(self, keys: mx.array, values: mx.array) -> None:
        self.update_and_fetch(keys, values)

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        mask = self.attend_mask(queries.shape[2])
        return mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=mask)

    def is_trimmable(self) -> bool:
        # Once the ring has wrapped, the columns that a trim would bring back into view are gone.
        return self._seen < self.max_size

    def trim(self, n: int) -> int:
        self._no_open_span("trim")
        n = to_trim(n, self._seen)
        if n and not self.is_trimmable():
            raise Unsupported(self.kind, f"trim {n} tokens", f"it has wrapped at its window of {self.max_size}")
        self._take_back(n)
        return n

    def checkpoint(self) -> None:
        # Handles of their own: an assignment to a slice changes the array behind the handle it is made through.
        self._mark = tuple(copy(item) for item in self.state)
        self._since: list[tuple[mx.array, mx.array]] = []

    def _remember(self, keys: mx.array, values: mx.array) -> None:
        if self._mark is not None:
            self._since.append((keys, values))

    def _rewound(self, what: str) -> tuple[mx.array, mx.array] | None:
        """Back at the checkpoint, which is forgotten; returns the keys and values that came after it."""
        if self._mark is None:
            raise ValueError(f"{what} without a checkpoint")
        mark, since = self._mark, self._since
        self._mark, self._since = None, []
        layout, self.state = self.layout, mark
        self.layout = layout
        if not since:
            return None
        return tuple(map(joined, zip(*since, strict=True)))


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Columns, concatenated."""
    return mx.concatenate(list(parts), axis=2)
