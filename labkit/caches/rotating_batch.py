"""The ring for several rows: right-justified like the contiguous batch, one write column for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.by_row import columns_of_tokens, per_row, row_numbers, to_keep
from labkit.caches.layout import Layout
from labkit.caches.rectangle import right_justified, roll_rows
from labkit.caches.ring import Ring
from labkit.caches.rotating import Rotating

# mlx-lm's order.
_STATE = ("keys", "values", "offset", "left_padding", "max_size", "_offset", "_idx", "rotated")


class BatchedRotating(Ring):
    """Rows of several lengths in one ring. State-compatible with mlx-lm's `BatchRotatingKVCache`.

    Where that class is undefined: right-padded input whose last chunk is one token goes through the block path
    instead of raising; the mask of a block after the ring has wrapped counts the columns that the block will keep,
    where mlx-lm takes the write column for their number and hides a short row's oldest token. As in mlx-lm, filtering
    keeps padding that all rows share.

    Attributes:
        offset: the position of each row's next token, int32 [B].
        left_padding: columns of padding before each row's oldest token, int32 [B]; at or below 0 when it has none.
        rotated: whether single tokens have begun to overwrite the oldest column.
    """

    batched = True
    supports = Cache.supports - {"merge"}

    def __init__(self, max_size: int, left_padding: Sequence[int], layout: Layout | None = None):
        self.keys = self.values = None
        self.left_padding = mx.array(list(left_padding), dtype=mx.int32)
        self.offset = -self.left_padding
        self.max_size = max_size
        self.layout = layout
        self._idx = self._offset = 0
        self.rotated = False
        self._lengths: mx.array | None = None

    @property
    def batch_size(self) -> int:
        return self.offset.shape[0]

    @property
    def _seen(self) -> int:
        return self._offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns the columns that the new queries may see."""
        self._accept(keys, values)
        if keys.shape[2] == 1 and self._lengths is None:
            result = self._write_one(keys, values)
        else:
            result = self._write_block(keys, values)
        # The rows' counters are part of what a step computes: evaluated with it, they never pile up as a graph.
        self.keys = mx.depends(self.keys, (self.left_padding, self.offset))
        return result

    def checkpoint(self) -> None:
        super().checkpoint()
        self._written: list[tuple[int, list[int]]] = []  # columns of each write, and tokens among them by row

    def _remember(self, keys: mx.array, values: mx.array) -> None:
        super()._remember(keys, values)
        if self._mark is not None:
            width = keys.shape[2]
            left = [width] * self.batch_size if self._lengths is None else (self._lengths - self.offset).tolist()
            self._written.append((width, [min(width, max(0, count)) for count in left]))

    def _order(self) -> None:
        """Put the columns in temporal order, without free room after them."""
        if self.rotated:
            self.keys = mx.roll(self.keys, -self._idx, axis=2)
            self.values = mx.roll(self.values, -self._idx, axis=2)
            self._idx = self.keys.shape[2]
            self.rotated = False
        elif self.keys.shape[2] > self._idx:
            self.keys, self.values = self.keys[..., : self._idx, :], self.values[..., : self._idx, :]

    def _write_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is None:
            self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)  # they may be parts of a wider array
        else:
            self._order()
            self._move_padding()
            if (surplus := self._idx - self.max_size + 1) > 0:
                self.left_padding = self.left_padding - surplus
                self.keys, self.values = self.keys[..., surplus:, :], self.values[..., surplus:, :]
            self.keys = mx.concatenate([self.keys, keys], axis=2)
            self.values = mx.concatenate([self.values, values], axis=2)
        self.offset = self.offset + keys.shape[2]
        self._offset += keys.shape[2]
        self._idx = self.keys.shape[2]
        return self.keys, self.values

    def _move_padding(self) -> None:
        """Turn right padding that has passed into left padding, so that it never pushes out a row's tokens."""
        if self._lengths is None:
            return
        past = mx.maximum(0, self.offset - self._lengths)
        self.keys, self.values = roll_rows(self.keys, past), roll_rows(self.values, past)
        self.left_padding = self.left_padding + past
        self.offset = self.offset - past

    def _write_one(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        width = 0 if self.keys is None else self.keys.shape[2]
        if width < self.max_size and self._idx >= width and not self.rotated:
            self._grow_ring(width, keys, values)
        elif width > self.max_size:
            surplus = width - self.max_size
            self.keys, self.values = self.keys[..., surplus:, :], self.values[..., surplus:, :]
            self.left_padding = self.left_padding - surplus
            self._idx = self.max_size
        if self._idx == self.max_size:
            self.rotated = True
            self._idx = 0
        if self.rotated:
            self.left_padding = self.left_padding - 1
        self.keys[..., self._idx : self._idx + 1, :] = keys
        self.values[..., self._idx : self._idx + 1, :] = values
        self.offset = self.offset + 1
        self._offset += 1
        self._idx += 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns in use."""
        if not self.rotated and self._idx < self.keys.shape[2]:
            return self.keys[..., : self._idx, :], self.values[..., : self._idx, :]
        return self.keys, self.values

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        window = window_size or self.max_size
        padding = self.left_padding
        # Columns in temporal order, before this write: all of a turned ring, else up to the write column.
        older = self.keys.shape[2] if self.rotated else self._idx
        if n > 1 or self._lengths is not None:
            kept = min(older, self.max_size - 1)
            return masks.causal(n, kept, window=window, left_padding=padding - (older - kept))
        if older < self.max_size:
            return masks.causal(1, older, window=window, left_padding=padding)
        # The oldest column gives way to the new one: the mask in temporal order, turned as the ring is turned.
        mask = masks.causal(1, self.max_size - 1, window=window, left_padding=padding - (older - self.max_size) - 1)
        column = self._idx if self.rotated and self._idx < self.max_size else 0
        return mx.roll(mask, shift=column + 1, axis=-1)

    def attend_mask(self, length: int) -> mx.array:
        width = self.keys.shape[2]
        if length > 1:
            return masks.causal(length, width - length, window=self.max_size, left_padding=self.left_padding)
        filled = width if self.rotated else self._idx
        return masks.in_ring(width, self._idx, filled, window=self.max_size, left_padding=self.left_padding)

    @property
    def state(self) -> tuple:
        return tuple(getattr(self, name) for name in _STATE)

    @state.setter
    def state(self, value: tuple) -> None:
        for name, item in zip(_STATE, value, strict=True):
            setattr(self, name, item)
        self._lengths = None
        self.layout = None
        if self.keys is not None:
            self._know(self.keys, self.values)

    def _take_back(self, n: int) -> None:
        self._offset -= n
        self._idx -= n
        self.offset = self.offset - n

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding belongs before the first token of a batch")
            padding = mx.array(per_row(left_padding, self.batch_size), dtype=mx.int32)
            self.left_padding = self.left_padding + padding
            self.offset = self.offset - padding
        if right_padding is not None and any(per_row(right_padding, self.batch_size)):
            self._lengths = self.offset + mx.array(per_row(lengths, self.batch_size), dtype=mx.int32)

    def finalize(self) -> None:
        if self._lengths is not None and self.keys is not None:
            self._move_padding()
        self._lengths = None

    def commit(self, accepted: Any) -> None:
        kept = to_keep(accepted, self.batch_size)
        after = self._rewound("commit")
        if after is None:
            return
        columns = [tokens[:n] for tokens, n in zip(columns_of_tokens(self._written), kept, strict=True)]
        kept = [len(tokens) for tokens in columns]
        if longest := max(kept):
            index = mx.array([tokens + [0] * (longest - n) for tokens, n in zip(columns, kept, strict=True)])
            self.prepare(lengths=kept, right_padding=[longest - n for n in kept])
            self.update_and_fetch(*(mx.take_along_axis(part, index[:, None, :, None], axis=2) for part in after))
            self.finalize()

    def filter(self, rows: Any) -> None:
        self._no_open_span("filter")
        rows = row_numbers(rows, self.batch_size)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def extend(self, other: Cache) -> None:
        self._no_open_span("extend")
        if not isinstance(other, BatchedRotating):
            other = BatchedRotating.from_rows([other])
        if other.max_size != self.max_size:
            raise ValueError(f"a ring of {other.max_size} tokens cannot join one of {self.max_size}")
        if self.keys is None and other.keys is None:
            self.offset = mx.concatenate([self.offset, other.offset])
            self.left_padding = mx.concatenate([self.left_padding, other.left_padding])
            return
        if self.rotated != other.rotated or self._idx != other._idx:
            for cache in (self, other):
                if cache.keys is not None:
                    cache._order()
        filled = max(self._idx, other._idx)
        both = self, other
        padding = [cache.left_padding + (filled - cache._idx) for cache in both]
        if self.rotated:  # both have, and write the same column next
            self.keys = mx.concatenate([self.keys, other.keys])
            self.values = mx.concatenate([self.values, other.values])
        else:
            capacity = max(cache.keys.shape[2] for cache in both if cache.keys is not None)
            parts = [(None if cache.keys is None else cache.keys_and_values(), cache.batch_size) for cache in both]
            self.keys, self.values = right_justified(parts, filled, capacity)
        self.offset = mx.concatenate([self.offset, other.offset])
        self.left_padding = mx.concatenate(padding)
        self.layout = self.layout or other.layout
        self._idx = filled
        self._offset = max(self._offset, other._offset)

    def extract(self, row: int) -> Rotating:
        chosen, single = row_numbers([row], self.batch_size), Rotating(self.max_size, layout=self.layout)
        single.offset = max(0, self.offset.tolist()[row])
        if self.keys is None or not single.offset:
            return single
        end = self._idx
        keys, values = self.keys[chosen], self.values[chosen]
        if self.rotated:
            keys, values = (mx.roll(x, -self._idx, axis=2) for x in (keys, values))
            end = keys.shape[2]
        start = max(0, self.left_padding.tolist()[row])
        single.keys, single.values = (mx.contiguous(x[..., start:end, :]) for x in (keys, values))
        single._idx = end - start
        return single

    @classmethod
    def from_rows(cls, caches: Sequence[Rotating]) -> BatchedRotating:
        """The rows of serial rings, right-justified, as copies.

        Raises:
            ValueError: rings of several sizes.
            Unsupported: rings that keep their first tokens.
        """
        sizes = {cache.max_size for cache in caches}
        if len(sizes) > 1:
            raise ValueError(f"rings of {sorted(sizes)} tokens cannot share one batch")
        if any(cache.keep for cache in caches):
            raise Unsupported("rotating", "merge", "rows that keep their first tokens have no batched form")
        lengths = [cache.size() for cache in caches for _ in range(cache.batch_size)]
        filled = max(lengths)
        layout = next((cache.layout for cache in caches if cache.layout), None)
        result = cls(sizes.pop(), [filled - length for length in lengths], layout)
        if filled == 0:
            return result
        parts = [(cache.newest() if cache.offset else None, cache.batch_size) for cache in caches]
        result.keys, result.values = right_justified(parts, filled, filled)
        result.offset = mx.array([cache.offset for cache in caches for _ in range(cache.batch_size)], dtype=mx.int32)
        result._idx = result._offset = filled
        return result

    def _pack(self) -> tuple[dict, dict]:
        arrays = {"offset": self.offset, "left_padding": self.left_padding}
        if self.keys is not None:
            arrays |= {"keys": mx.contiguous(self.keys), "values": mx.contiguous(self.values)}
        scalars = {"max_size": self.max_size, "written": self._offset, "idx": self._idx, "rotated": self.rotated}
        return arrays, scalars

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.keys, self.values = arrays.get("keys"), arrays.get("values")
        self.offset, self.left_padding = arrays["offset"], arrays["left_padding"]
        self.max_size, self._idx, self.rotated = scalars["max_size"], scalars["idx"], scalars["rotated"]
        self._offset = scalars["written"]
        self._lengths = None
