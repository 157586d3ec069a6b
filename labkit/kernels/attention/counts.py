"""What one launch of decode attention must move, from its sizes alone, and the time that a device's rates give it."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.kernels.attention.launches import RESIDENT


@dataclass(frozen=True)
class DecodeCounts:
    """One new token of each row against its visible columns, form "lanes".

    Attributes:
        columns: cached tokens that a row sees. parts: threadgroups that share them.
        pack: query heads that share one read of a KV head's columns.
        rows, heads, kv_heads, width: query rows, query heads and KV heads of `width` elements.
        itemsize: bytes of a cached element.
    """

    columns: int
    parts: int
    pack: int = 8
    rows: int = 1
    heads: int = 16
    kv_heads: int = 2
    width: int = 256
    itemsize: int = 2

    def __post_init__(self) -> None:
        if min(self.columns, self.parts, self.pack, self.rows) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"sizes must be at least 1 and the query heads a multiple of the KV heads, not {self}")

    @property
    def reads(self) -> int:
        """How often each visible column of a KV head is asked for: once a pack of query heads."""
        return -(-self.heads // self.kv_heads // self.pack)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the visible columns, once: what must come from memory."""
        return 2 * self.rows * self.kv_heads * self.columns * self.width * self.itemsize

    @property
    def asked_bytes(self) -> int:
        """Keys and values that the threadgroups ask for; what exceeds `kv_bytes` is left to the caches.

        Simdgroups take four columns at a time; those that they read beyond a part's end are not counted.
        """
        return self.kv_bytes * self.reads

    @property
    def partial_bytes(self) -> int:
        """The parts' fp32 sums, largest scores and totals, written once and read once by the merge."""
        return 2 * self.rows * self.heads * self.parts * (self.width + 2) * 4

    @property
    def threadgroups(self) -> int:
        """Threadgroups of the launch."""
        return self.rows * self.kv_heads * self.reads * self.parts

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        return 4 * self.rows * self.heads * self.columns * self.width

    def filled(self, resident: int = RESIDENT) -> float:
        """The share of a device's places for threadgroups that is taken on average, over all waves of the launch."""
        return self.threadgroups / (-(-self.threadgroups // resident) * resident)

    def seconds(self, rate: float, *, resident: int = RESIDENT, launch: float = 4e-6) -> float:
        """The predicted time of both kernels.

        Args:
            rate: bytes a second that the device reads when all its places for threadgroups are taken.
            resident: those places; fewer threadgroups reach only their share of the rate, and a last wave that does not
                fill the places takes as long as one that does.
            launch: seconds that the second, dependent launch costs.
        """
        return self.kv_bytes / (rate * self.filled(resident)) + self.partial_bytes / rate + launch


def part_columns(first: int, last: int, parts: int, block: int = 0) -> list[tuple[int, int]]:
    """The columns (begin, end) that each part of a row reads, as `part_of_columns` in columns.h cuts them.

    Args:
        first, last: the row's visible columns. parts: how many share them.
        block: 0 for equal parts (layout "general"), otherwise the columns of a block (layout "fixed").
    """
    share = block or -(-max(last - first, 0) // parts)
    cut = [(first + part * share, min(last, first + (part + 1) * share)) for part in range(parts)]
    return [(begin, max(begin, end)) for begin, end in cut]
