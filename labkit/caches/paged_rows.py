"""The rows that lie in a layer's pages: which blocks each holds, and its newest tokens in a tail of their own.

What moves when, and why there are tails at all, is told in `labkit.caches.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from labkit.caches.block_pool import NULL
from labkit.caches.block_table import Table
from labkit.caches.pages import TABLE_STEP, Pages


class PagedRows:
    """Rows of tokens: finished blocks in a layer's pages, named by a table each, and the newest tokens in tails.

    Attributes:
        tables: of each row. lengths: tokens of each row, a host's number.
        keys, values: the tails, [B, H, tail_tokens, D]; row b's token p lies in column p - tables[b].tokens.
    """

    def __init__(self, pages: Pages, tables: Sequence[Table] = ()):
        self.pages = pages
        self.tables = list(tables)
        self.lengths = [table.tokens for table in self.tables]
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._device: dict[str, mx.array] = {}
        pages._rows.add(self)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def nbytes(self) -> int:
        """Bytes of the tails; blocks are the pages'."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def begin_with(self, blocks: int, null: int = 0) -> None:
        """Begin, as one empty row, with blocks that are in use (`Table.take_shared`)."""
        self.tables[0].take_shared(blocks, null)
        self.lengths = [self.tables[0].tokens]
        if self.pages.layout is not None:
            self.keys, self.values = self._empty_tails()
        self._device.clear()

    def _empty_tails(self) -> tuple[mx.array, mx.array]:
        return tuple(
            mx.zeros((len(self), spec.shape[0], self.pages.tail_tokens, spec.shape[1]), getattr(mx, spec.dtype))
            for spec in self.pages.layout.arrays
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, keys: mx.array, values: mx.array, skips: Sequence[int], counts: Sequence[int]) -> None:
        """Append `counts[b]` tokens to row b, which stand in keys and values [B, H, L, D] from column `skips[b]`.

        Raises:
            PoolExhausted: a block is needed that is not there; nothing was changed.
        """
        if self.keys is None:
            self.keys, self.values = self._empty_tails()
        held = self.held()
        if keys.shape[2] == 1 and all(count == 1 for count in counts):
            if max(held) >= self.pages.tail_tokens:
                self.flush()
                held = self.held()
            self._append(keys, values, held)
        else:
            self._rearrange(keys, values, skips, counts, held)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def held(self) -> list[int]:
        """Tokens of each row in its tail."""
        return [length - table.tokens for length, table in zip(self.lengths, self.tables, strict=True)]

    def _append(self, keys: mx.array, values: mx.array, columns: list[int]) -> None:
        if len(set(columns)) == 1:
            at = slice(columns[0], columns[0] + 1)
            self.keys[:, :, at] = keys
            self.values[:, :, at] = values
            return
        here = (mx.arange(self.pages.tail_tokens) == int32s(tuple(columns))[:, None])[:, None, :, None]
        self.keys, self.values = mx.where(here, keys, self.keys), mx.where(here, values, self.values)

    def flush(self) -> None:
        """Move the finished blocks of all tails to the pool, and the rest to the tails' beginning.

        Raises:
            PoolExhausted: a block is needed that is not there; nothing was changed.
        """
        nothing = [0] * len(self)
        self._rearrange(self.keys[:, :, :0], self.values[:, :, :0], nothing, nothing, self.held())

    def open_tails(self, length: int) -> None:
        """Give every tail room for `length` more tokens, which somebody else writes (`take_tails`)."""
        if self.keys is None:
            self.keys, self.values = self._empty_tails()
        if max(self.held()) + length > self.pages.tail_tokens:
            self.flush()

    def take_tails(self, keys: mx.array, values: mx.array, length: int) -> None:
        """The tails after a step that wrote `length` tokens behind each row's newest."""
        self.keys, self.values = keys, values
        self.lengths = [tokens + length for tokens in self.lengths]

    def _rearrange(
        self,
        keys: mx.array,
        values: mx.array,
        skips: Sequence[int],
        counts: Sequence[int],
        held: list[int],
    ) -> None:
        """Tails and new tokens, together, become finished blocks in the pool and new tails."""
        size, width = self.pages.block_tokens, self.pages.tail_tokens
        totals = [h + c for h, c in zip(held, counts, strict=True)]
        blocks = [total // size for total in totals]
        planned: set[bytes] = set()
        pool = self.pages.pool
        pool.require(sum(table.new_blocks_needed(n, planned) for table, n in zip(self.tables, blocks, strict=True)))
        # Token i of a row's tail and new tokens lies in this column of both side by side.
        columns = [
            np.concatenate([np.arange(h), width + skip + np.arange(c)])
            for h, skip, c in zip(held, skips, counts, strict=True)
        ]
        sources = [mx.concatenate([old, new], axis=2) for old, new in ((self.keys, keys), (self.values, values))]
        numbers, rows, places = [], [], []
        tails = np.zeros((len(self), width), np.int64)
        for b, (table, n) in enumerate(zip(self.tables, blocks, strict=True)):
            for i, block in enumerate(table.grow(n)):
                if block != NULL:
                    numbers.append(block)
                    rows.append(b)
                    places.append(columns[b][i * size : (i + 1) * size])
            rest = columns[b][n * size :]
            tails[b, : len(rest)] = rest
        if numbers:
            index = np.array(rows), np.stack(places)
            self.pages.write(numbers, *(_take_columns(source, *index) for source in sources))
        self.keys, self.values = (_take_columns(source, np.arange(len(self)), tails) for source in sources)
        self._device.clear()

    # -- taking back ---------------------------------------------------------------------------------------------------

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row. What remains of a finished block that others may
        read is copied to the row's own tail."""
        size = self.pages.block_tokens
        remains = {}
        for b, (length, table) in enumerate(zip(lengths, self.tables, strict=True)):
            if length < table.tokens and length % size:
                remains[b] = table.blocks[length // size]
            if length < self.lengths[b]:
                table.cut(min(len(table.blocks), length // size))
        self.lengths = list(lengths)
        if remains:
            self.keys = self._with_blocks(self.keys, self.pages.keys, remains)
            self.values = self._with_blocks(self.values, self.pages.values, remains)
        self._device.clear()

    def _with_blocks(self, tails: mx.array, pool: mx.array, blocks: dict[int, int]) -> mx.array:
        room = self.pages.tail_tokens - self.pages.block_tokens
        rows = [
            mx.pad(pool[blocks[b]][None], [(0, 0), (0, 0), (0, room), (0, 0)]) if b in blocks else tails[b : b + 1]
            for b in range(len(self))
        ]
        return mx.concatenate(rows)

    def drop_before(self, positions: Sequence[int]) -> None:
        """Give back the blocks whose tokens all stand before `positions[b]`: they left the window."""
        for position, table in zip(positions, self.tables, strict=True):
            if table.drop_first(max(0, position) // self.pages.block_tokens):
                self._device.clear()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def fork(self, rows: Sequence[int]) -> PagedRows:
        """These rows once more: finished blocks shared, tails copied."""
        twin = PagedRows(self.pages, [self.tables[b].fork() for b in rows])
        twin.lengths = [self.lengths[b] for b in rows]
        if self.keys is not None:
            index = mx.array(list(rows), dtype=mx.int32)
            twin.keys, twin.values = self.keys[index], self.values[index]
        return twin

    @classmethod
    def joined(cls, parts: Sequence[PagedRows]) -> PagedRows:
        """The rows of several, as forks: no finished block moves.

        Raises:
            ValueError: rows of several pools.
        """
        pages = parts[0].pages
        if any(part.pages is not pages for part in parts):
            raise ValueError("rows of several pools cannot decode together: their blocks lie in different arrays")
        result = cls(pages, [table.fork() for part in parts for table in part.tables])
        result.lengths = [length for part in parts for length in part.lengths]
        known = next((part for part in parts if part.keys is not None), None)
        if known is not None:
            for name in ("keys", "values"):
                like = getattr(known, name)
                tails = (
                    mx.zeros((len(part), *like.shape[1:]), like.dtype) if part.keys is None else getattr(part, name)
                    for part in parts
                )
                setattr(result, name, mx.concatenate(list(tails)))
        return result

    def release(self) -> None:
        """Give all blocks back. The rows are empty afterwards."""
        for table in self.tables:
            table.release()
        self.lengths = [0] * len(self)
        self.keys = self.values = None
        self._device.clear()

    # -- reading -------------------------------------------------------------------------------------------------------

    def table(self) -> mx.array:
        """The rows' tables on the device, int32 [B, N], N a multiple of TABLE_STEP; `NULL` behind a row's last."""
        if "table" not in self._device:
            longest = max((len(table.blocks) for table in self.tables), default=0)
            width = max(1, -(-longest // TABLE_STEP)) * TABLE_STEP
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
            mx.where(in_tail, _rows_of(tails)[own], _rows_of(pool)[pooled])
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
            mx.concatenate([_rows_of(pool)[index], new], axis=2) for pool, new in zip(pools, newest, strict=True)
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
            mx.concatenate([_rows_of(tail), _rows_of(pool[chosen])])[at]
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


def _rows_of(blocks: mx.array) -> mx.array:
    """[N, H, T, D] -> [N * H * T, D]."""
    return blocks.reshape(-1, blocks.shape[-1])


def _take_columns(source: mx.array, rows: np.ndarray, columns: np.ndarray) -> mx.array:
    """source [B, H, W, D] at rows [n] and columns [n, T] -> [n, H, T, D]."""
    _, heads, width, _ = source.shape
    index = (rows[:, None, None] * heads + np.arange(heads)[None, :, None]) * width + columns[:, None, :]
    return _rows_of(source)[mx.array(index.astype(np.int32))]
