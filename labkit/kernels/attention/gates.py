"""Cases, tolerances and benches of attention."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from labkit.kernels.attention.launches import (
    DECODE,
    MERGE,
    PREFILL,
    Tail,
    decode_call,
    merge_call,
    prefill_call,
)
from labkit.kernels.attention.split import parts_for
from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.signature import Launch

HALVES = (mx.float16, mx.bfloat16)

# A part's output is a sum of weights up to 1 against values near 1, not divided by the weights' sum yet.
LANES = dict.fromkeys((mx.float32, *HALVES), Tolerance(1e-4, 1e-4))
# The tensor form rounds each weight to the activations' dtype.
TENSOR = {mx.float16: Tolerance(1e-2, 3e-3), mx.bfloat16: Tolerance(6e-2, 1.6e-2)}


def _decode(
    form: str,
    dtype: mx.Dtype,
    first: list[int],
    last: list[int],
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    width: int,
    columns: int,
    tail: tuple[int, int] | None = None,
    **options,
) -> Launch:
    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    cached = (batch, kv_heads, columns, width)
    if tail is not None:
        settled, room = tail
        more = (batch, kv_heads, room, width)
        options["tail"] = Tail(normal(*more), normal(*more), mx.array([settled] * 8, dtype=mx.int32))
    call = decode_call(
        normal(len(last), heads, width),
        normal(*cached),
        normal(*cached),
        mx.array(first, dtype=mx.int32),
        mx.array(last, dtype=mx.int32),
        scale=width**-0.5,
        form=form,
        **options,
    )
    return DECODE[form].launch(**call)


def _paged(
    form: str,
    dtype: mx.Dtype,
    first: list[int],
    last: list[int],
    finished: list[int],
    *,
    page: int,
    heads: int,
    kv_heads: int,
    width: int,
    room: int,
    **options,
) -> Launch:
    """Rows in blocks of `page` tokens; blocks in random order, some of them shared, and as many that nobody needs."""

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    rows, longest = len(finished), max(max(finished) // page, 1)
    blocks = 2 * rows * longest
    call = decode_call(
        normal(len(last), heads, width),
        *(normal(blocks, kv_heads, page, width) for _ in "kv"),
        mx.array(first, dtype=mx.int32),
        mx.array(last, dtype=mx.int32),
        scale=width**-0.5,
        table=mx.random.randint(0, blocks, (rows, longest)).astype(mx.int32),
        tail=Tail(*(normal(rows, kv_heads, room, width) for _ in "kv"), mx.array(finished, dtype=mx.int32)),
        form=form,
        **options,
    )
    return DECODE[form].launch(**call)


def _case_maker(launch: Callable[..., Launch], form: str) -> Callable[..., Case]:
    """`launch(form, dtype, ...)` as a maker of cases: a label, and what follows the dtype."""
    return lambda label, *args, **sizes: Case(label, lambda dtype: launch(form, dtype, *args, **sizes))


def _paged_cases(form: str) -> tuple[Case, ...]:
    case = _case_maker(_paged, form)

    return (
        case(
            "pages of 16: rows of several lengths, one in its tail alone, one empty",
            [0, 5, 0, 0],
            [45, 52, 9, 0],
            [32, 48, 0, 0],
            page=16,
            heads=6,
            kv_heads=2,
            width=128,
            room=16,
            parts=3,
            simds=2,
        ),
        case(
            "pages of 8, a window, 2 tokens, head 256",
            [13, 14],
            [37, 38],
            [32],
            page=8,
            heads=8,
            kv_heads=1,
            width=256,
            room=16,
            parts=2,
            simds=2,
        ),
        case(
            "pages of 256, blocks of 64 columns",
            [0, 130],
            [270, 257],
            [256, 256],
            page=256,
            heads=2,
            kv_heads=1,
            width=64,
            room=32,
            parts=9,
            block=64,
            simds=2,
        ),
    )


def _cases(form: str) -> tuple[Case, ...]:
    case = _case_maker(_decode, form)

    return (
        case("8 heads of 256 on 1", [0], [70], batch=1, heads=8, kv_heads=1, width=256, columns=80, parts=2, simds=2),
        case("6 heads of 192 on 2", [0], [70], batch=1, heads=6, kv_heads=2, width=192, columns=80, parts=2, simds=8),
        case(
            "rows of unequal length, padded, one empty",
            [0, 3, 9, 5],
            [40, 17, 9, 6],
            batch=4,
            heads=6,
            kv_heads=2,
            width=128,
            columns=40,
            parts=3,
            simds=2,
        ),
        case(
            "blocks of 16, 2 tokens, 11 heads on 1",
            [0, 0],
            [32, 33],
            batch=1,
            heads=11,
            kv_heads=1,
            width=64,
            columns=48,
            parts=3,
            block=16,
            simds=4,
        ),
        case(
            "33 columns in the buffer, the newest in a tail of 16",
            [0, 5],
            [45, 40],
            batch=2,
            heads=4,
            kv_heads=2,
            width=64,
            columns=40,
            tail=(33, 16),
            parts=3,
            simds=2,
        ),
    )


def _merge(parts: int, width: int, dtype: mx.Dtype, more: int | None = None, rows: int = 2) -> Launch:
    top = mx.random.normal((rows, 3, parts)) * 4
    top = mx.where(mx.random.uniform(shape=top.shape) < 0.2, -mx.inf, top)
    top[-1, 2] = -mx.inf  # a head that sees nothing
    empty = top == -mx.inf
    total = mx.where(empty, 0.0, 1.0 + mx.random.uniform(shape=top.shape))
    partial = mx.where(empty[..., None], 0.0, mx.random.normal((rows, 3, parts, width)))
    gates = None if more is None else mx.random.normal((rows, 3 * 2 * width + more)).astype(dtype)
    return MERGE.launch(**merge_call(partial, mx.stack([top, total], axis=-1), dtype, gates))


def _prefill(
    form: str,
    dtype: mx.Dtype,
    start: list[int],
    first: list[int],
    *,
    heads: int,
    kv_heads: int,
    length: int,
    width: int,
    columns: int,
    **options,
) -> Launch:
    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    cached = (len(start), kv_heads, columns, width)
    call = prefill_call(
        normal(len(start), heads, length, width),
        normal(*cached),
        normal(*cached),
        mx.array(start, dtype=mx.int32),
        mx.array(first, dtype=mx.int32),
        scale=width**-0.5,
        form=form,
        **options,
    )
    return PREFILL[form].launch(**call)


def _prefill_cases(form: str) -> tuple[Case, ...]:
    case = _case_maker(_prefill, form)

    return (
        case("a first chunk of 40, head 256", [0], [0], heads=2, kv_heads=1, length=40, width=256, columns=40, simds=2),
        case(
            "chunks after others, padded, one seeing nothing at first",
            [30, 7, -5],
            [0, 4, 0],
            heads=3,
            kv_heads=3,
            length=19,
            width=64,
            columns=50,
        ),
        case("one query, head 128", [36], [0], heads=2, kv_heads=2, length=1, width=128, columns=37),
    )


def _prefill_bench(form: str, length: int) -> Bench:
    def make(dtype: mx.Dtype) -> Launch:
        sizes = {"heads": 16, "kv_heads": 2, "length": length, "width": 256, "columns": length}
        return _prefill(form, dtype, [0], [0], **sizes)

    def sdpa(launch: Launch) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(*launch.inputs[:3], scale=256**-0.5, mask="causal")]

    return Bench(f"16/2 heads of 256, {length} causal", make, sdpa, operations=2 * 16 * 256 * length * (length + 1))


def _bench(form: str, columns: int, **options) -> Bench:
    def make(dtype: mx.Dtype) -> Launch:
        sizes = {"batch": 1, "heads": 16, "kv_heads": 2, "width": 256, "columns": columns}
        parts = parts_for(1, 2, 8, columns)
        return _decode(form, dtype, [0], [columns], **sizes, parts=parts, **options)

    def sdpa(launch: Launch) -> list[mx.array]:
        queries, keys, values = launch.inputs[:3]
        return [mx.fast.scaled_dot_product_attention(queries[:, :, None], keys, values, scale=256**-0.5)]

    return Bench(f"16/2 heads of 256, {columns // 1024}K", make, sdpa, bytes=2 * 2 * 2 * 256 * columns)


ENTRIES = [
    Entry(
        DECODE["lanes"],
        cases=(*_cases("lanes"), *_paged_cases("lanes")),
        summary="one token against its cache: a column across a simdgroup",
        tolerance=LANES,
        benches=(_bench("lanes", 4096),),
    ),
    Entry(
        DECODE["tensor"],
        cases=(*_cases("tensor"), *_paged_cases("tensor")),
        summary="one token against its cache: 16 columns against 8 heads",
        dtypes=HALVES,
        tolerance=TENSOR,
        benches=(_bench("tensor", 4096), _bench("tensor", 32768), _bench("tensor", 131072)),
    ),
    Entry(
        MERGE,
        cases=(
            Case("7 parts of 256", lambda dtype: _merge(7, 256, dtype)),
            Case("140 parts of 32", lambda dtype: _merge(140, 32, dtype)),
            Case("1 part of 64", lambda dtype: _merge(1, 64, dtype)),
            Case("1 part of a lone row's 3 heads", lambda dtype: _merge(1, 64, dtype, rows=1)),
            Case("gated, by rows that go on behind", lambda dtype: _merge(3, 64, dtype, more=24)),
        ),
        summary="the parts of decode attention become one output",
    ),
    Entry(
        PREFILL["simdgroup"],
        cases=_prefill_cases("simdgroup"),
        summary="a chunk of tokens against its cache, by simdgroup matrices",
        tolerance={**TENSOR, mx.float32: Tolerance(1e-5, 1e-5)},
    ),
    Entry(
        PREFILL["tensor"],
        cases=_prefill_cases("tensor"),
        summary="a chunk of tokens against its cache, by tensor tiles",
        dtypes=HALVES,
        tolerance=TENSOR,
        benches=(_prefill_bench("tensor", 8192),),
    ),
]
