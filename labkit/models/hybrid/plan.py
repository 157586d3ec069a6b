"""How one forward computes: on which target, by which variants; and what its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.fused import norm_project, residual_rms_norm
from labkit.kernels.fused.projection import fits
from labkit.kernels.quantized_matmul import (
    DEQUANTIZE_FROM,
    FEW,
    MANY_ROWS,
    Packed,
    choose_variant,
    many_rows_call,
    quantized_matmul,
)
from labkit.kernels.quantized_matmul.packed import forms
from labkit.kernels.targets import target_in_use
from labkit.models.hybrid.config import NotSpecialised
from labkit.models.hybrid.matrix import Matrix, Weights
from labkit.models.hybrid.variants import Variants

INVARIANT_TILE = 32
"""Rows of a tile in the invariant mode, for one row as for thousands: another tile may sum in another order."""


@dataclass(frozen=True)
class Plan:
    """Where and how.

    Attributes:
        target: of the kernels; None where MLX computes on a CPU and nobody asked for kernels.
        variants: the switches. invariant: whether no bit may depend on neighbours or on how tokens are cut into calls.
    """

    target: str | None
    variants: Variants
    invariant: bool

    @classmethod
    def here(cls, variants: Variants, invariant: bool) -> Plan:
        """For this machine, or for the target that `use_target` set."""
        return cls(target_in_use(), variants, invariant)

    @property
    def kernels(self) -> bool:
        """Whether layers launch kernels, rather than MLX's own operations on a CPU."""
        return self.target is not None

    @property
    def own(self) -> bool:
        """Whether few rows keep to labkit's launches, also where MLX's are the cheaper ones."""
        return self.kernels and self.variants.decode_rows == "own"

    def product(self, x: mx.array, matrix: Matrix, dtype: mx.Dtype | None = None) -> mx.array:
        """x [..., K] times the transposed matrix -> [..., N], in `dtype` (x's by default, or float32).

        As float32, products with packed weights keep the sums as they are; MLX's with plain floats have x's precision.
        """
        outputs = [self._one(x, part, dtype or x.dtype) for part in matrix.parts]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)

    def norm_product(
        self, update: mx.array | None, stream: mx.array, norm: mx.array, eps: float, matrix: Matrix
    ) -> tuple[mx.array, mx.array]:
        """update, stream [..., K], a norm's weight -> the stream with the update, if there is one, and its norm times
        the transposed matrix, [..., N]."""
        like = norm if update is None else update  # of the norm's dtype, where the stream is wider
        if self._norms_inside(stream, like, matrix):
            return norm_project(update, stream, norm, eps, matrix.packed)
        if update is None and not self.kernels:
            return stream, self.product(mx.fast.rms_norm(stream, norm, eps).astype(norm.dtype), matrix)
        stream, normed = residual_rms_norm(update, stream, norm, eps)
        return stream, self.product(normed, matrix)

    def _norms_inside(self, x: mx.array, like: mx.array, matrix: Matrix) -> bool:
        """Whether the product would be our kernel for few rows, and these can be normed in its launch."""
        packed = matrix.packed
        if not self.kernels or self.invariant or not self.variants.fuse_norm or packed is None or x.ndim != 2:
            return False
        rows = x.shape[0]
        if rows > FEW or not packed.fits_kernels or not fits(rows, like.dtype, packed):
            return False
        chosen = self._variant(rows, packed) or choose_variant(rows, like, packed, self.target)
        return chosen == "few_rows"

    def _one(self, x: mx.array, part: Weights, dtype: mx.Dtype) -> mx.array:
        if not isinstance(part, Packed):
            if self.invariant and self.kernels:
                raise NotSpecialised("the invariant mode needs packed weights: MLX's products of floats vary with rows")
            return (x @ part.T).astype(dtype)
        if self.invariant:
            return self._invariant(x, part, dtype)
        return quantized_matmul(x, part, variant=self._variant(x.size // part.k, part), dtype=dtype)

    def _variant(self, rows: int, part: Packed) -> str | None:
        if not self.kernels or not part.fits_kernels:
            return None
        if rows <= FEW:
            return {"gemv": None, "tile": "many_rows", "own": "few_rows"}[self.variants.decode_rows]
        if self.own and rows < DEQUANTIZE_FROM and self.variants.dequantise == "auto":
            return "many_rows"
        return {"auto": None, "in_tile": "many_rows", "before": "dequantize"}[self.variants.dequantise]

    def _invariant(self, x: mx.array, part: Packed, dtype: mx.Dtype) -> mx.array:
        """One kernel with one tile, whose rows do not know of each other. MLX's product on a CPU goes row by row."""
        if not self.kernels:
            return quantized_matmul(x, part, variant="mlx", dtype=dtype)
        form = "tensor" if self.target == "cuda" and "tensor" in forms(x, part) else "plain"
        rows = x.reshape(-1, part.k)
        (y,) = MANY_ROWS[form](**many_rows_call(rows, part, form, tile=INVARIANT_TILE, dtype=dtype))
        return y.reshape(*x.shape[:-1], part.n)


class Columns(NamedTuple):
    """Where a few new tokens find and leave their keys and values, on the device: int32, for each of B * L tokens.

    Attributes:
        first, last: each token sees the columns from first to below last.
        settled: its first value says how many columns stand in the buffers. write: and the tail's column of the first
            new token. With pages each row's own, [B] and [B, 1].
    """

    first: mx.array
    last: mx.array
    settled: mx.array
    write: mx.array


@dataclass(frozen=True)
class Step:
    """The rows of one forward.

    Attributes:
        plan: how to compute it.
        batch, length: B rows of L columns.
        positions: of each row's first column, int32 [B].
        spans: int32 [B, 2], the columns of each row that count; None if all do.
        mask: of attention by MLX's operations, as a cache's `make_mask` gives it.
        first: the first visible column of each row, int32 [B]; None without left padding.
        columns: where attention's columns are, for a few new tokens beside a tail.
        recording: whether recurrent layers give their states after every token.
    """

    plan: Plan
    batch: int
    length: int
    positions: mx.array
    spans: mx.array | None = None
    mask: mx.array | str | None = None
    first: mx.array | None = None
    columns: Columns | None = None
    recording: bool = False

    @property
    def tokens(self) -> int:
        """Columns of all rows."""
        return self.batch * self.length
