"""Cases, tolerances and benches of the quantised product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from labkit.kernels.quantized_matmul.launches import FEW_ROWS, MANY_ROWS, few_rows_call, many_rows_call
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.quantized_matmul.reference import packed_of
from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.signature import Launch

HALVES = (mx.float16, mx.bfloat16)

# x and weights are about normal, so that a product of K = 2048 is about 45; the last bits of its larger values decide.
EXACT = {
    mx.float32: Tolerance(1e-4, 1e-5),
    mx.float16: Tolerance(4e-3, 1e-3),
    mx.bfloat16: Tolerance(2e-2, 6e-3),
}
# Weights are rounded to the activations' dtype: errors of half a unit each, at random over K.
ROUNDED = {
    mx.float32: Tolerance(1e-4, 1e-5),
    mx.float16: Tolerance(2e-2, 2e-3),
    mx.bfloat16: Tolerance(1.5e-1, 8e-3),
}


def random_packed(
    n: int, k: int, dtype: mx.Dtype, bits: int = 4, group: int = 64, experts: int | None = None
) -> Packed:
    """Normal weights, packed; scales in `dtype`."""
    shape = (n, k) if experts is None else (experts, n, k)
    return Packed.quantize(mx.random.normal(shape).astype(dtype), group, bits)


def _few(
    form: str, m: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, wide: bool = False, **options
) -> Launch:
    x, options = mx.random.normal((m, k)).astype(dtype), {**options, "dtype": mx.float32 if wide else None}
    return FEW_ROWS[form].launch(**few_rows_call(x, random_packed(n, k, dtype, bits, group), form, **options))


def _many(
    form: str, m: int, n: int, k: int, bits: int, group: int, dtype: mx.Dtype, wide: bool = False, **options
) -> Launch:
    x, options = mx.random.normal((m, k)).astype(dtype), {**options, "dtype": mx.float32 if wide else None}
    return MANY_ROWS[form].launch(**many_rows_call(x, random_packed(n, k, dtype, bits, group), form, **options))


def _mlx(launch: Launch) -> Sequence[mx.array]:
    packed = packed_of(launch, 1)
    return [
        mx.quantized_matmul(
            launch.inputs[0], *packed.arrays, transpose=True, group_size=packed.group_size, bits=packed.bits
        )
    ]


def _bench(make, m: int, n: int, k: int) -> Bench:
    return Bench(
        f"{m} x {k} by {n}, 4 bits",
        partial(make, m, n, k, 4, 64),
        _mlx,
        bytes=n * k // 2 + n * k // 64 * 4 + 2 * m * (n + k),
        operations=2 * m * n * k,
    )


def _entry(kernels, form: str, make, sizes, summary: str, tolerance, benches) -> Entry:
    return Entry(
        kernels[form],
        cases=tuple(
            Case(
                f"{m} x {k} by {n}, {bits} bits, groups of {group}" + ", as float32" * options.get("wide", False),
                partial(make, m, n, k, bits, group, **options),
            )
            for m, n, k, bits, group, options in sizes
        ),
        summary=summary,
        dtypes=HALVES if form != "plain" else (mx.float32, *HALVES),
        tolerance=tolerance,
        benches=tuple(_bench(make, *shape) for shape in benches),
    )


_FEW_SIZES = (
    (1, 32, 512, 4, 64, {}),
    (3, 41, 96, 4, 32, {"simds": 2}),
    (8, 17, 256, 8, 128, {"parts": 2}),
    (2, 19, 128, 4, 64, {"wide": True}),
)
_ROW_SIZES = (
    (1, 32, 512, 4, 64, {}),
    (1, 41, 96, 4, 32, {"simds": 1}),  # more tasks than simdgroups, the last one cut short
    (1, 17, 256, 8, 128, {}),
    (1, 19, 128, 8, 32, {}),
    (1, 33, 384, 4, 128, {"wide": True}),
)
_MANY_SIZES = (
    (32, 64, 128, 4, 64, {}),
    (9, 67, 96, 8, 32, {}),
    (70, 130, 128, 4, 128, {"tile": 64}),
    (11, 72, 64, 8, 64, {"wide": True}),
)
_DECODE = ((1, 2048, 2048), (1, 12288, 2048), (1, 248320, 2048), (4, 12288, 2048))
_ROW = tuple(shape for shape in _DECODE if shape[0] == 1)
_PREFILL = ((512, 2048, 2048), (4096, 12288, 2048))

ENTRIES = (
    [
        _entry(FEW_ROWS, form, partial(_few, form), _FEW_SIZES, f"1 to 8 rows by packed weights, {how}", EXACT, _DECODE)
        for form, how in (("plain", "lanes"), ("tensor", "tensor cores"))
    ]
    + [
        _entry(
            FEW_ROWS, "row", partial(_few, "row"), _ROW_SIZES, "one row by packed weights, tensor cores", EXACT, _ROW
        ),
    ]
    + [
        _entry(
            MANY_ROWS, form, partial(_many, form), _MANY_SIZES, f"many rows by packed weights, {how}", ROUNDED, _PREFILL
        )
        for form, how in (("plain", "simdgroup matrices"), ("tensor", "tensor cores"))
    ]
)
