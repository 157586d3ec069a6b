"""Full attention's keys and values for several rows: right-justified in one rectangle, padding on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache
from labkit.caches.by_row import per_row, row_numbers, to_keep, to_trim
from labkit.caches.contiguous import Columns, Contiguous, rounded
from labkit.caches.incoming import check_tokens
from labkit.caches.layout import Layout, keys_and_values
from labkit.caches.rectangle import right_justified, roll_rows


class BatchedContiguous(Columns):
    """Rows of several lengths, right-justified: row b's tokens stand in columns left_padding[b] to `_idx`.

    State-compatible with mlx-lm's `BatchKVCache`. Where that class is undefined: filtering rows before the first token
    keeps their declared padding (the input to come is still padded so), instead of a negative column index.

    Attributes:
        offset: the position of each row's next token, int32 [B]; negative while only padding has passed.
        left_padding: columns of padding before each row's first token, int32 [B].
    """

    batched = True
    supports = Columns.supports - {"merge"}

    def __init__(self, left_padding: Sequence[int], layout: Layout | None = None):
        self.keys = self.values = None
        self.left_padding = mx.array(list(left_padding), dtype=mx.int32)
        self.offset = -self.left_padding
        self.layout = layout
        self._idx = 0
        self._right_padding: mx.array | None = None

    @property
    def _filled(self) -> int:
        return self._idx

    @property
    def batch_size(self) -> int:
        return self.offset.shape[0]

    def _padding(self) -> mx.array:
        return self.left_padding

    def _advance_columns(self, n: int) -> None:
        self.offset = self.offset + n
        self._idx += n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns all columns so far, padding included."""
        check_tokens(self, keys, values)
        start, end = self._idx, self._idx + keys.shape[2]
        self._grow(end, keys, values)
        self._advance_columns(keys.shape[2])
        self._write_columns(start, end, keys, values)
        return self.keys_and_values()

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return masks.causal(n, self._idx, window=window_size, left_padding=self.left_padding)

    @property
    def state(self) -> tuple:
        return self.keys, self.values, self.offset, self.left_padding, self._idx

    @state.setter
    def state(self, value: tuple) -> None:
        self.keys, self.values, self.offset, self.left_padding, self._idx = value
        self.layout = None if self.keys is None else keys_and_values(self.kind, self.keys, self.values)
        self._right_padding = None

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding belongs before the first token of a batch")
            padding = mx.array(per_row(left_padding, self.batch_size), dtype=mx.int32)
            self.left_padding = self.left_padding + padding
            self.offset = self.offset - padding
        if right_padding is not None and any(padding := per_row(right_padding, self.batch_size)):
            self._right_padding = mx.array(padding, dtype=mx.int32)

    def finalize(self) -> None:
        if self._right_padding is not None:
            self._shift_right(self._right_padding)
            self._right_padding = None

    def _shift_right(self, columns: mx.array) -> None:
        """Turn the last `columns` [B] of each row into padding on the left."""
        if self.keys is not None:
            self.keys = roll_rows(self.keys, columns)
            self.values = roll_rows(self.values, columns)
        self.moved_right(columns)

    def moved_right(self, columns: mx.array) -> None:
        """Each row's last tokens were written, and its others moved, `columns` [B] to the right of where they would
        stand: so many columns more are padding on the left."""
        self.offset = self.offset - columns
        self.left_padding = self.left_padding + columns

    def trim(self, n: int) -> int:
        n = to_trim(n, self._idx)
        self._idx -= n
        self.offset = self.offset - n
        return n

    def _tokens(self) -> list[int]:
        return [max(0, offset) for offset in self.offset.tolist()]

    def checkpoint(self) -> None:
        self._mark = self._tokens()

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        kept = to_keep(accepted, self.batch_size)
        dropped = [max(0, now - before - n) for now, before, n in zip(self._tokens(), self._mark, kept, strict=True)]
        self.trim(min(dropped))
        if max(dropped) > min(dropped):
            self._shift_right(mx.array([n - min(dropped) for n in dropped], dtype=mx.int32))
        self._mark = None

    def filter(self, rows: Any) -> None:
        self._no_open_span("filter")
        rows = row_numbers(rows, self.batch_size)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        if self.keys is None:
            return
        self.keys, self.values = self.keys[rows], self.values[rows]
        # Columns that are padding in every row that stayed would be read by every step to come.
        if shared := min([self._idx, *self.left_padding.tolist()]):
            self._idx -= shared
            end = min(self.keys.shape[2], shared + rounded(self._idx))  # no more free room than a smaller batch has
            self.keys, self.values = self.keys[..., shared:end, :], self.values[..., shared:end, :]
            self.left_padding = self.left_padding - shared

    def extend(self, other: Cache) -> None:
        self._no_open_span("extend")
        if not isinstance(other, BatchedContiguous):
            other = BatchedContiguous.from_rows([other])
        if self.keys is None and other.keys is None:
            self.offset = mx.concatenate([self.offset, other.offset])
            self.left_padding = mx.concatenate([self.left_padding, other.left_padding])
            return
        filled = max(self._idx, other._idx)
        both = self, other
        capacity = max(cache.keys.shape[2] for cache in both if cache.keys is not None)
        padding = [cache.left_padding + (filled - cache._idx) for cache in both]
        parts = [(None if cache.keys is None else cache.keys_and_values(), cache.batch_size) for cache in both]
        self.keys, self.values = right_justified(parts, filled, capacity)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.left_padding = mx.concatenate(padding)
        self.layout = self.layout or other.layout
        self._idx = filled

    def extract(self, row: int) -> Contiguous:
        chosen, single = row_numbers([row], self.batch_size), Contiguous(self.layout)
        single.offset = max(0, self.offset.tolist()[row])
        if self.keys is not None and single.offset:
            start = self._idx - single.offset
            single.keys = mx.contiguous(self.keys[chosen][..., start : self._idx, :])
            single.values = mx.contiguous(self.values[chosen][..., start : self._idx, :])
        return single

    @classmethod
    def from_rows(cls, caches: Sequence[Contiguous]) -> BatchedContiguous:
        """The rows of serial caches, right-justified, as copies."""
        lengths = [cache.offset for cache in caches for _ in range(cache.batch_size)]
        filled = max(lengths)
        result = cls([filled - length for length in lengths], next((c.layout for c in caches if c.layout), None))
        if filled == 0:
            return result
        parts = [(cache.keys_and_values() if cache.offset else None, cache.batch_size) for cache in caches]
        result.keys, result.values = right_justified(parts, filled, filled)
        result._advance_columns(filled)
        return result

    def _pack(self) -> tuple[dict, dict]:
        arrays = {"offset": self.offset, "left_padding": self.left_padding}
        if self.keys is not None:
            keys, values = self.keys_and_values()
            arrays |= {"keys": mx.contiguous(keys), "values": mx.contiguous(values)}
        return arrays, {"idx": self._idx}

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.keys, self.values = arrays.get("keys"), arrays.get("values")
        self.offset, self.left_padding = arrays["offset"], arrays["left_padding"]
        self._idx = scalars["idx"]
        self._right_padding = None
