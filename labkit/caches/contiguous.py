"""Keys and values of full attention in one growing buffer: the kind that remembers every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported, per_row, row_numbers
from labkit.caches.layout import Layout, keys_and_values

STEP = 256  # tokens by which the buffers grow, as in mlx-lm


def rounded(tokens: int) -> int:
    """The capacity that holds `tokens`: the next multiple of STEP."""
    return (tokens + STEP - 1) // STEP * STEP


class _Columns(Cache):
    """What both classes share: two buffers [B, H, capacity, D] of which the first `_filled` columns are in use."""

    kind = "contiguous"
    keys: mx.array | None
    values: mx.array | None
    _mark: Any = None

    @property
    def _filled(self) -> int:
        raise NotImplementedError

    def _grow(self, columns: int, keys: mx.array, values: mx.array) -> None:
        """Room for `columns`, in buffers shaped like `keys` and `values`."""
        filled = self._filled
        if self.keys is not None and columns <= self.keys.shape[2]:
            return
        if self.layout is None:
            self.layout = keys_and_values(self.kind, keys, values)

        def grown(buffer: mx.array | None, like: mx.array) -> mx.array:
            batch, heads, _, dim = like.shape
            if buffer is None:
                return mx.zeros((batch, heads, rounded(columns), dim), like.dtype)
            room = mx.zeros((batch, heads, rounded(columns) - filled, dim), buffer.dtype)
            return mx.concatenate([buffer[:, :, :filled], room], axis=2)

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns in use."""
        if self._filled == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self._filled, :], self.values[..., : self._filled, :]

    def size(self) -> int:
        return self._filled

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        return layout.bytes_per_token * rounded(tokens)

    def append(self, keys: mx.array, values: mx.array) -> None:
        start, length = self._filled, keys.shape[2]
        self._grow(start + length, keys, values)
        # The column as an array: a compiled step keeps one graph while it moves.
        column = mx.array([start])
        self.keys = mx.slice_update(self.keys, keys, column, axes=(2,))
        self.values = mx.slice_update(self.values, values, column, axes=(2,))
        self._advance_columns(length)

    def attend(self, queries: mx.array, rows: Any = None, *, scale: float, sinks: mx.array | None = None) -> mx.array:
        length = queries.shape[2]
        columns = mx.arange(self.keys.shape[2])
        newest = (mx.array(self._filled - length) + mx.arange(length))[:, None]
        mask = columns <= newest
        if (padding := self._padding()) is not None:
            mask = mask & (columns >= padding[:, None, None, None])
        return mx.fast.scaled_dot_product_attention(
            queries, self.keys, self.values, scale=scale, mask=mask, sinks=sinks
        )

    def _advance_columns(self, n: int) -> None:
        raise NotImplementedError

    def _padding(self) -> mx.array | None:
        return None


