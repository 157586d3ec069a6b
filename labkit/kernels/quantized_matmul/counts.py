"""What a product with packed weights must move, dequantised inside the tile or to memory, from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProductCounts:
    """y [rows, n] = x [rows, k] W^T with W packed, by tiles of `tile` rows and `columns` columns.

    Attributes:
        rows, n, k: of the product. bits, group: of the packed weights. itemsize: bytes of an activation, a scale, and
            a dequantised weight.
        tile, columns: rows and columns of y that one threadgroup computes.
    """

    rows: int
    n: int
    k: int
    bits: int = 4
    group: int = 64
    itemsize: int = 2
    tile: int = 64
    columns: int = 64

    def __post_init__(self) -> None:
        if min(self.rows, self.n, self.k, self.tile, self.columns) < 1 or self.k % self.group:
            raise ValueError(f"sizes must be at least 1 and k a multiple of the group, not {self}")

    @property
    def row_tiles(self) -> int:
        """Tiles above each other: how often the weights are asked for."""
        return -(-self.rows // self.tile)

    @property
    def packed_bytes(self) -> int:
        """The weights as stored, with a scale and a bias a group."""
        return self.n * self.k * self.bits // 8 + 2 * self.n * (self.k // self.group) * self.itemsize

    @property
    def dense_bytes(self) -> int:
        """The same weights dequantised."""
        return self.n * self.k * self.itemsize

    @property
    def activation_bytes(self) -> int:
        """x read once and y written once."""
        return self.rows * (self.k + self.n) * self.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.rows * self.n * self.k

    @property
    def in_tile_bytes(self) -> int:
        """At the least, dequantised inside the tile: packed weights and activations once."""
        return self.packed_bytes + self.activation_bytes

    @property
    def to_memory_bytes(self) -> int:
        """At the least, dequantised to memory: packed weights read, dense ones written and read, activations once."""
        return self.packed_bytes + 2 * self.dense_bytes + self.activation_bytes

    @property
    def words_asked(self) -> int:
        """Bytes of packed words that the tiles ask for (scales and biases not counted); n a multiple of `columns`."""
        return self.row_tiles * self.n * self.k * self.bits // 8

    @property
    def dense_asked(self) -> int:
        """Bytes of dequantised weights that the same tiles would ask for."""
        return self.row_tiles * self.dense_bytes

    @property
    def useful(self) -> float:
        """The share of multiplied rows that are rows of x: fragments of 16 rows without any are skipped."""
        return self.rows / (-(-self.rows // 16) * 16)

    def in_tile_seconds(self, byte_rate: float, tile_rate: float) -> float:
        """Predicted time of one launch: bytes and arithmetic overlap, so the longer of the two.

        Args:
            byte_rate: bytes a second from memory. tile_rate: operations a second of the tile, padded rows included.
        """
        return max(self.in_tile_bytes / byte_rate, self.operations / self.useful / tile_rate)

    def to_memory_seconds(self, byte_rate: float, matmul_rate: float, pass_rate: float | None = None) -> float:
        """Predicted time of two launches: the pass that dequantises, then a plain product.

        Args:
            byte_rate, matmul_rate: of the plain product. pass_rate: bytes a second of the pass; `byte_rate` without it.
        """
        first = (self.packed_bytes + self.dense_bytes) / (pass_rate or byte_rate)
        return first + max((self.dense_bytes + self.activation_bytes) / byte_rate, self.operations / matmul_rate)
