"""The rows that lie in a layer's pages: which blocks each holds, and its newest tokens in a tail of their own.

What moves when, and why there are tails at all, is told in `labkit.caches.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from labkit.caches.block_pool import NULL
from labkit.caches.block_table import Table
from labkit.caches.paged_reads import PagedReads, int32s, take_columns
from labkit.caches.pages import Pages
from labkit.caches.tail import AHEAD


class PagedRows(PagedReads):
    """Rows of tokens: finished blocks in a layer's pages, named by a table each, and the newest tokens in tails.

    Attributes:
        tables: of each row. lengths: tokens of each row, a host's number.
        keys, values: the tails, [B, H, tail_tokens, D]; row b's token p lies in column p - tables[b].tokens.
        width: columns that the device's table has at least.
    """

    def __init__(self, pages: Pages, tables: Sequence[Table] = ()):
        self.pages = pages
        self.tables = list(tables)
        self.lengths = [table.tokens for table in self.tables]
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.width = 0
        self._device: dict[str, mx.array] = {}
        pages._rows.add(self)

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

    def widen(self, tokens: int) -> None:
        """A table for a whole tail more, if so many tokens are to come: by `AHEAD` of them at once, so that its shape
        seldom changes."""
        size, longest, tail = self.pages.block_tokens, max(self.lengths), self.pages.tail_tokens
        if self.width * size < longest + min(tokens, tail):
            self.width = -(-min(longest + tokens, -(-(longest + tail) // AHEAD) * AHEAD) // size)
            self._device.clear()

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
            self.pages.write(numbers, *(take_columns(source, *index) for source in sources))
        self.keys, self.values = (take_columns(source, np.arange(len(self)), tails) for source in sources)
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
