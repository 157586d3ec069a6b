"""Keys and values of a sliding window in a ring: the kind that remembers the last `max_size` tokens.

Single tokens overwrite the oldest column in place. A block of L tokens puts the columns in temporal order and keeps
max_size - 1 + L of them, so that the block's first query still sees its whole window; the next single token trims.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.by_row import one_for_all, per_row, to_keep
from labkit.caches.layout import Layout
from labkit.caches.ring import Ring, joined


class Rotating(Ring):
    """One row. State-compatible with mlx-lm's `RotatingKVCache`, and bit-identical to it.

    Attributes:
        keep: the first columns that are never overwritten (attention sinks); only a serial ring has them.
    """

    supports = Cache.supports - {"extend", "filter", "extract"}

    def __init__(self, max_size: int, keep: int = 0, layout: Layout | None = None):
        if not isinstance(max_size, int) or not isinstance(keep, int) or not 0 <= keep < max_size:
            raise ValueError(f"a ring holds at least one token more than it keeps, not {max_size!r} and {keep!r}")
        self.max_size, self.keep = max_size, keep
        self.keys = self.values = None
        self.offset = self._idx = 0
        self.layout = layout
        self._surplus = 0

    @property
    def batch_size(self) -> int:
        return 1 if self.keys is None else self.keys.shape[0]

    @property
    def _seen(self) -> int:
        return self.offset

    def temporal(self, buffer: mx.array) -> mx.array:
        """The columns in use, oldest first (behind the kept ones)."""
        if self._idx == buffer.shape[2]:
            return buffer
        if self._idx < self.offset:
            kept, newer, older = (
                buffer[..., : self.keep, :],
                buffer[..., self.keep : self._idx, :],
                buffer[..., self._idx :, :],
            )
            return mx.concatenate([kept, older, newer], axis=2)
        return buffer[..., : self._idx, :]

    def newest(self) -> tuple[mx.array, mx.array]:
        """Keys and values within the window, oldest first."""
        return tuple(self.temporal(buffer)[..., -self.size() :, :] for buffer in (self.keys, self.values))

    def _trimmed(self, buffer: mx.array, columns: int, behind: mx.array | None = None) -> mx.array:
        parts = [buffer]
        if columns > 0:
            parts = [buffer[..., : self.keep, :], buffer[..., columns + self.keep :, :]]
        if behind is not None:
            parts.append(behind)
        return mx.concatenate(parts, axis=2)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns the columns that the new queries may see."""
        self._accept(keys, values)
        if keys.shape[2] == 1:
            return self._write_one(keys, values)
        return self._write_block(keys, values)

    def _write_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is None:
            self.keys, self.values = mx.contiguous(keys), mx.contiguous(values)  # they may be parts of a wider array
        else:
            ordered = self.temporal(self.keys), self.temporal(self.values)
            surplus = ordered[0].shape[2] - self.max_size + 1
            self.keys = self._trimmed(ordered[0], surplus, keys)
            self.values = self._trimmed(ordered[1], surplus, values)
        self.offset += keys.shape[2]
        self._idx = self.keys.shape[2]
        return self.keys, self.values

    def _write_one(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        width = 0 if self.keys is None else self.keys.shape[2]
        if width < self.max_size and self._idx >= width:
            self._grow_ring(width, keys, values)
        elif width > self.max_size:
            self.keys = self._trimmed(self.keys, width - self.max_size)
            self.values = self._trimmed(self.values, width - self.max_size)
            self._idx = self.max_size
        if self._idx == self.max_size:
            self._idx = self.keep
        self.keys[..., self._idx : self._idx + 1, :] = keys
        self.values[..., self._idx : self._idx + 1, :] = values
        self.offset += 1
        self._idx += 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns in use."""
        if self.offset < self.keys.shape[2]:
            return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]
        return self.keys, self.values

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if n > 1:
            window = window_size or self.max_size
            offset = min(self.max_size - 1, self.offset)
            if offset + n > window or return_array:
                return masks.causal(n, offset, window=window)
            return "causal"
        if window_size is None or self.offset < window_size or self.max_size <= window_size:
            return None
        # A window smaller than the ring: the newest `window_size` columns, wherever the ring has them.
        column = 0 if self._idx >= self.max_size else self._idx
        columns = min(self.offset + 1, self.max_size)
        return mx.roll(mx.arange(columns) >= columns - window_size, shift=column + 1)

    def attend_mask(self, length: int) -> mx.array:
        width = self.keys.shape[2]
        if length == 1:
            return mx.arange(width) < min(self.offset, width)
        return masks.causal(length, width - length, window=self.max_size)

    @property
    def state(self) -> tuple:
        return self.keys, self.values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, value: tuple) -> None:
        self.keys, self.values, self.offset, self.keep, self.max_size, self._idx = value
        self.layout = None
        if self.keys is not None:
            self._know(self.keys, self.values)
        self._surplus = 0

    def _take_back(self, n: int) -> None:
        self.offset -= n
        self._idx -= n

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and any(per_row(left_padding, self.batch_size)):
            raise Unsupported("serial rotating", "take left padding", "a lone row needs none")
        if right_padding is not None:
            self._surplus = one_for_all(per_row(right_padding, self.batch_size), self.kind)
            self._within = self._mark is not None
            if self._surplus and not self._within:
                self.checkpoint()

    def finalize(self) -> None:
        if not self._surplus:
            return
        # The padding is taken back as a span is; a span around it stays open.
        surplus, self._surplus = self._surplus, 0
        mark = tuple(copy(item) for item in self._mark)
        valid = [part[..., : part.shape[2] - surplus, :] for part in map(joined, zip(*self._since, strict=True))]
        self.commit(valid[0].shape[2])
        if self._within:
            self._mark, self._since = mark, [tuple(valid)]

    def check_commit(self, accepted: Any) -> None:
        super().check_commit(accepted)
        one_for_all(per_row(accepted, self.batch_size), self.kind)

    def commit(self, accepted: Any) -> None:
        kept = one_for_all(to_keep(accepted, self.batch_size), self.kind)
        after = self._rewound("commit")
        if after is not None and kept:
            self.update_and_fetch(*(part[..., :kept, :] for part in after))

    @classmethod
    def merge(cls, caches: Sequence[Rotating]) -> Any:
        from labkit.caches.rotating_batch import BatchedRotating

        return BatchedRotating.from_rows(caches)

    def _pack(self) -> tuple[dict, dict]:
        scalars = {"offset": self.offset, "keep": self.keep, "max_size": self.max_size}
        if self.keys is None:
            return {}, scalars | {"idx": 0}
        # In the ring's own order: attention adds up in that order, and another one rounds differently.
        keys, values = self.keys_and_values()
        return {"keys": mx.contiguous(keys), "values": mx.contiguous(values)}, scalars | {"idx": self._idx}

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.keys, self.values = arrays.get("keys"), arrays.get("values")
        self.offset, self.keep, self.max_size = scalars["offset"], scalars["keep"], scalars["max_size"]
        self._idx = scalars["idx"]
        self._surplus, self._mark = 0, None
