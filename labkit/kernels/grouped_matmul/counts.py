"""What the experts' products must move and multiply, from the loads of the experts and the tile alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FRAGMENT = 16
"""Rows that a tile multiplies at least: fragments without rows are skipped."""


def choose_at_random(tokens: int, k: int, experts: int, skew: float = 0.0, seed: int = 0) -> np.ndarray:
    """[tokens, k] int32, experts of each token, no expert twice.

    Args:
        tokens, k, experts: sizes; k at most `experts`.
        skew: the load falls as 1 / rank^skew; 0 is even.
        seed: of the draw (Gumbel top-k).
    """
    rng = np.random.default_rng(seed)
    load = -skew * np.log(np.arange(1, experts + 1))
    return np.argsort(-(load + rng.gumbel(size=(tokens, experts))), axis=-1)[:, :k].astype(np.int32)


def expert_loads(indices: np.ndarray, experts: int) -> np.ndarray:
    """[experts], rows of each expert for indices [T, k]."""
    return np.bincount(indices.reshape(-1), minlength=experts)


@dataclass(frozen=True)
class GroupedCounts:
    """Products of sorted rows by the weights of their experts, each expert's rows cut into blocks of `tile`.

    Attributes:
        loads: rows of each expert.
        n, k: of one matrix of an expert. matrices: that each expert multiplies its rows by (2: gate and up).
        tile: rows of a block. bits, group, itemsize: of the packed weights and the activations.
    """

    loads: Sequence[int]
    n: int
    k: int
    tile: int
    matrices: int = 2
    bits: int = 4
    group: int = 64
    itemsize: int = 2

    def __post_init__(self) -> None:
        if min(self.n, self.k, self.tile, self.matrices) < 1 or self.k % self.group or min(self.loads, default=-1) < 0:
            raise ValueError(f"sizes must be at least 1, k a multiple of the group, loads not below 0: {self}")

    @property
    def rows(self) -> int:
        """Assignments: pairs of a token and one of its experts."""
        return int(sum(self.loads))

    @property
    def blocks(self) -> int:
        """Blocks of at most `tile` rows of one expert."""
        return int(sum(-(-load // self.tile) for load in self.loads))

    @property
    def filled(self) -> float:
        """The share of the blocks' rows that hold a row."""
        return self.rows / (self.blocks * self.tile)

    @property
    def multiplied_rows(self) -> int:
        """Rows that are multiplied: each block's, rounded up to fragments of 16."""
        whole = sum(load // self.tile * (-(-self.tile // FRAGMENT) * FRAGMENT) for load in self.loads)
        return int(whole + sum(-(-(load % self.tile) // FRAGMENT) * FRAGMENT for load in self.loads))

    @property
    def expert_bytes(self) -> int:
        """Packed weights of one expert's matrices."""
        return self.matrices * self.n * (self.k * self.bits // 8 + 2 * self.k // self.group * self.itemsize)

    @property
    def weight_bytes(self) -> int:
        """Weights of the experts that got rows, once: what must come from memory."""
        return sum(load > 0 for load in self.loads) * self.expert_bytes

    @property
    def weights_asked(self) -> int:
        """Weights that the blocks ask for and dequantise: all of an expert's, for each of its blocks."""
        return self.blocks * self.expert_bytes

    @property
    def operations(self) -> int:
        """Multiplications and additions that are wanted."""
        return 2 * self.rows * self.matrices * self.n * self.k

    def seconds(self, byte_rate: float, row_rate: float, block_rows: float = 0.0) -> float:
        """Predicted time: the longer of the bytes and of the work.

        Args:
            byte_rate: bytes a second from memory.
            row_rate: operations a second of the multiplications alone.
            block_rows: what a block costs beside its rows, as rows: dequantising its weights, above all.
        """
        moved = self.weight_bytes + self.rows * (self.k + self.n) * self.itemsize
        rows = self.multiplied_rows + block_rows * self.blocks
        return max(moved / byte_rate, 2 * rows * self.matrices * self.n * self.k / row_rate)
