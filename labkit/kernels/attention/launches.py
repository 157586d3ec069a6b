"""The kernels of attention, and the arguments of their calls."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

from labkit.kernels.attention import reference
from labkit.kernels.attention.split import Form, decode_simds
from labkit.kernels.header import Header
from labkit.kernels.headers import TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.targets import threads_that_fit

PrefillForm = Literal["simdgroup", "tensor"]

RESIDENT = 264
"""Threadgroups that fill an H200: 132 multiprocessors with two each (128 threads at 255 registers)."""

MERGE_WIDTH, MERGE_THREADS = 32, 256
"""Values of a head that a threadgroup of the merge makes, and its threads. H200, launches in a CUDA graph: 66 parts of
16 heads of 256 took 2.1 us, and 7.1 by a threadgroup of 1,024 threads a head."""

_FOLDER = Path(__file__).parent
ATTENTION = TILES.followed_by(
    Header.from_file(*(_FOLDER / f"{name}.h" for name in ("columns", "decode_lanes", "decode_tensor", "merge")))
)
"""The texts that the kernels of this folder share."""

_CACHED = ["keys", "values", "tail_keys", "tail_values"]
_ROWS = ["first", "last", "settled", "table"]
_INPUTS = ["queries", *_CACHED, *_ROWS, "scale", "L", "S", "TAIL", "HKV", "PARTS", "BLOCK"]

DECODE: dict[Form, Kernel] = {
    form: Kernel.from_file(
        _FOLDER / f"{path}.metal",
        _INPUTS,
        ["partial", "stats"],
        name=f"decode_attention_{form}",
        header=ATTENTION,
        reference=reference.parts,
    )
    for form, path in (("lanes", "decode"), ("tensor", "decode_tensor"))
}

MERGE = Kernel.from_file(
    _FOLDER / "merge.metal",
    ["partial", "stats", "gates", "PARTS"],
    ["out"],
    name="merge_attention_parts",
    header=ATTENTION,
    reference=reference.merge,
)

PREFILL: dict[PrefillForm, Kernel] = {
    form: Kernel.from_file(
        _FOLDER / f"{path}.metal",
        ["queries", "keys", "values", "start", "first", "scale", "L", "S", "HQ", "HKV"],
        ["out"],
        name=f"prefill_attention_{form}",
        header=ATTENTION,
        reference=reference.prefill,
    )
    for form, path in (("simdgroup", "prefill"), ("tensor", "prefill_tensor"))
}


class Tail(NamedTuple):
    """The newest columns of a cache that grows by small steps.

    Attributes:
        keys, values: [B, Hkv, C, D], of which the first ones count.
        settled: int32 [1 or more], whose first value says how many columns stand before these, in the buffers; with a
            block table int32 [B], each row's own.
    """

    keys: mx.array
    values: mx.array
    settled: mx.array


def decode_call(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    first: mx.array,
    last: mx.array,
    *,
    scale: float,
    parts: int,
    block: int = 0,
    tail: Tail | None = None,
    table: mx.array | None = None,
    form: Form = "lanes",
    pack: int = 4,
    wide: bool = True,
    simds: int | None = None,
    unroll: int = 4,
) -> dict:
    """The arguments of `DECODE[form]`.

    Args:
        queries: [R, Hq, D]; keys, values: [B, Hkv, S, D] of the same dtype, R a multiple of B; first, last: int32 [R].
        parts: threadgroups that share a row's columns. block: 0 cuts the visible columns into equal parts; otherwise
            part p holds columns from first + p * block, and parts * block must cover all that can be visible.
        tail: the newest columns, where they do not stand in the buffers.
        table: int32 [B, N], where the columns lie in blocks of a pool: keys and values are [P, Hkv, PAGE, D] then, and
            row b's column c is column c % PAGE of block table[b, c // PAGE]. Needs a tail, whose `settled` is [B].
        pack: query heads that share one read of a KV head (form "lanes"; "tensor" takes eight).
        wide: read vectors; without it one element at a time, the baseline (form "lanes").
        simds: simdgroups of a threadgroup, by default `decode_simds`. unroll: columns that a simdgroup has in flight
            (form "lanes").

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
    """
    rows, heads, width = _check(queries, keys, values, first, last, table)
    batch, (_, kv_heads, page, _) = (keys if table is None else table).shape[0], keys.shape
    group = heads // kv_heads
    tail, room = _tail(tail, (batch, kv_heads, width), keys.dtype)
    if table is None:
        page, pitch, buffered = 0, page, page
    else:
        pitch, buffered = table.shape[1], table.shape[1] * page
        if room == 0 or tail.settled.shape != (batch,):
            raise ValueError(f"pages need a tail, and settled columns of each of {batch} rows")
    if parts < 1 or (block and block * parts < buffered + room):
        raise ValueError(f"{parts} parts of {block or 'equal'} columns do not cover a cache of {buffered + room}")
    pack = 8 if form == "tensor" else min(pack, group)
    packs = -(-group // pack)
    simds = simds or decode_simds(form, parts * kv_heads * packs * rows, block)
    if form == "tensor":
        if width % 64 or queries.dtype == mx.float32:
            raise ValueError(
                f"the tensor form needs 16-bit floats and D a multiple of 64, not {queries.dtype}, {width}"
            )
        template = [("T", queries.dtype), ("D", width), ("GROUP", group), ("SIMDS", simds), ("TAILED", room > 0)]
    else:
        template = [("T", queries.dtype), ("D", width), ("GROUP", group), ("PACK", pack), ("SIMDS", simds)]
        template += [("UNROLL", unroll), ("WIDE", wide), ("TAILED", room > 0)]
    return {
        "inputs": [
            *(queries, keys, values, tail.keys, tail.values),
            *(first, last, tail.settled, _nothing(mx.int32) if table is None else table),
            *(float(scale), rows // batch, pitch, room, kv_heads, parts, block),
        ],
        "template": [*template, ("PAGE", page)],
        "grid": (parts * simds * 32, kv_heads * packs, rows),
        "threadgroup": (simds * 32, 1, 1),
        "output_shapes": [(rows, heads, parts, width), (rows, heads, parts, 2)],
        "output_dtypes": [mx.float32, mx.float32],
    }


def merge_call(partial: mx.array, stats: mx.array, dtype: mx.Dtype, gates: mx.array | None = None) -> dict:
    """The arguments of `MERGE` for what a decode kernel returned: partial [R, Hq, P, D], stats [R, Hq, P, 2].

    Args:
        gates: [..., W], a row for each of the R tokens that begins with each head's query and gate, D values each, as
            Qwen3.5's projection leaves them: outputs are multiplied by sigmoid(gate), and a token's heads lie side by
            side, [R, Hq * D], as the output projection takes them.

    Raises:
        ValueError: gates that are too few.
    """
    rows, heads, parts, width = partial.shape
    simds = threads_that_fit(MERGE_THREADS) // 32
    if gates is not None and (gates.shape[-1] < 2 * heads * width or gates.size != rows * gates.shape[-1]):
        raise ValueError(f"gates of {heads} heads of {width} stand in {rows} rows, not in {gates.shape}")
    pitch = 0 if gates is None else gates.shape[-1]
    return {
        "inputs": [partial, stats, _nothing(dtype) if gates is None else gates, parts],
        "template": [
            *(("T", dtype), ("D", width), ("WIDTH", MERGE_WIDTH), ("SIMDS", simds)),
            *(("GATED", gates is not None), ("HEADS", heads), ("GATE_PITCH", pitch)),
        ],
        "grid": (width // MERGE_WIDTH * simds * 32, rows * heads, 1),
        "threadgroup": (simds * 32, 1, 1),
        "output_shapes": [(rows, heads, width) if gates is None else (rows, heads * width)],
        "output_dtypes": [dtype],
    }


def prefill_call(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    start: mx.array,
    first: mx.array,
    *,
    scale: float,
    form: PrefillForm = "simdgroup",
    simds: int | None = None,
) -> dict:
    """The arguments of `PREFILL[form]`.

    Args:
        queries: [B, Hq, L, D]; keys, values: [B, Hkv, S, D] of the same dtype; start, first: int32 [B].
        simds: simdgroups of a threadgroup; each takes 8 queries (form "simdgroup") or 16 ("tensor"). By default 4, or
            8 of form "tensor" where that leaves two threadgroups for each multiprocessor.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
    """
    if queries.ndim != 4:
        raise ValueError(f"prefill attention takes queries [B, Hq, L, D], not {queries.shape}")
    batch, heads, length, width = queries.shape
    _check(queries[:, :, 0], keys, values, start, first)
    if keys.shape[0] != batch or width > 256 or width % 64:
        raise ValueError(f"queries {queries.shape} need as many rows as keys {keys.shape}, D one of 64, 128, 192, 256")
    if form == "tensor" and queries.dtype == mx.float32:
        raise ValueError("the tensor form needs 16-bit floats, not float32")
    if simds is None:
        # H200, 4,096 new tokens of 16/2 heads (data/measured/h200_attention.json): 703 us by 8, 789 by 4.
        simds = 8 if form == "tensor" and -(-length // 128) * heads * batch >= RESIDENT else 4
    template = [("T", queries.dtype), ("D", width), ("SIMDS", simds)]
    if form == "simdgroup":
        template.append(("KEYS", 8 if queries.dtype == mx.float32 else 16))
    tiles = -(-length // (simds * (16 if form == "tensor" else 8)))
    return {
        "inputs": [queries, keys, values, start, first, float(scale), length, keys.shape[2], heads, keys.shape[1]],
        "template": template,
        "grid": (tiles * simds * 32, heads, batch),
        "threadgroup": (simds * 32, 1, 1),
        "output_shapes": [queries.shape],
        "output_dtypes": [queries.dtype],
    }


def _tail(tail: Tail | None, heads: tuple[int, int, int], dtype: mx.Dtype) -> tuple[Tail, int]:
    """The tail of heads (B, Hkv, D), or what stands for none, and its columns. Raises ValueError if it does not fit."""
    if tail is None:
        nothing = _nothing(dtype)
        return Tail(nothing, nothing, _nothing(mx.int32)), 0
    batch, kv_heads, width = heads
    expected = batch, kv_heads, tail.keys.shape[2], width
    if tail.keys.shape != expected or tail.values.shape != expected or tail.keys.dtype != dtype:
        raise ValueError(
            f"a tail of {tail.keys.shape} and {tail.values.shape} does not continue {batch} rows of {kv_heads} heads "
            f"of {width} in {dtype}"
        )
    return tail, expected[2]


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    # Stands for what a kernel does not read. Computed: a pending array would be computed again in every compiled graph.
    nothing = mx.zeros((8,), dtype)
    mx.eval(nothing)
    return nothing


def _check(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    first: mx.array,
    last: mx.array,
    table: mx.array | None = None,
) -> tuple[int, int, int]:
    if queries.ndim != 3 or keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"decode attention takes queries [R, Hq, D] and keys and values [B, Hkv, S, D] of one shape, not "
            f"{queries.shape}, {keys.shape}, {values.shape}"
        )
    (rows, heads, width), (batch, kv_heads, columns, depth) = queries.shape, keys.shape
    if table is not None:
        if table.ndim != 2 or table.dtype != mx.int32:
            raise ValueError(f"a block table is int32 [B, N], not {table.dtype} {table.shape}")
        batch = table.shape[0]
    if width != depth or heads % kv_heads or rows % batch or columns == 0:
        raise ValueError(f"queries {queries.shape} do not fit keys {keys.shape}")
    if width % 32 or width > 512:
        raise ValueError(f"the head size must be a multiple of 32 up to 512, not {width}")
    if len({queries.dtype, keys.dtype, values.dtype}) > 1 or not mx.issubdtype(queries.dtype, mx.floating):
        raise ValueError(
            f"queries, keys and values share a float dtype, not {queries.dtype}, {keys.dtype}, {values.dtype}"
        )
    if first.shape != (rows,) or last.shape != (rows,) or {first.dtype, last.dtype} != {mx.int32}:
        raise ValueError(
            f"first and last are int32 [{rows}], not {first.shape} {first.dtype}, {last.shape} {last.dtype}"
        )
    return rows, heads, width
