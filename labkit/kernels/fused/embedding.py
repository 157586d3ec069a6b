"""An embedding's lookup in packed weights, in one launch."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.header import Header
from labkit.kernels.headers import TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul.packed import Packed

_HERE = Path(__file__).parent

EMBEDDING_ROWS = Kernel.from_file(
    _HERE / "embedding_rows.metal",
    ["tokens", "w", "scales", "biases", "count"],
    ["y"],
    header=Header.from_file(_HERE / "values.h").followed_by(TILES),
    reference=reference.embedding_rows,
)

_THREADS = 128


def embedding_rows_call(tokens: mx.array, weights: Packed, dtype: mx.Dtype) -> dict:
    """The arguments of `EMBEDDING_ROWS` for `embedding_rows`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if not mx.issubdtype(tokens.dtype, mx.integer) or tokens.size == 0:
        raise ValueError(f"tokens are whole numbers, at least one, not {tokens.shape} {tokens.dtype}")
    if weights.w.ndim != 2 or not weights.fits_kernels:
        raise ValueError(f"one matrix is needed, of 8 words and groups at least, not {weights.w.shape}")
    if dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"rows are float32, float16 or bfloat16, not {dtype}")
    threads = tokens.size * weights.w.shape[-1]
    return {
        "inputs": [tokens, *weights.arrays, tokens.size],
        "template": [("T", dtype), *weights.template],
        "grid": (-(-threads // _THREADS) * _THREADS, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [(*tokens.shape, weights.k)],
        "output_dtypes": [dtype],
    }


@takes_arrays
def embedding_rows(tokens: mx.array, weights: Packed, dtype: mx.Dtype, *, target: str | None = None) -> mx.array:
    """Rows of a packed matrix as floats: gathers of words, scales and biases, and their dequantisation, in one launch.

    Args:
        tokens: [...], any integer dtype, at least one. As in MLX a negative number counts from the last row. Numbers
            that no row has, for which MLX's gather reads foreign memory, read nothing and give NaN.
        weights: N x K.
        dtype: float32, float16 or bfloat16.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [..., K] in dtype: scale * q + bias in fp32, rounded once. `mx.dequantize` rounds as its back end does, on a CPU
        the product too.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: MLX's affine quantisation (`mx.quantize`).
    """
    return EMBEDDING_ROWS(**embedding_rows_call(tokens, weights, dtype), target=target)[0]
