"""The tokens of a padded rectangle that count, one behind the other, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
        begin = np.array(rows.positions, np.int64)
        if rows.lengths is None and begin.min() >= 0:
            return cls._whole(begin, length)
        first = np.clip(-begin, 0, length)
        last = np.full_like(begin, length) if rows.lengths is None else np.asarray(rows.lengths).astype(np.int64)
        if last.min() < 0 or last.max() > length:
            raise ValueError(f"lengths {last.tolist()} of rows of {length} columns")
        last = np.maximum(first, last)
        starts = np.concatenate([[0], np.cumsum(last - first)])
        numbers = np.repeat(np.arange(begin.size), last - first)
        columns = np.arange(starts[-1]) - starts[numbers] + first[numbers]
        return cls(length, first, last, starts, numbers, columns, begin[numbers] + columns)

    @classmethod
    def _whole(cls, begin: np.ndarray, length: int) -> Spans:
        """Every column of every row is a token."""
        rows = begin.size
        first, starts = np.zeros(rows, np.int64), np.arange(0, (rows + 1) * length, length)
        numbers, columns = np.arange(rows), first
        if length > 1:
            numbers, columns = np.repeat(numbers, length), np.tile(np.arange(length), rows)
        return cls(length, first, first + length, starts, numbers, columns, begin[numbers] + columns)

    @cached_property
    def whole(self) -> bool:
        """Whether there is no padding."""
        return self.tokens == self.count * self.length

    @cached_property
    def longest(self) -> int:
        """Tokens of the row with the most."""
        return self.length if self.whole else int((self.last - self.first).max())

    @cached_property
    def shift(self) -> np.ndarray:
        """Columns of padding on each row's right, int64 [B]: what is before them moves so far to the right."""
        return self.length - self.last

    @property
    def count(self) -> int:
        """B."""
        return self.first.size

    @property
    def tokens(self) -> int:
        """M."""
        return self.positions.size

    def chosen(self, logits: LogitsFor, lengths: mx.array | None) -> tuple[np.ndarray, int]:
        """What goes through the head: each one's token among all, int64 [B n], -1 for padding; and n."""
        if isinstance(logits, str) and logits == "last" and self.whole:
            return self.starts[1:] - 1, 1
        columns = self._asked(logits, lengths)
        return self._among(columns), columns.shape[1]

    def every(self) -> np.ndarray:
        """As `chosen`, of all columns."""
        return self._among(self._asked("all", None))

    def _among(self, columns: np.ndarray) -> np.ndarray:
        """Columns of the rectangle [B, n] -> each one's token among all, -1 for padding; int64 [B n]."""
        if columns.size and (columns.min() < 0 or columns.max() >= self.length):
            raise ValueError(f"columns {columns.min()} to {columns.max()} of {self.length}")
        inside = (columns >= self.first[:, None]) & (columns < self.last[:, None])
        return np.where(inside, self.starts[:-1, None] + columns - self.first[:, None], -1).reshape(-1)

    def _asked(self, logits: LogitsFor, lengths: mx.array | None) -> np.ndarray:
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
