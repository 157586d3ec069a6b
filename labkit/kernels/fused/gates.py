"""Cases, tolerances and baselines of the fused chains."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from labkit.kernels.fused import (
    EMBEDDING_ROWS,
    NORM_PROJECT,
    PLACE_COLUMNS,
    RESIDUAL_RMS_NORM,
    SWIGLU,
    embedding_rows_call,
    norm_project_call,
    place_columns_call,
    residual_rms_norm_call,
    swiglu_call,
)
from labkit.kernels.fused.chains_gates import CHAIN_ENTRIES, SCORED
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.signature import Launch


def _launch(rows: int, dim: int, dtype: mx.Dtype, adds: bool = True, stream: mx.Dtype | None = None) -> Launch:
    residual = mx.random.normal((rows, dim)).astype(stream or dtype)
    x = mx.random.normal((rows, dim)).astype(dtype) if adds else None
    weight = mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype)
    return RESIDUAL_RMS_NORM.launch(**residual_rms_norm_call(x, residual, weight, 1e-6))


def _project(
    form: str,
    rows: int,
    n: int,
    dim: int,
    bits: int,
    group: int,
    dtype: mx.Dtype,
    adds: bool = True,
    stream: mx.Dtype | None = None,
    **options,
) -> Launch:
    residual = mx.random.normal((rows, dim)).astype(stream or dtype)
    x = mx.random.normal((rows, dim)).astype(dtype) if adds else None
    weight = mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype)
    weights = Packed.quantize((mx.random.normal((n, dim)) * dim**-0.5).astype(dtype), group, bits)
    return NORM_PROJECT[form].launch(**norm_project_call(x, residual, weight, 1e-6, weights, form, **options))


def _columns(batch: int, length: int, padded: bool) -> Launch:
    settled, tail, most = (mx.random.randint(0, high, (1,)) for high in (1000, 200, 9))
    padding = mx.random.randint(0, most.item() + 1, (batch,)) if padded else None
    return PLACE_COLUMNS.launch(**place_columns_call(settled + tail, settled, batch, length, padding))


def _embed(tokens: mx.array, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, scales=None) -> Launch:
    weights = Packed.quantize(mx.random.normal((n, k)).astype(scales or dtype), group, bits)
    return EMBEDDING_ROWS.launch(**embedding_rows_call(tokens, weights, dtype))


def _tokens(*shape: int, below: int) -> mx.array:
    return mx.random.randint(0, below, shape)


def _gather_and_dequantize(launch: Launch) -> list[mx.array]:
    tokens, *packed = launch.inputs[:4]
    return [mx.dequantize(*(array[tokens] for array in packed), 64, 4)]


def _swiglu(shape: tuple[int, ...], dtype: mx.Dtype) -> Launch:
    gate, up = (4 * mx.random.normal(shape).astype(dtype) for _ in range(2))
    return SWIGLU.launch(**swiglu_call(gate, up))


def _sigmoid_and_products(launch: Launch) -> list[mx.array]:
    gate, up, _ = launch.inputs
    return [gate * mx.sigmoid(gate) * up]


def _add_norm_multiply(launch: Launch) -> list[mx.array]:
    x, residual, weight, _, *packed = launch.inputs
    hidden = x + residual
    normed = mx.fast.rms_norm(hidden, weight, 1e-6)
    return [hidden, mx.quantized_matmul(normed, *packed, transpose=True, group_size=64, bits=4)]


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


# Rows, columns of the product, columns of the rows, bits, group; whether rows are added to a stream, its dtype.
_PROJECTED = (
    (1, 32, 1024, 4, 64, True, None),
    (3, 41, 96, 8, 32, True, None),
    (2, 17, 96, 4, 32, False, None),
    (2, 18, 640, 4, 64, True, mx.float32),
    (1, 16, 96, 4, 32, False, mx.float32),
)


def _projected(form: str, rows: int, n: int, dim: int, bits: int, group: int, adds: bool, stream) -> Case:
    what = "" if adds else ", nothing to add"
    options = {"tiles": 2} if form == "row" else {"simds": 2} if dim == 1024 else {}
    return Case(
        f"{rows} x {dim} by {n}, {bits} bits{what}" + ", a float32 stream" * (stream is not None),
        partial(_project, form, rows, n, dim, bits, group, adds=adds, stream=stream, **options),
    )


ENTRIES = [
    Entry(
        RESIDUAL_RMS_NORM,
        cases=(
            Case("4 rows of 512", lambda dtype: _launch(4, 512, dtype)),
            Case("3 rows of 1001", lambda dtype: _launch(3, 1001, dtype)),
            Case("1 row of 7", lambda dtype: _launch(1, 7, dtype)),
            Case("2 rows of 96, nothing to add", lambda dtype: _launch(2, 96, dtype, False)),
            Case("2 rows of 130 to a float32 stream", lambda dtype: _launch(2, 130, dtype, stream=mx.float32)),
            Case("1 row of a float32 stream", lambda dtype: _launch(1, 40, dtype, False, mx.float32)),
        ),
        summary="residual add and RMSNorm in one pass",
        benches=(_bench(1), _bench(2048)),
    ),
    *(
        Entry(
            NORM_PROJECT[form],
            cases=tuple(_projected(form, min(rows, most), *size) for rows, *size in _PROJECTED),
            summary=f"residual add, RMSNorm and the projections of a few rows, {how}",
            dtypes=dtypes,
            tolerance=SCORED,
            benches=(
                Bench(
                    "1 row of 2048 by 12352, 4 bits",
                    lambda dtype, form=form: _project(form, 1, 12352, 2048, 4, 64, dtype),
                    _add_norm_multiply,
                    bytes=12352 * (2048 // 2 + 2048 // 64 * 4) + 2 * (3 * 2048 + 12352),
                    operations=2 * 2048 * 12352,
                ),
            ),
        )
        for form, most, how, dtypes in (
            ("plain", 3, "lanes", (mx.float32, mx.float16, mx.bfloat16)),
            ("tensor", 3, "tensor cores", (mx.float16, mx.bfloat16)),
            ("row", 1, "tensor cores, one row", (mx.float16, mx.bfloat16)),
        )
    ),
    Entry(
        SWIGLU,
        cases=(
            Case("3 rows of 420", lambda dtype: _swiglu((3, 420), dtype)),
            Case("7 values", lambda dtype: _swiglu((7,), dtype)),
        ),
        summary="the activation of a dense MLP",
        benches=(
            Bench(
                "16 rows of 17408",
                lambda dtype: _swiglu((16, 17408), dtype),
                _sigmoid_and_products,
                bytes=3 * 2 * 16 * 17408,
                operations=4 * 16 * 17408,
            ),
        ),
    ),
    Entry(
        EMBEDDING_ROWS,
        cases=(
            Case("1 token of 40 x 2048, 4 bits", lambda dtype: _embed(_tokens(1, 1, below=40), 40, 2048, 4, 64, dtype)),
            Case(
                "3 x 3 tokens of 41 x 96, 8 bits, scales in fp16",
                lambda dtype: _embed(_tokens(3, 3, below=41), 41, 96, 8, 32, dtype, mx.float16),
            ),
            Case(
                "the first and the last, and five that are not there",
                lambda dtype: _embed(mx.array([0, 8, 9, -1, -9, -10, 1 << 30, -(1 << 31), 12]), 9, 128, 4, 128, dtype),
            ),
        ),
        summary="rows of a packed embedding",
        # Products of 8-bit integers and 16-bit scales are exact in fp32, fused or not.
        tolerance={
            mx.float32: Tolerance(1e-6, 1e-6),
            mx.float16: Tolerance(0, 0),
            mx.bfloat16: Tolerance(0, 0),
        },
        benches=tuple(
            Bench(
                f"{count} tokens of 2048, 4 bits",
                lambda dtype, count=count: _embed(_tokens(count, below=32768), 32768, 2048, 4, 64, dtype),
                _gather_and_dequantize,
                bytes=count * (2048 // 2 + 2048 // 64 * 4 + 2 * 2048),
                operations=2 * count * 2048,
            )
            for count in (1, 2048)
        ),
    ),
    Entry(
        PLACE_COLUMNS,
        cases=(
            Case("9 padded rows of 3 tokens", lambda _: _columns(9, 3, True)),
            Case("1 row of 1 token", lambda _: _columns(1, 1, False)),
            Case("2 rows of 2 tokens", lambda _: _columns(2, 2, False)),
        ),
        summary="the columns that new tokens see and leave",
        dtypes=(mx.int32,),
        tolerance={mx.int32: Tolerance(0, 0)},
    ),
    *CHAIN_ENTRIES,
]
