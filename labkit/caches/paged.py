"""Full attention's keys and values of one row in blocks of a shared pool.

The rectangle that `update_and_fetch` gathers is the contiguous cache's, column by column, so that attention gives the
same bits; `append` and `attend` never spread it out (`labkit.kernels.attention.paged_decode_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.block_table import Table
from labkit.caches.by_row import one_for_all, per_row, to_keep, to_trim
from labkit.caches.contiguous import Contiguous
from labkit.caches.incoming import check_tokens
from labkit.caches.paged_cache import PagedCache
from labkit.caches.paged_rows import PagedRows
from labkit.caches.pages import Pages


class Paged(PagedCache):
    """One row, or several equally long ones; `plain_cache()` is what `Contiguous` would hold."""

    kind = "contiguous"
    plain = Contiguous
    supports = Cache.supports - {"extend", "filter", "extract"}

    def __init__(self, pages: Pages, table: Table | None = None):
        self.pages = pages
        self.rows = PagedRows(pages, [table or Table(pages.pool)])
        self.offset = self.rows.lengths[0]
        self._valid: int | None = None  # of the padded input to come

    def begin_with(self, blocks: int) -> None:
        self.rows.begin_with(blocks)
        self.offset = self.rows.lengths[0]

    def _advance(self, length: int) -> None:
        self.offset += length

    def copy(self) -> Paged:
        twin = Paged(self.pages)
        twin.rows, twin.offset = self.rows.fork(range(len(self.rows))), self.offset
        return twin

    def _write(self, keys: mx.array, values: mx.array) -> None:
        check_tokens(self, keys, values)
        batch, length = keys.shape[0], keys.shape[2]
        if batch != len(self.rows) and (self.offset or len(self.rows) != 1):
            raise ValueError(f"keys of {batch} rows for a cache of {len(self.rows)}")
        self.pages.know(self.kind, keys, values)
        if batch != len(self.rows):
            self.rows = PagedRows(self.pages, [Table(self.pages.pool) for _ in range(batch)])
        count = length if self._valid is None else min(length, self._valid)
        self.rows.write(keys, values, [0] * batch, [count] * batch)
        if self._valid is not None:
            self._valid -= count
        self._advance(length)

    def _gathered(self) -> tuple[mx.array, mx.array]:
        return self.rows.gather_blocks([0] * len(self.rows), self.offset)

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        if self.offset == self.rows.lengths[0]:
            direct = self._direct(queries, scale)
            if direct is not None:
                return direct
        return self._chunk(queries, [0] * len(self.rows), self.offset, scale)

    def size(self) -> int:
        return self.offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None or (return_array and n > 1):
            return masks.causal(n, self.offset, window=window_size)
        return None if n == 1 else "causal"

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = to_trim(n, self.offset)
        self._keep(self.offset - n)
        return n

    def _keep(self, tokens: int) -> None:
        self.offset = tokens
        self.rows.truncate([min(tokens, length) for length in self.rows.lengths])

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and any(per_row(left_padding, self.batch_size)):
            raise Unsupported("serial contiguous", "take left padding", "a lone row needs none")
        if right_padding is not None:
            padded = one_for_all(per_row(right_padding, self.batch_size), self.kind)
            self._valid = per_row(lengths, self.batch_size)[0] if padded else None

    def finalize(self) -> None:
        if self._valid is not None:
            self._valid = None
            self.offset = self.rows.lengths[0]

    def checkpoint(self) -> None:
        self._mark = self.offset

    def check_commit(self, accepted: Any) -> None:
        super().check_commit(accepted)
        one_for_all(per_row(accepted, self.batch_size), self.kind)

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        kept = one_for_all(to_keep(accepted, self.batch_size), self.kind)
        self._keep(min(self.offset, self._mark + kept))
        self._mark = None

    def release(self) -> None:
        super().release()
        self.offset = 0

    @classmethod
    def merge(cls, caches: Sequence[Paged]) -> Cache:
        from labkit.caches.paged_batch import BatchedPaged

        return BatchedPaged.from_rows(caches)

    def plain_cache(self) -> Contiguous:
        plain = Contiguous(self.layout)
        plain.offset = self.offset
        if not self.empty():
            plain.keys, plain.values = self._gathered()
        return plain

    @classmethod
    def adopt(cls, plain: Contiguous, pages: Pages, tables: Sequence[Table] | None = None) -> Paged:
        cache = cls(pages, tables[0] if tables else None)
        if plain.offset:
            cache._write(*plain.keys_and_values())
        return cache
