"""What follows the scan: RMSNorm of each head's output, gated by silu(z)."""

from __future__ import annotations

from math import gcd
from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta import reference
from labkit.kernels.gated_delta.shapes import DELTA, check_activations, expect
from labkit.kernels.launch import Kernel

GATED_NORM = Kernel.from_file(
    Path(__file__).parent / "gated_norm.metal",
    ["y", "z", "weight", "eps"],
    ["out"],
    name="gated_delta_norm",
    header=DELTA,
    reference=reference.norm,
)


def gated_norm_call(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> dict:
    """The arguments of `GATED_NORM` for `gated_norm`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    dim = y.shape[-1] if y.ndim else 0
    if dim < 32 or dim % 32 or dim > 256 or y.size == 0:
        raise ValueError(f"rows of 32 to 256 values, a multiple of 32, at least one of them; y has shape {y.shape}")
    check_activations(y.dtype)
    if z.size != y.size or z.shape[:2] != y.shape[:2]:
        raise ValueError(f"z needs a gate for each value of y {y.shape}, not shape {z.shape}")
    expect("weight", weight, (dim,))
    simdgroups = gcd(y.size // dim, 8)
    return {
        "inputs": [y, z, weight, float(eps)],
        "template": [("T", y.dtype), ("DV", dim)],
        "grid": (y.size // dim * 32, 1, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [y.shape],
        "output_dtypes": [y.dtype],
    }


@takes_arrays
def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float, *, target: str | None = None) -> mx.array:
    """y / sqrt(mean(y^2) + eps) * weight * silu(z), in fp32, rounded once.

    Args:
        y: [B, T, Hv, Dv], float32, float16 or bfloat16. z: as many values, [B, T, Hv, Dv] or [B, T, Hv * Dv].
        weight: [Dv], any float dtype. eps: added to the mean square.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [B, T, Hv, Dv] in y's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: Qwen3-Next's RMSNormGated (mlx-lm's models/qwen3_next.py).
    """
    return GATED_NORM(**gated_norm_call(y, z, weight, eps), target=target)[0]
