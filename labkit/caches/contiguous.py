"""Keys and values of full attention in one growing buffer: the kind that remembers every token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.caches import host, masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.by_row import one_for_all, per_row, to_keep, to_trim
from labkit.caches.host import HostViews, Lent
from labkit.caches.incoming import check_tokens
from labkit.caches.layout import Layout, keys_and_values
from labkit.caches.tail import TAIL, Tailed
from labkit.kernels.targets import device_target

STEP = 256  # tokens by which the buffers grow, as in mlx-lm


def rounded(tokens: int) -> int:
    """The capacity that holds `tokens`: the next multiple of STEP."""
    return (tokens + STEP - 1) // STEP * STEP


class Columns(Tailed, Cache):
    """What both classes share: two buffers [B, H, capacity, D] of which the first `_filled` columns are in use."""

    kind = "contiguous"
    keys = Lent()
    values = Lent()
    _host: HostViews | None = None
    _owned = False  # whether nobody else has the buffers, though the host has not made them

    @property
    @abstractmethod
    def _filled(self) -> int: ...

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

    def _write_columns(self, start: int, end: int, keys: mx.array, values: mx.array) -> None:
        buffers = [self.keys, self.values]
        for place, new in enumerate((keys, values)):
            if new.shape == buffers[place].shape:
                # To assign all of an array is to take the new one itself, which may be a part of a far wider one.
                buffers[place] = mx.contiguous(new.astype(buffers[place].dtype))
            else:
                buffers[place][..., start:end, :] = new
        # Set, not only written into: where a reader holds the old bytes these are others, and the host must be told.
        self.keys, self.values = buffers

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The columns in use."""
        if self._filled == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self._filled, :], self.values[..., : self._filled, :]

    def size(self) -> int:
        return self._filled

    def empty(self) -> bool:
        return self._keys is None

    def is_trimmable(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        held = [] if self._keys is None else [self._keys, self._values, *(self._tail or ())[:2]]
        return sum(array.nbytes for array in held)

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        # Where kernels run, decoding holds a tail besides.
        return layout.bytes_per_token * (rounded(tokens) + (TAIL if tokens and device_target() else 0))

    @staticmethod
    def _capacity_for(columns: int) -> int:
        return rounded(columns)

    def append(self, keys: mx.array, values: mx.array) -> None:
        check_tokens(self, keys, values)
        start, length = self._filled, keys.shape[2]
        self._grow(start + length, keys, values)
        # The column as an array: a compiled step keeps one graph while it moves.
        column = mx.array([start])
        self.keys = mx.slice_update(self.keys, keys, column, axes=(2,))
        self.values = mx.slice_update(self.values, values, column, axes=(2,))
        self._advance_columns(length)

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        length = queries.shape[2]
        columns = mx.arange(self.keys.shape[2])
        newest = (mx.array(self._filled - length) + mx.arange(length))[:, None]
        mask = columns <= newest
        if (padding := self._padding()) is not None:
            mask = mask & (columns >= padding[:, None, None, None])
        return mx.fast.scaled_dot_product_attention(queries, self.keys, self.values, scale=scale, mask=mask)

    def host_columns(self, new: int, batch: int, *, start: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """float32 views of keys and values [B, H, capacity, D] with room for `new` more columns, to be written by the
        host from column `start` on (the next one by default). They stay the same memory from call to call, unless they
        must grow, or a reader may still hold what is to be written.

        Args:
            batch: rows, for a serial cache that is still empty.
        """
        self.settle()
        filled = self._filled
        start = filled if start is None else start
        if self._owned:
            self._host, self._owned = host.views([self._keys, self._values]), False
        if self._host is None or self._host.lent > start or self._host.arrays[0].shape[2] < filled + new:
            self._copy_to_host(filled + new, batch)
        return self._host.arrays[0], self._host.arrays[1]

    def advance_columns(self, n: int) -> None:
        """`n` columns were written into `host_columns`."""
        self._advance_columns(n)

    def _copy_to_host(self, columns: int, batch: int) -> None:
        old, filled, buffers = [self._keys, self._values], self._filled, []
        for buffer, spec in zip(old, self.layout.arrays, strict=True):
            present = 0 if buffer is None else buffer.shape[2]
            capacity = present if columns <= present else rounded(columns)
            rows = batch if buffer is None else buffer.shape[0]
            array, view = host.zeros((rows, spec.shape[0], capacity, spec.shape[1]))
            if filled and buffer is not None:
                view[:, :, :filled] = np.asarray(buffer.astype(mx.float32))[:, :, :filled]
            buffers.append((array, view))
        self.keys, self.values = (array for array, _ in buffers)
        self._host = HostViews([view for _, view in buffers])
        if filled and columns > old[0].shape[2]:
            # No buffer to come fits into an old one: those of all layers would stay the process's, in MLX's pool.
            old.clear()
            del buffer
            mx.clear_cache()

    def own(self) -> None:
        self._owned = True

    def _forget(self) -> None:
        self._host = self._tail = None
        self._owned = False

    def _lend(self) -> None:
        self.settle()
        self._owned = False
        if self._host is not None:
            self._host.lent = max(self._host.lent, self._filled)

    @abstractmethod
    def _advance_columns(self, n: int) -> None: ...

    def _padding(self) -> mx.array | None:
        return None


class Contiguous(Columns):
    """One row, or several equally long ones. State-compatible with mlx-lm's `KVCache`, and bit-identical to it."""

    supports = Columns.supports - {"extend", "filter", "extract"}

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
        return 1 if self._keys is None else self._keys.shape[0]

    def _advance_columns(self, n: int) -> None:
        self.offset += n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns all of them so far."""
        check_tokens(self, keys, values)
        start, end = self.offset, self.offset + keys.shape[2]
        self._grow(end, keys, values)
        self.offset = end
        self._write_columns(start, end, keys, values)
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

    def trim(self, n: int) -> int:
        n = to_trim(n, self.offset)
        self.offset -= n
        return n

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and any(per_row(left_padding, self.batch_size)):
            raise Unsupported("serial contiguous", "take left padding", "a lone row needs none")
        if right_padding is not None:
            self._surplus = one_for_all(per_row(right_padding, self.batch_size), self.kind)

    def finalize(self) -> None:
        self.offset -= self._surplus
        self._surplus = 0

    def checkpoint(self) -> None:
        self._mark = self.offset

    def check_commit(self, accepted: Any) -> None:
        super().check_commit(accepted)
        one_for_all(per_row(accepted, self.batch_size), self.kind)

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        kept = one_for_all(to_keep(accepted, self.batch_size), self.kind)
        self.offset = min(self.offset, self._mark + kept)
        self._mark = None

    @classmethod
    def merge(cls, caches: Sequence[Contiguous]) -> Cache:
        from labkit.caches.contiguous_batch import BatchedContiguous

        return BatchedContiguous.from_rows(caches)

    def _pack(self) -> tuple[dict, dict]:
        if self.keys is None:
            return {}, {"offset": self.offset}
        keys, values = self.keys[..., : self.offset, :], self.values[..., : self.offset, :]
        return {"keys": mx.contiguous(keys), "values": mx.contiguous(values)}, {"offset": self.offset}

    def columns(self, start: int, end: int) -> dict[str, mx.array]:
        # Out of the buffers themselves: a copy of all tokens for each block would make a long prompt quadratic.
        return {"keys": self.keys[..., start:end, :], "values": self.values[..., start:end, :]}

    def room_for(self, tokens: int) -> int:
        return rounded(tokens + 1)

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.keys, self.values = arrays.get("keys"), arrays.get("values")
        self.offset = scalars["offset"]
        self._surplus, self._mark = 0, None
