"""The tokens of a padded rectangle that count, one behind the other, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from labkit.models.contract import LogitsFor
from labkit.models.rows import Rows


@dataclass(frozen=True)
class Spans:
    """B rows of L columns, of which the columns first[b] to last[b] are tokens: M in all, row after row.

    Attributes:
        length: L. first, last: int64 [B]. starts: int64 [B + 1], each row's first token among all.
        rows, columns, positions: int64 [M], of each token.
    """

    length: int
    first: np.ndarray
    last: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, rows: Rows, length: int) -> Spans:
        """Read from the device. Columns at negative positions are padding on the left, those from `lengths` on right.

        Raises:
            ValueError: lengths beyond the rectangle.
        """
        begin = np.asarray(rows.positions).astype(np.int64)
        first = np.clip(-begin, 0, length)
        last = np.full_like(begin, length) if rows.lengths is None else np.asarray(rows.lengths).astype(np.int64)
        if last.min() < 0 or last.max() > length:
            raise ValueError(f"lengths {last.tolist()} of rows of {length} columns")
        last = np.maximum(first, last)
        starts = np.concatenate([[0], np.cumsum(last - first)])
        numbers = np.repeat(np.arange(begin.size), last - first)
        columns = np.arange(starts[-1]) - starts[numbers] + first[numbers]
        return cls(length, first, last, starts, numbers, columns, begin[numbers] + columns)

    @property
    def count(self) -> int:
        """B."""
        return self.first.size

    @property
    def tokens(self) -> int:
        """M."""
        return int(self.starts[-1])

    def among(self, columns: np.ndarray) -> np.ndarray:
        """Columns of the rectangle [B, n] -> each one's token among all, -1 for padding; int64 [B n]."""
        if columns.size and (columns.min() < 0 or columns.max() >= self.length):
            raise ValueError(f"columns {columns.min()} to {columns.max()} of {self.length}")
        inside = (columns >= self.first[:, None]) & (columns < self.last[:, None])
        return np.where(inside, self.starts[:-1, None] + columns - self.first[:, None], -1).reshape(-1)

    def asked(self, logits: LogitsFor, lengths: mx.array | None) -> np.ndarray:
        """Columns that go through the head, int64 [B, n]."""
        if isinstance(logits, mx.array):
            return np.asarray(logits).astype(np.int64)
        if logits == "all":
            return np.tile(np.arange(self.length), (self.count, 1))
        if logits is None:
            return np.empty((self.count, 0), np.int64)
        if lengths is None or self.length == 1:
            return np.full((self.count, 1), self.length - 1)
        return self.last[:, None] - 1
