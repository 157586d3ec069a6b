"""Residual, norm and a projection of a few rows in one launch."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.fused.residual import norm_dtype, residual_rms_norm_call, threads_for
from labkit.kernels.header import Header
from labkit.kernels.headers import SHARED, TILES
from labkit.kernels.quantized_matmul.launches import few_rows_call, row_kernels
from labkit.kernels.quantized_matmul.packed import Packed, forms
from labkit.kernels.targets import target_in_use

_HERE = Path(__file__).parent

NORM_PROJECT = row_kernels(
    _HERE / "norm_project.metal",
    ["x", "residual", "weight", "eps", "w", "scales", "biases"],
    ["hidden", "y"],
    "M false 1 1",
    reference.norm_project,
    header=SHARED.followed_by(TILES, Header.from_file(_HERE / "normed_rows.h")),
    where="InThreadgroup",
)

MAX_ROWS_BYTES = 16 * 1024
"""Normed rows lie in threadgroup memory, beside what the product needs there."""

MAX_OUTPUTS = 16 * 1024
"""Columns of the product: each 16 of them norm the rows again. A head of 248,320 would read 190 MB for that."""


def fits(rows: int, dtype: mx.Dtype, weights: Packed) -> bool:
    """Whether rows and weights are small enough for `norm_project`."""
    return rows * weights.k * dtype.size <= MAX_ROWS_BYTES and weights.n <= MAX_OUTPUTS


def norm_project_call(
    x: mx.array | None,
    residual: mx.array,
    weight: mx.array,
    eps: float,
    weights: Packed,
    form: str = "plain",
    *,
    simds: int | None = None,
    unroll: int | None = None,
) -> dict:
    """The arguments of `NORM_PROJECT[form]` for `norm_project`.

    Args:
        simds, unroll: as for `few_rows_call`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or too large for threadgroup memory.
    """
    norm, dtype = residual_rms_norm_call(x, residual, weight, eps), norm_dtype(x, residual, weight)
    normed = residual.astype(dtype) if x is None else x  # of the norm's shape and dtype: values are not read
    product = few_rows_call(normed, weights, form, simds=simds, unroll=unroll)
    if not fits(residual.shape[0], dtype, weights):
        raise ValueError(
            f"rows of at most {MAX_ROWS_BYTES} bytes in all and at most {MAX_OUTPUTS} columns, not {residual.shape} "
            f"{dtype} and {weights.n}: take residual_rms_norm and quantized_matmul"
        )
    return {
        "inputs": [residual if x is None else x, residual, weight, float(eps), *weights.arrays],
        "template": [
            *product["template"],
            ("R", residual.dtype),
            ("ADDS", x is not None),
            ("THREADS", threads_for(weights.k)),
        ],
        "grid": product["grid"],
        "threadgroup": product["threadgroup"],
        "output_shapes": [norm["output_shapes"][0], *product["output_shapes"]],
        "output_dtypes": [residual.dtype, dtype],
    }


@takes_arrays
def norm_project(
    x: mx.array | None,
    residual: mx.array,
    weight: mx.array,
    eps: float,
    weights: Packed,
    *,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """`residual_rms_norm`, and `quantized_matmul` of its norm, in one launch for a few rows.

    Each threadgroup norms the rows for itself while its weights travel: some 12 KB more from the cache for each 16
    columns, for a launch less.

    Args:
        x, residual: [T, D], as for `residual_rms_norm`, T at most 8 and norms of at most 16 KB in all.
        weight: [D], of the norm, any float dtype. eps: added to the mean square.
        weights: N x D, N at most 16,384.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        hidden: x + residual [T, D], and y: norm(hidden) times the transposed matrix [T, N], in the norm's dtype: the
        bits of `residual_rms_norm` and of `quantized_matmul`'s variant "few_rows".

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: as the two operations.
    """
    dtype = norm_dtype(x, residual, weight)
    like = next(array for array in (x, residual, weight) if array is not None and array.dtype == dtype)
    form = "tensor" if target_in_use(target) == "cuda" and "tensor" in forms(like, weights) else "plain"
    return tuple(NORM_PROJECT[form](**norm_project_call(x, residual, weight, eps, weights, form), target=target))
