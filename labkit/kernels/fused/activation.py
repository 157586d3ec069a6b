"""The activation between two products of a dense MLP."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.header import Header
from labkit.kernels.launch import Kernel

_HERE = Path(__file__).parent

SWIGLU = Kernel.from_file(
    _HERE / "swiglu.metal",
    ["gate", "up", "count"],
    ["out"],
    header=Header.from_file(_HERE / "values.h"),
    reference=reference.swiglu,
)

_THREADS = 256


def swiglu_call(gate: mx.array, up: mx.array) -> dict:
    """The arguments of `SWIGLU` for `swiglu`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.size == 0:
        raise ValueError(
            f"gate and up need one shape and dtype, with something in it, not {gate.shape} {gate.dtype} and {up.shape} "
            f"{up.dtype}"
        )
    if gate.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"gate and up are float32, float16 or bfloat16, not {gate.dtype}")
    vector = 4 if gate.size % 4 == 0 and gate.size >= 8 else 1  # fewer lie in `constant`, which is read one by one
    threads = gate.size // vector
    return {
        "inputs": [gate, up, gate.size],
        "template": [("T", gate.dtype), ("VEC", vector)],
        "grid": (-(-threads // _THREADS) * _THREADS, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [gate.shape],
        "output_dtypes": [gate.dtype],
    }


@takes_arrays
def swiglu(gate: mx.array, up: mx.array, *, target: str | None = None) -> mx.array:
    """silu(gate) * up.

    Args:
        gate, up: [...], one shape and dtype (float32, float16 or bfloat16).
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [...] in their dtype, rounded once from fp32.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    return SWIGLU(**swiglu_call(gate, up), target=target)[0]
