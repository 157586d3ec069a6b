"""Cases, tolerances and baselines of the fused chains."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.fused import RESIDUAL_RMS_NORM, residual_rms_norm_call
from labkit.kernels.fused.chains_gates import CHAIN_ENTRIES
from labkit.kernels.registry import Bench, Case, Entry
from labkit.kernels.signature import Launch


def _launch(rows: int, dim: int, dtype: mx.Dtype) -> Launch:
    x, residual = (mx.random.normal((rows, dim)).astype(dtype) for _ in range(2))
    weight = mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype)
    return RESIDUAL_RMS_NORM.launch(**residual_rms_norm_call(x, residual, weight, 1e-6))


def _unfused(launch: Launch) -> list[mx.array]:
    x, residual, weight, _, _ = launch.inputs
    hidden = x + residual
    return [hidden, mx.fast.rms_norm(hidden, weight, 1e-6)]


def _bench(rows: int, dim: int = 2048) -> Bench:
    return Bench(
        f"{rows} rows of {dim}",
        lambda dtype: _launch(rows, dim, dtype),
        _unfused,
        bytes=(4 * rows * dim + dim) * 2,
        operations=5 * rows * dim,
    )


ENTRIES = [
    Entry(
        RESIDUAL_RMS_NORM,
        cases=(
            Case("4 rows of 512", lambda dtype: _launch(4, 512, dtype)),
            Case("3 rows of 1001", lambda dtype: _launch(3, 1001, dtype)),
            Case("1 row of 7", lambda dtype: _launch(1, 7, dtype)),
        ),
        summary="residual add and RMSNorm in one pass",
        benches=(_bench(1), _bench(2048)),
    ),
    *CHAIN_ENTRIES,
]
