"""Residual, norm and a projection of a few rows in one launch."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.fused.residual import norm_dtype, residual_rms_norm_call, threads_for
from labkit.kernels.header import Header
from labkit.kernels.headers import SHARED, TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul.launches import (
    ONE_WAVE,
    few_rows_call,
    few_rows_form,
    row_kernels,
    row_tasks,
)
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.targets import target_in_use

_HERE = Path(__file__).parent

_INPUTS, _OUTPUTS = ["x", "residual", "weight", "eps", "w", "scales", "biases"], ["hidden", "y"]
_HEADER = SHARED.followed_by(TILES, Header.from_file(_HERE / "normed_rows.h"))

NORM_PROJECT = row_kernels(
    _HERE / "norm_project.metal",
    _INPUTS,
    _OUTPUTS,
    "1",
    reference.norm_project,
    header=_HEADER,
    where="InThreadgroup",
)
NORM_PROJECT["row"] = Kernel(
    "norm_project_row",
    _INPUTS,
    _OUTPUTS,
    "using Row = OneRowByTensor<T, BITS, GROUP, K, N, false, 1, 1, TASKS, UNROLL, InThreadgroup<T>>;\n"
    + (_HERE / "norm_project_row.metal").read_text(),
    header=_HEADER,
    reference=reference.norm_project,
)

MAX_ROWS_BYTES = 16 * 1024
"""Normed rows lie in threadgroup memory, beside what the product needs there."""

MAX_OUTPUTS = 16 * 1024
"""Columns of the product: each 16 of them norm the rows again. A head of 248,320 would read 190 MB for that."""


TILED_SIMDS = 12
"""Simdgroups of a threadgroup of the form "row", at most: the registers of two tiles in each leave room for no more."""


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
    tiles: int | None = None,
) -> dict:
    """The arguments of `NORM_PROJECT[form]` for `norm_project`.

    Args:
        simds, unroll: as for `few_rows_call`. tiles: of 16 columns that a threadgroup computes in form "row", two in
            `simds` simdgroups, up to as many as `TILED_SIMDS` are enough for; in the others one.

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
    if form == "row":
        product = _in_tiles(product, weights, tiles)
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


def _in_tiles(product: dict, weights: Packed, tiles: int | None) -> dict:
    """`few_rows_call`'s template, grid and threadgroup in form "row", with TASKS for SIMDS, and TILES: as many as give
    each multiprocessor one threadgroup, which norms the row once for all of them."""
    options = dict(product["template"])
    tasks, all_tiles = options.pop("SIMDS"), -(-weights.n // 16)
    if tasks > TILED_SIMDS or tasks != row_tasks(weights, options["UNROLL"]):
        raise ValueError(f"form 'row' has a simdgroup for each task of a tile, {TILED_SIMDS} at most: take 'tensor'")
    tiles = tiles or min(-(-all_tiles // ONE_WAVE), 2 * (TILED_SIMDS // tasks))
    threads = 32 * tasks * -(-tiles // 2)
    return product | {
        "template": [*options.items(), ("TASKS", tasks), ("TILES", tiles)],
        "grid": (-(-all_tiles // tiles) * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
    }


def norm_project_form(rows: int, like: mx.array, weights: Packed, target: str | None) -> str:
    """The form of `NORM_PROJECT` for some rows like an array on a target."""
    form = few_rows_form(rows, like, weights, target)
    return "tensor" if form == "row" and row_tasks(weights) > TILED_SIMDS else form


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
    form = norm_project_form(residual.shape[0], like, weights, target_in_use(target))
    return tuple(NORM_PROJECT[form](**norm_project_call(x, residual, weight, eps, weights, form), target=target))