class Contiguous(_Columns):
    """One row, or several equally long ones. State-compatible with mlx-lm's `KVCache`, and bit-identical to it."""

    supports = _Columns.supports - {"extend", "filter", "extract"}

    def __init__(self, layout: Layout | None = None):
        self.keys = self.values = None
        self.offset = 0
        self.layout = layout
        self._surplus = 0

    @property
    def _filled(self) -> int:
        return self.offset

    @property
    def batch_size(self) -> int:
        return 1 if self.keys is None else self.keys.shape[0]

    def _advance_columns(self, n: int) -> None:
        self.offset += n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns all of them so far."""
        start, end = self.offset, self.offset + keys.shape[2]
        self._grow(end, keys, values)
        self.offset = end
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        return self.keys_and_values()

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None or (return_array and n > 1):
            return masks.causal(n, self.offset, window=window_size)
        return None if n == 1 else "causal"

    @property
    def state(self) -> tuple:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, value: tuple) -> None:
        self.keys, self.values, self.offset = value
        self.layout = None if self.keys is None else keys_and_values(self.kind, self.keys, self.values)
        self._surplus = 0

    def reserve(self, tokens: int) -> None:
        """Give the buffers room for `tokens` tokens now, so that their shape stays.

        Raises:
            ValueError: if the arrays' shapes are not known yet.
        """
        if self.layout is None:
            raise ValueError("the shapes are not known before the first token: make the cache with a layout")
        like = [
            mx.zeros((self.batch_size, spec.shape[0], 0, spec.shape[1]), getattr(mx, spec.dtype))
            for spec in self.layout.arrays
        ]
        self._grow(tokens, *like)

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        self.offset -= n
        return n

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and any(per_row(left_padding, self.batch_size)):
            raise Unsupported("serial contiguous", "take left padding", "a lone row needs none")
        if right_padding is not None:
            surplus = set(per_row(right_padding, self.batch_size))
            if len(surplus) > 1:
                raise Unsupported("serial contiguous", "hold rows of several lengths", "merge serial rows instead")
            self._surplus = surplus.pop()

    def finalize(self) -> None:
        self.offset -= self._surplus
        self._surplus = 0

    def checkpoint(self) -> None:
        self._mark = self.offset

    def commit(self, accepted: Any) -> None:
        if self._mark is None:
            raise ValueError("commit without a checkpoint")
        kept = set(per_row(accepted, self.batch_size))
        if len(kept) > 1:
            raise Unsupported("serial contiguous", "hold rows of several lengths", "merge serial rows instead")
        self.offset = min(self.offset, self._mark + kept.pop())
        self._mark = None

    @classmethod
    def merge(cls, caches: Sequence[Contiguous]) -> BatchedContiguous:
        return BatchedContiguous.from_rows(caches)

    def _pack(self) -> tuple[dict, dict]:
        if self.keys is None:
            return {}, {"offset": self.offset}
        keys, values = self.keys[..., : self.offset, :], self.values[..., : self.offset, :]
        return {"keys": mx.contiguous(keys), "values": mx.contiguous(values)}, {"offset": self.offset}

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.keys, self.values = arrays.get("keys"), arrays.get("values")
        self.offset = scalars["offset"]
        self._surplus = 0


class BatchedContiguous(_Columns):
    """Rows of several lengths, right-justified: row b's tokens stand in columns left_padding[b] to `_idx`.

    State-compatible with mlx-lm's `BatchKVCache`. Where that class is undefined: filtering rows before the first token
    keeps their declared padding (the input to come is still padded so), instead of a negative column index.

    Attributes:
        offset: the position of each row's next token, int32 [B]; negative while only padding has passed.
        left_padding: columns of padding before each row's first token, int32 [B].
    """

    batched = True
    supports = _Columns.supports - {"merge"}

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
        start, end = self._idx, self._idx + keys.shape[2]
        self._grow(end, keys, values)
        self._advance_columns(keys.shape[2])
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
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
            self.keys = masks.roll_rows(self.keys, columns)
            self.values = masks.roll_rows(self.values, columns)
        self.offset = self.offset - columns
        self.left_padding = self.left_padding + columns

    def trim(self, n: int) -> int:
        n = min(self._idx, n)
        self._idx -= n
        self.offset = self.offset - n
        return n

    def checkpoint(self) -> None:
        self._mark = self._idx

    def commit(self, accepted: Any) -> None:
        if self._mark is None:
            raise ValueError("commit without a checkpoint")
        span = self._idx - self._mark
        dropped = [span - min(span, kept) for kept in per_row(accepted, self.batch_size)]
        self.trim(min(dropped))
        if max(dropped) > min(dropped):
            self._shift_right(mx.array([n - min(dropped) for n in dropped], dtype=mx.int32))
        self._mark = None

    def filter(self, rows: Any) -> None:
        rows = row_numbers(rows)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        if self.keys is None:
            return
        self.keys, self.values = self.keys[rows], self.values[rows]
        # Columns that are padding in every row that stayed would be read by every step to come.
        if shared := min(self.left_padding.tolist(), default=0):
            self.keys, self.values = self.keys[..., shared:, :], self.values[..., shared:, :]
            self._idx -= shared
            self.left_padding = self.left_padding - shared

    def extend(self, other: Cache) -> None:
        if not isinstance(other, BatchedContiguous):
            other = BatchedContiguous.from_rows([other])
        if self.keys is None and other.keys is None:
            self.offset = mx.concatenate([self.offset, other.offset])
            self.left_padding = mx.concatenate([self.left_padding, other.left_padding])
            return
        filled = max(self._idx, other._idx)
        like = self if self.keys is not None else other
        capacity = max(cache.keys.shape[2] for cache in (self, other) if cache.keys is not None)

        def justified(cache: BatchedContiguous, name: str) -> mx.array:
            model = getattr(like, name)
            buffer = getattr(cache, name)
            if buffer is None:
                return mx.zeros((cache.batch_size, model.shape[1], capacity, model.shape[3]), model.dtype)
            content = buffer[..., : cache._idx, :]
            return mx.pad(content, [(0, 0), (0, 0), (filled - cache._idx, capacity - filled), (0, 0)])

        padding = [cache.left_padding + (filled - cache._idx) for cache in (self, other)]
        self.keys, self.values = (
            mx.concatenate([justified(self, name), justified(other, name)]) for name in ("keys", "values")
        )
        self.offset = mx.concatenate([self.offset, other.offset])
        self.left_padding = mx.concatenate(padding)
        self.layout = self.layout or other.layout
        self._idx = filled

    def extract(self, row: int) -> Contiguous:
        single = Contiguous(self.layout)
        single.offset = max(0, self.offset.tolist()[row])
        if self.keys is not None and single.offset:
            chosen, start = row_numbers([row]), self._idx - single.offset
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
        like = next(cache for cache in caches if cache.offset)

        def justified(cache: Contiguous, name: str) -> mx.array:
            model = getattr(like, name)
            if not cache.offset:
                return mx.zeros((cache.batch_size, model.shape[1], filled, model.shape[3]), model.dtype)
            content = getattr(cache, name)[..., : cache.offset, :]
            return mx.pad(content, [(0, 0), (0, 0), (filled - cache.offset, 0), (0, 0)])

        result.keys, result.values = (
            mx.concatenate([justified(cache, name) for cache in caches]) for name in ("keys", "values")
        )
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
