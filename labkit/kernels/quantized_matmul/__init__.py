"""Products with packed weights: one row (GEMV), a few rows, many rows with dequantisation inside the tile.

| variant | rows | what it does |
| --- | --- | --- |
| `few_rows` | 1 to 8 | reads each weight once; its integers meet x unscaled, scale and bias follow a group's sum |
| `many_rows` | any | dequantises 32 columns of a tile at a time, in registers or threadgroup memory |
| `dequantize` | any | writes the dequantised matrix to memory, then multiplies: the baseline |
| `mlx` | any | `mx.quantized_matmul` |

The first two have two forms: plain (lanes, simdgroup matrices; any float dtype) and over CUDA's tensor cores (16 bits);
`few_rows` has a third over these, for one row, whose reads are all on their way before it multiplies.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.quantized_matmul.launches import (
    FEW,
    FEW_ROWS,
    MANY_ROWS,
    check_form,
    few_rows_call,
    few_rows_form,
    many_rows_call,
    result_dtype,
)
from labkit.kernels.quantized_matmul.native import few_rows_of
from labkit.kernels.quantized_matmul.packed import Packed, forms
from labkit.kernels.targets import target_in_use

__all__ = [
    "FEW",
    "FEW_ROWS",
    "MANY_ROWS",
    "Packed",
    "Variant",
    "choose_variant",
    "few_rows_call",
    "few_rows_form",
    "many_rows_call",
    "quantized_matmul",
]

Variant = Literal["few_rows", "many_rows", "dequantize", "mlx"]

DEQUANTIZE_FROM = 320
"""Rows from which dequantising once and multiplying beats the tile on CUDA. H200, N = 12288, K = 2048, 4 bits
(data/measured/h200_quantized_matmul.json): 71 us against the tile's 26 at 64 rows, 121 against 156 at 512, 355 against
983 at 4,096. Between the first two, both lines taken as straight, they meet at 314 rows."""

SMALL = 10 << 20
"""Weights below which one row takes MLX's op on CUDA. Same table: N = 2048 took it 6.8 us and `few_rows` 10.3, N =
12288 18.0 and 11.1; both lines taken as straight, they meet at 5,470 outputs of K = 2048, 11 million weights. Below
that both wait for the host, whose launch of MLX's op is the cheaper one: no text to hash."""

NATIVE_MANY_FROM = 9
"""Rows from which a CPU lays weights out in panels first: eight of them cost less than laying out."""


def choose_variant(
    rows: int, x: mx.array, weights: Packed, target: str | None, dtype: mx.Dtype | None = None
) -> Variant:
    """The variant for a product on a target. MLX's products have x's dtype: another one is left to our kernels.

    CUDA, H200, 4 bits, K = 2048, N = 12288: MLX's op took 18 us for one row, 59 for four, 16 for eight (it has a path
    for eight alone) and 29 for 64; `few_rows` 11, 14 and 18, `many_rows` 26 (data/measured/h200_quantized_matmul.json).
    Metal: MLX's op, whose kernels are tuned there, except for 2 to 8 rows, which it has no path for.
    CPU, two cores of an EPYC, N = K = 2048, fp32: one row 0.6 ms against MLX's 6.1, 512 rows 42 against 2,193
    (data/measured/cpu_kernels.json).
    """
    if not weights.fits_kernels:
        return "mlx"
    if dtype is not None and dtype != x.dtype and target in ("cuda", "metal"):
        return "few_rows" if rows <= FEW else "many_rows"
    if target in (None, "native", "reference"):
        return "few_rows" if rows < NATIVE_MANY_FROM else "many_rows"
    if target == "cuda" and (rows == FEW or (rows == 1 and weights.n * weights.k < SMALL)):
        return "mlx"
    if rows <= FEW and (target != "metal" or rows > 1):
        return "few_rows"
    if target == "metal":
        return "mlx"
    if target == "cuda":
        if "tensor" not in forms(x, weights):
            return "mlx"
        return "dequantize" if rows >= DEQUANTIZE_FROM else "many_rows"
    return "many_rows"


@takes_arrays
def quantized_matmul(
    x: mx.array,
    weights: Packed,
    *,
    variant: Variant | None = None,
    dtype: mx.Dtype | None = None,
    target: str | None = None,
) -> mx.array:
    """y = x W^T for packed weights W.

    Args:
        x: [..., K], float32, float16 or bfloat16, at least one row.
        weights: N x K.
        variant: how; by default what `choose_variant` says for this machine.
        dtype: of the result: x's, or float32, which keeps what 16 bits would round off.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [..., N]. Sums are fp32. `few_rows` uses the weights exactly, and for a float32 result so do `dequantize` and
        `mlx`; the others round each to x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit, or no such variant.

    Source: MLX's affine quantisation (`mx.quantize`). The tensor-core forms take their masks from Marlin (Frantar et
    al. 2024, arXiv 2408.11743) and FasterTransformer's interleaved int4 conversion.
    """
    if x.ndim == 0 or x.shape[-1] != weights.k or x.size == 0:
        raise ValueError(f"x needs {weights.k} columns and at least one row, not shape {x.shape}")
    rows = x if x.ndim == 2 else x.reshape(-1, weights.k)
    where = target_in_use(target)
    variant = variant or choose_variant(rows.shape[0], x, weights, where, dtype)
    dtype = result_dtype(x, dtype)
    form = "tensor" if where == "cuda" and "tensor" in forms(x, weights) else "plain"
    if variant == "few_rows" and where in (None, "native") and rows.shape[0] <= FEW and weights.w.ndim == 2:
        check_form(form, rows, weights)
        y = few_rows_of(rows, weights, dtype)
    elif variant == "few_rows":
        form = few_rows_form(rows.shape[0], rows, weights, where)
        (y,) = FEW_ROWS[form](**few_rows_call(rows, weights, form, dtype=dtype), target=target)
    elif variant == "many_rows":
        (y,) = MANY_ROWS[form](**many_rows_call(rows, weights, form, dtype=dtype), target=target)
    elif variant == "dequantize":
        matrix = mx.dequantize(*_as(dtype, weights), weights.group_size, weights.bits).astype(dtype)
        y = rows.astype(dtype) @ matrix.T
    elif variant == "mlx":
        y = mx.quantized_matmul(
            rows.astype(dtype), *_as(dtype, weights), transpose=True, group_size=weights.group_size, bits=weights.bits
        ).astype(dtype)
    else:
        raise ValueError(f"no variant {variant!r} of quantized_matmul; there are few_rows, many_rows, dequantize, mlx")
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], weights.n)


def _as(dtype: mx.Dtype, weights: Packed) -> list[mx.array]:
    """The weights' arrays, scales and biases as wide as a float32 result asks for."""
    if dtype != mx.float32:
        return weights.arrays
    return [weights.w, weights.scales.astype(dtype), weights.biases.astype(dtype)]
