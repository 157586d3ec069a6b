"""The residual stream's addition and the norm after it: what every block begins with."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.headers import SHARED
from labkit.kernels.launch import Kernel
from labkit.kernels.targets import threads_that_fit

RESIDUAL_RMS_NORM = Kernel.from_file(
    Path(__file__).parent / "residual_rms_norm.metal",
    ["x", "residual", "weight", "eps", "D"],
    ["hidden", "normed"],
    header=SHARED,
    reference=reference.residual_rms_norm,
)

MAX_ROW = 32 * 1024
"""Longest row: 32 values a thread where 1,024 are launched, 128 where Metal gets its 256."""


def residual_rms_norm_call(x: mx.array | None, residual: mx.array, weight: mx.array, eps: float) -> dict:
    """The arguments of `RESIDUAL_RMS_NORM` for `residual_rms_norm`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    adds, dtype = x is not None, norm_dtype(x, residual, weight)
    x = x if adds else residual  # an input that the kernel does not read then
    dim = x.shape[-1] if x.ndim else 0
    if weight.shape != (dim,):
        raise ValueError(f"weight needs shape ({dim},) for x of shape {x.shape}, not {weight.shape}")
    if not 0 < dim <= MAX_ROW or x.size == 0:
        raise ValueError(f"rows of 1 to {MAX_ROW} values, at least one of them; x has shape {x.shape}")
    threads = threads_for(dim)
    return {
        "inputs": [x, residual, weight, float(eps), dim],
        "template": [
            *(("T", dtype), ("R", residual.dtype), ("ADDS", adds), ("THREADS", threads)),
            ("VALUES", -(-dim // threads)),
        ],
        "grid": (x.size // dim * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [x.shape, x.shape],
        "output_dtypes": [residual.dtype, dtype],
    }


def norm_dtype(x: mx.array | None, residual: mx.array, weight: mx.array) -> mx.Dtype:
    """The norm's dtype: that of what is added; without it the shorter one of the stream's and the weight's.

    Raises:
        ValueError: x of another shape than the residual stream, or a stream that is neither of this dtype nor float32.
    """
    dtype = min(residual.dtype, weight.dtype, key=lambda dtype: dtype.size) if x is None else x.dtype
    if (x is not None and x.shape != residual.shape) or residual.dtype not in (dtype, mx.float32):
        added = "" if x is None else f"{x.shape} {x.dtype} and "
        raise ValueError(
            f"x and residual need one shape and dtype, or a residual in float32, not {added}{residual.shape} "
            f"{residual.dtype}, normed in {dtype}"
        )
    return dtype


def threads_for(dim: int) -> int:
    """Threads of a row: about 8 values each, which is enough loads in flight and few partial sums."""
    return threads_that_fit(min(1024, max(32, -(-dim // 8) // 32 * 32)))


@takes_arrays
def residual_rms_norm(
    x: mx.array | None, residual: mx.array, weight: mx.array, eps: float, *, target: str | None = None
) -> tuple[mx.array, mx.array]:
    """Add a block's output to the residual stream and normalise the sum for the next block.

    Args:
        x, residual: [..., D], one dtype (float32, float16 or bfloat16), or a residual in float32, D at most 32,768.
            Without x nothing is added: what the first block begins with.
        weight: [D], any float dtype.
        eps: added to the mean square.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        hidden: x + residual [..., D], in residual's dtype, and normed: hidden / sqrt(mean(hidden^2) + eps) * weight
        [..., D], in x's; without x in the shorter one of residual's dtype and weight's. The norm is taken of the
        rounded sum, as separate operations would.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: RMSNorm, Zhang and Sennrich 2019 (arXiv 1910.07467), in the pre-norm residual form of Qwen and Llama.
    """
    return tuple(RESIDUAL_RMS_NORM(**residual_rms_norm_call(x, residual, weight, eps), target=target))
