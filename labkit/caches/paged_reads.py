"""Reading rows that lie in a layer's pages: their tables on the device, and their tokens gathered, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from labkit.caches.block_pool import NULL
from labkit.caches.block_table import Table
from labkit.caches.pages import TABLE_STEP, Pages


class PagedReads:
    """What `PagedRows` can be asked; it says what the attributes are."""

    pages: Pages
    tables: list[Table]
    width: int
    keys: mx.array | None
    values: mx.array | None
    _device: dict[str, mx.array]

    def __len__(self) -> int:
        return len(self.tables)

    def table(self) -> mx.array:
        """The rows' tables on the device, int32 [B, N], N `width` or the next multiple of TABLE_STEP; `NULL` behind a
        row's last."""
        if "table" not in self._device:
            longest = max((len(table.blocks) for table in self.tables), default=0)
            width = max(self.width, max(1, -(-longest // TABLE_STEP)) * TABLE_STEP)
            rows = np.zeros((len(self), width), np.int32)
            for b, table in enumerate(self.tables):
                rows[b, : len(table.blocks)] = table.blocks
            self._device["table"] = mx.array(rows)
        return self._device["table"]

    def finished(self) -> mx.array:
        """Tokens of each row in finished blocks, int32 [B]."""
        return int32s(tuple(table.tokens for table in self.tables))

    def gather(self, numbers: mx.array) -> tuple[mx.array, mx.array]:
        """The tokens of these numbers, int32 [B, C] -> keys and values [B, H, C, D]; zeros below 0, anything finite
        where a row has no such token yet."""
        numbers, finished = numbers[:, None], self.finished()[:, None, None]
        heads, width = mx.arange(self.keys.shape[1], dtype=mx.int32)[None, :, None], self.pages.tail_tokens
        rows = mx.arange(len(self), dtype=mx.int32)[:, None, None]
        own = (rows * self.keys.shape[1] + heads) * width + mx.clip(numbers - finished, 0, width - 1)
        pooled, in_tail = self._slots(numbers, heads), (numbers >= finished)[..., None]
        return tuple(
            mx.where(in_tail, rows_of(tails)[own], rows_of(pool)[pooled])
            for pool, tails in ((self.pages.keys, self.keys), (self.pages.values, self.values))
        )

    def gather_blocks(self, lefts: Sequence[int], columns: int) -> tuple[mx.array, mx.array]:
        """Rows in one rectangle, row b's token 0 in column lefts[b] -> keys and values [B, H, columns, D]."""
        # Left of `split` stand finished blocks or padding in every row: one read, by an index that lives as long as the
        # tables. Behind it, tails.
        ends = [left + table.tokens for left, table in zip(lefts, self.tables, strict=True)]
        split = min(columns, *ends)
        newest = self._newest(split, lefts, ends, columns - split)
        if split == 0:
            return newest
        name = f"{split} {lefts}"
        if name not in self._device:
            number = mx.arange(split, dtype=mx.int32)[None] - int32s(tuple(lefts))[:, None]
            heads = mx.arange(self.keys.shape[1], dtype=mx.int32)[None, :, None]
            self._device = {"table": self.table(), name: self._slots(number[:, None], heads)}
        index, pools = self._device[name], (self.pages.keys, self.pages.values)
        return tuple(
            mx.concatenate([rows_of(pool)[index], new], axis=2) for pool, new in zip(pools, newest, strict=True)
        )

    def _newest(self, split: int, lefts: Sequence[int], ends: list[int], count: int) -> tuple[mx.array, mx.array]:
        """The `count` columns from `split` on: of each row, what is left of its finished blocks, then its tail."""
        width, size = self.pages.tail_tokens, self.pages.block_tokens
        if all(end == split for end in ends) and count <= width:
            return self.keys[:, :, :count], self.values[:, :, :count]
        # One short source: the tails, behind them the blocks that end right of `split`, and zeros.
        blocks, index = [], np.full((len(self), self.keys.shape[1], count), -1, np.int64)
        heads = np.arange(self.keys.shape[1])[:, None]
        tails = len(self) * self.keys.shape[1] * width
        for b, (left, end, table) in enumerate(zip(lefts, ends, self.tables, strict=True)):
            column = np.arange(max(split, left), min(end, split + count))
            if len(column):
                first = (column[0] - left) // size
                token = column - left - first * size
                index[b][:, column - split] = (
                    tails + ((len(blocks) + token // size) * len(heads) + heads) * size + token % size
                )
                blocks += table.blocks[first : (column[-1] - left) // size + 1]
            column = np.arange(max(end, left), min(split + count, end + width))
            index[b][:, column - split] = (b * len(heads) + heads) * width + column - end
        blocks.append(NULL)
        index[index < 0] = tails + len(blocks) * len(heads) * size - 1
        chosen, at = mx.array(blocks, dtype=mx.int32), mx.array(index.astype(np.int32))
        return tuple(
            mx.concatenate([rows_of(tail), rows_of(pool[chosen])])[at]
            for tail, pool in ((self.keys, self.pages.keys), (self.values, self.pages.values))
        )

    def _slots(self, numbers: mx.array, heads: mx.array) -> mx.array:
        """Where the pool's rows [N * H * block_tokens] have the tokens of `numbers` [B, 1, C]; block 0 for others."""
        size, table = self.pages.block_tokens, self.table()
        at = mx.clip(numbers[:, 0] // size, 0, table.shape[1] - 1)
        blocks = mx.where(numbers[:, 0] >= 0, mx.take_along_axis(table, at, axis=1), NULL)[:, None]
        return (blocks * self.keys.shape[1] + heads) * size + mx.maximum(numbers, 0) % size


@lru_cache(maxsize=512)
def int32s(numbers: tuple[int, ...]) -> mx.array:
    """Numbers of the host on the device, int32; one array for all layers that ask for the same. Cut from a wider one:
    MLX keeps the smallest arrays where a GPU must fetch them over the bus. Computed at once: engines in other threads
    may ask for the same, and only the thread that built an array may evaluate it."""
    array = mx.array([*numbers, *[0] * (8 - len(numbers))], dtype=mx.int32)[: len(numbers)]
    mx.async_eval(array)
    return array


def rows_of(blocks: mx.array) -> mx.array:
    """[N, H, T, D] -> [N * H * T, D]."""
    return blocks.reshape(-1, blocks.shape[-1])


def take_columns(source: mx.array, rows: np.ndarray, columns: np.ndarray) -> mx.array:
    """source [B, H, W, D] at rows [n] and columns [n, T] -> [n, H, T, D]."""
    _, heads, width, _ = source.shape
    index = (rows[:, None, None] * heads + np.arange(heads)[None, :, None]) * width + columns[:, None, :]
    return rows_of(source)[mx.array(index.astype(np.int32))]
