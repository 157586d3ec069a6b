"""Cases of whole layers in one launch, at sizes that a simulator with all threadgroups alive takes in seconds."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from labkit.kernels.grouped_matmul.gates import packed_experts
from labkit.kernels.persistent.arguments import Attention, Cached, Delta, Sparse
from labkit.kernels.persistent.launches import (
    FULL_LAYER,
    LINEAR_LAYER,
    SPARSE_HALF,
    full_layer_call,
    linear_layer_call,
    sparse_half_call,
)
from labkit.kernels.quantized_matmul.gates import HALVES
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.registry import Case, Entry, Tolerance
from labkit.kernels.signature import Launch

FLOATS = (mx.float32, *HALVES)
D, INNER, EXPERTS, TOP_K = 128, 32, 6, 2
EPS = 1e-6

# A layer rounds seven or ten times on its way, and the plain form in the same places: in 16 bits they differ by a few
# units in the last place of values near 1, in fp32 by the order of sums.
TOLERANCE = {
    mx.float32: Tolerance(5e-5, 5e-5),
    mx.float16: Tolerance(6e-3, 6e-3),
    mx.bfloat16: Tolerance(5e-2, 3e-2),
}


def _normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _weight(size: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.uniform(0.5, 1.5, (size,)).astype(dtype)


def _matrix(n: int, k: int, dtype: mx.Dtype, bits: int = 4, group: int = 32) -> Packed:
    one = packed_experts(1, n, k, dtype, bits, group)
    return Packed(*(array[0] for array in one.arrays), group, bits)


def random_sparse(dtype: mx.Dtype, shared: int = 1, renormalise: bool = True, bits: int = 4) -> Sparse:
    """A sparse MLP whose scores lie apart: a choice that rounding could turn would prove nothing."""
    groups = EXPERTS + shared
    router = _matrix(EXPERTS + 1, D, dtype, 8)
    apart = mx.arange(EXPERTS + 1).astype(mx.float32)[:, None] % 3 + 1
    router = Packed(router.w, *((array * apart).astype(dtype) for array in router.arrays[1:]), 32, 8)
    gate, up = (packed_experts(groups, INNER, D, dtype, bits, 32) for _ in range(2))
    down = packed_experts(groups, D, INNER, dtype, bits, 32)
    return Sparse(_weight(D, dtype), router, gate, up, down, EXPERTS, TOP_K, shared, renormalise)


def _sparse(form: str, rows: int, groups: int, shared: int, renormalise: bool, bits: int, dtype: mx.Dtype) -> Launch:
    update, stream = _normal((rows, D), dtype), _normal((rows, D), dtype)
    sparse = random_sparse(dtype, shared, renormalise, bits)
    return SPARSE_HALF[form].launch(**sparse_half_call(update, stream, sparse, EPS, form, groups=groups))


def _linear(form: str, rows: int, groups: int, heads: tuple, dims: tuple, dtype: mx.Dtype) -> Launch:
    (hk, hv), (dk, dv) = heads, dims
    channels, width = 2 * hk * dk + hv * dv, hv * dv
    delta = Delta(
        _weight(D, dtype),
        _matrix(channels + width + 2 * hv, D, dtype),
        (mx.random.normal((channels, 4)) * 0.5).astype(dtype),
        mx.random.uniform(0.1, 1.0, (hv,)),
        mx.random.normal((hv,)),
        _weight(dv, dtype),
        _matrix(D, width, dtype),
        heads,
        dims,
    )
    tail, state = _normal((rows, 3, channels), dtype), mx.random.normal((rows, hv, dv, dk)) * 0.3
    update, stream = _normal((rows, D), dtype), _normal((rows, D), dtype)
    call = linear_layer_call(update, stream, delta, tail, state, random_sparse(dtype), EPS, form, groups=groups)
    return LINEAR_LAYER[form].launch(**call)


def _full(form: str, rows: int, groups: int, heads: tuple, columns: int, padding: int, dtype: mx.Dtype) -> Launch:
    (hq, hkv), width, tail = heads, 64, 4
    attention = Attention(
        _weight(D, dtype),
        _matrix(2 * (hq + hkv) * width, D, dtype),
        _weight(width, dtype),
        _weight(width, dtype),
        _matrix(D, hq * width, dtype),
        heads,
        16,
        1e7,
    )
    held, number = columns - 5, lambda value: mx.array([value] * rows, dtype=mx.int32)
    cached = Cached(
        *(_normal((rows, hkv, columns, width), dtype) for _ in range(2)),
        *(_normal((rows, hkv, tail, width), dtype) for _ in range(2)),
        first=mx.arange(rows, dtype=mx.int32) * padding,
        last=number(held + 3),
        settled=mx.array([held] * 8, dtype=mx.int32),
        write=mx.array([2] * 8, dtype=mx.int32),
        positions=number(held + 2),
    )
    update, stream = _normal((rows, D), dtype), _normal((rows, D), dtype)
    call = full_layer_call(update, stream, attention, cached, random_sparse(dtype), EPS, form, groups=groups)
    return FULL_LAYER[form].launch(**call)


def _read(names: tuple[str, ...], launch: Launch, outputs: list[mx.array]) -> dict[str, mx.array]:
    """The results in the one output, flat."""
    sizes = dict(launch.template)
    rows, found = sizes["M"], {}
    counts = {"HIDDEN": rows * sizes["D"], "Y": rows * sizes["D"]}
    if "DV" in sizes:
        width = sizes["HV"] * sizes["DV"]
        counts |= {"STATE": rows * width * sizes["DK"], "TAIL": rows * 3 * (2 * sizes["HK"] * sizes["DK"] + width)}
    if "HD" in sizes:
        counts |= dict.fromkeys(("TAIL_KEYS", "TAIL_VALUES"), rows * sizes["HKV"] * sizes["TAIL"] * sizes["HD"])
    for name in names:
        dtype = mx.float32 if name == "STATE" else sizes["T"]
        begin = sizes[f"{name}_AT"]
        found[name.lower()] = outputs[0][begin : begin + counts[name] * dtype.size // 4].view(dtype)
    return found


def _entries(kernels, names, make, cases, summary) -> list[Entry]:
    return [
        Entry(
            kernels[form],
            cases=tuple(Case(label, partial(make, form, *sizes)) for label, sizes in cases),
            summary=f"{summary}, {how}",
            dtypes=FLOATS if form == "plain" else HALVES,
            tolerance=TOLERANCE,
            traffic_slack=0.1,
            # One of the six builds has all stages but those of attention; the others are as long, and as like it.
            nightly=kernels[form] is not LINEAR_LAYER["tensor"],
            read=partial(_read, names),
        )
        for form, how in (("plain", "simdgroups"), ("tensor", "tensor cores"))
    ]


ENTRIES = [
    *_entries(
        SPARSE_HALF,
        ("HIDDEN", "Y"),
        _sparse,
        (
            ("1 row, 2 of 6 experts and a shared one, 3 threadgroups", (1, 3, 1, True, 4)),
            ("5 rows, 8 bits, no shared expert, 2 threadgroups", (5, 2, 0, False, 8)),
        ),
        "norm, router, choice and experts in one launch",
    ),
    *_entries(
        LINEAR_LAYER,
        ("HIDDEN", "Y", "STATE", "TAIL"),
        _linear,
        (
            ("1 row, 1/2 heads of 64 x 32, 3 threadgroups", (1, 3, (1, 2), (64, 32))),
            ("3 rows, 1/2 heads of 32 x 64, 2 threadgroups", (3, 2, (1, 2), (32, 64))),
        ),
        "a Gated DeltaNet layer in one launch",
    ),
    *_entries(
        FULL_LAYER,
        ("HIDDEN", "Y", "TAIL_KEYS", "TAIL_VALUES"),
        _full,
        (
            ("1 row, 4/2 heads, 40 columns, 3 threadgroups", (1, 3, (4, 2), 40, 0)),
            ("2 rows, 4/1 heads, 200 columns, padding, 2 threadgroups", (2, 2, (4, 1), 200, 7)),
        ),
        "a gated attention layer in one launch",
    ),
]
