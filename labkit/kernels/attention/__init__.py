"""Attention of new tokens over cached keys and values.

Decoding reads every visible column once: bytes decide. `decode_attention` cuts the columns into parts for many
threadgroups, each of which serves all query heads that share a KV head with one read, and merges the parts.

| choice | values |
| --- | --- |
| layout | `general`: equal parts, as many as fill the device; `fixed`: blocks of 512 columns; `uneven`: small blocks |
| form | `lanes`: a column across a simdgroup, any float; `tensor`: 16 columns against 8 heads, 16-bit floats, CUDA |
| pack | query heads that share a read: 1 is the baseline |
| wide | vector reads; element reads are the baseline |

A chunk of a prompt (`prefill_attention`) reads each tile of columns for many queries: operations decide. Its scores
never reach memory: at a head size of 256 MLX on CUDA spreads them out, 8.6 GB a layer for 2K new tokens at 128K.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import mlx.core as mx

from labkit.kernels.attention.launches import (
    DECODE,
    MERGE,
    PREFILL,
    PrefillForm,
    Tail,
    decode_call,
    merge_call,
    prefill_call,
)
from labkit.kernels.attention.split import BLOCK, Form, parts_for, uneven_block
from labkit.kernels.door import takes_arrays
from labkit.kernels.targets import target_in_use

__all__ = [
    "BLOCK",
    "DECODE",
    "MERGE",
    "PREFILL",
    "Form",
    "Layout",
    "PrefillForm",
    "Tail",
    "decode_attention",
    "decode_call",
    "decode_rows",
    "merge_call",
    "paged_decode_attention",
    "parts_for",
    "prefill_attention",
    "prefill_call",
]

Layout = Literal["general", "fixed", "uneven"]


def choose_form(queries: mx.array, target: str | None) -> Form:
    """Tensor tiles on CUDA for 16-bit floats; lanes elsewhere (Metal has no such tile, the simulator both)."""
    fits = queries.dtype != mx.float32 and queries.shape[-1] % 64 == 0
    return "tensor" if target == "cuda" and fits else "lanes"


@takes_arrays
def decode_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    last: mx.array,
    *,
    scale: float,
    first: mx.array | None = None,
    tail: Tail | None = None,
    gates: mx.array | None = None,
    layout: Layout = "general",
    form: Form | None = None,
    packed: bool = True,
    wide: bool = True,
    target: str | None = None,
) -> mx.array:
    """softmax(scale q k^T) v of one or a few new tokens over buffers of fixed capacity.

    Args:
        queries: [B, Hq, L, D], float32, float16 or bfloat16; D a multiple of 32 up to 512.
        keys, values: [B, Hkv, S, D]: whole buffers, the new tokens' columns written; Hq a multiple of Hkv.
        last: int32 [B]: columns in use. The last of the L new tokens sees columns below it, the one before one less.
        first: int32 [B]: the first visible column (left padding); 0 by default.
        tail: where the newest columns stand if not in the buffers; `last` and `first` count on through both.
        gates: [B, L, W], rows of a projection that begin with each head's query and gate (`merge_call`).
        layout: `general` cuts each row's visible columns into equal parts; `fixed` into blocks of `BLOCK` columns from
            its first one on, which do not depend on its length or neighbours, so that neither do the sums; `uneven`
            into blocks so small that a single row of full length fills the device: short rows leave most of them empty.
        form: by default what `choose_form` says.
        packed, wide: False is the baseline: one query head a read, one element a lane and read (form "lanes").
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [B, Hq, L, D] in the queries' dtype, sums in fp32; zeros for a row that sees nothing. With gates the gated heads
        side by side, [B, L, Hq * D].

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: split-KV decoding (Dao et al. 2023, Flash-Decoding), with the heads of a group packed as in grouped-query
    kernels; the parts merge by largest score and sum (Milakov and Gimelshein 2018, arXiv 1805.02867).
    """
    if queries.ndim != 4 or keys.ndim != 4:
        raise ValueError(
            f"decode_attention takes queries and keys of four dimensions, not {queries.shape}, {keys.shape}"
        )
    batch, heads, length, width = queries.shape
    if last.shape != (batch,) or (first is not None and first.shape != (batch,)):
        raise ValueError(f"first and last have one entry for each of {batch} rows")
    begins, ends = _visible(first, last, batch, length)
    options = {"tail": tail, "gates": gates, "layout": layout, "form": form, "packed": packed, "wide": wide}
    out = decode_rows(_tokens_first(queries), keys, values, begins, ends, scale=scale, target=target, **options)
    if gates is not None:
        return out.reshape(batch, length, heads * width)
    if length == 1:
        return mx.expand_dims(out, 2)
    return mx.swapaxes(out.reshape(batch, length, heads, width), 1, 2)


@takes_arrays
def decode_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    first: mx.array,
    last: mx.array,
    *,
    scale: float,
    tail: Tail | None = None,
    table: mx.array | None = None,
    gates: mx.array | None = None,
    layout: Layout = "general",
    form: Form | None = None,
    packed: bool = True,
    wide: bool = True,
    target: str | None = None,
) -> mx.array:
    """`decode_attention` of queries that lie token by token: two launches and nothing else.

    Args:
        queries: [B * L, Hq, D], row by row. first, last: int32 [B * L]: each sees the columns from first to below last.
        table: int32 [B, N], where keys and values are the blocks of a pool (`decode_call`).
        keys, values, scale, tail, gates, layout, form, packed, wide, target: as there.

    Returns:
        [B * L, Hq, D] in the queries' dtype; with gates [B * L, Hq * D].

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
    """
    rows, heads, _ = queries.shape
    form = form or (choose_form(queries, target_in_use(target)) if packed and wide else "lanes")
    options = {} if packed and wide else {"pack": 4 if packed else 1, "wide": wide}
    kv_heads, columns = keys.shape[1], keys.shape[2] * (1 if table is None else table.shape[1])
    columns += 0 if tail is None else tail.keys.shape[2]
    if layout == "general":
        block, parts = 0, parts_for(rows, kv_heads, heads // kv_heads, columns)
    else:
        block = BLOCK if layout == "fixed" else uneven_block(kv_heads, heads // kv_heads, columns)
        parts = -(-columns // block)
    cut = {"scale": scale, "parts": parts, "block": block, "tail": tail, "table": table, "form": form}
    partial, stats = DECODE[form](**decode_call(queries, keys, values, first, last, **cut, **options), target=target)
    return MERGE(**merge_call(partial, stats, queries.dtype, gates), target=target)[0]


@takes_arrays
def paged_decode_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    tail: Tail,
    table: mx.array,
    last: mx.array,
    *,
    scale: float,
    first: mx.array | None = None,
    window: int | None = None,
    layout: Layout = "general",
    form: Form | None = None,
    target: str | None = None,
) -> mx.array:
    """softmax(scale q k^T) v of a few new tokens of many rows over the blocks of a pool, in one launch and a merge.

    Args:
        queries: [B, Hq, L, D], float32, float16 or bfloat16; D a multiple of 32 up to 512.
        keys, values: [P, Hkv, PAGE, D]: the pool's blocks of PAGE tokens.
        tail: [B, Hkv, C, D]: each row's newest tokens, and int32 [B]: how many stand before them, in blocks.
        table: int32 [B, N]: row b's token t is token t % PAGE of block table[b, t // PAGE]. Entries that no visible
            token needs may name any block.
        last: int32 [B]: tokens of each row. first: int32 [B]: the first visible one, 0 by default.
        window: tokens that a query sees, itself included; all by default.
        scale, layout, form, target: as for `decode_attention`.

    Returns:
        [B, Hq, L, D] in the queries' dtype, sums in fp32; zeros for a row that sees nothing. The same bits as
        `decode_attention` over the same tokens in one buffer, if both cut them into the same parts.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: Kwon et al. 2023, PagedAttention (arXiv 2309.06180), over `decode_attention`'s split.
    """
    batch, heads, length, width = queries.shape
    if table.ndim != 2:
        raise ValueError(f"table is [B, N], a row of blocks for each row of queries, not {table.shape}")
    begins, ends = _visible(first, last, batch, length)
    if window is not None:
        begins = mx.maximum(begins, ends - window)
    options = {"tail": tail, "table": table, "layout": layout, "form": form}
    out = decode_rows(_tokens_first(queries), keys, values, begins, ends, scale=scale, target=target, **options)
    if length == 1:
        return mx.expand_dims(out, 2)
    return mx.swapaxes(out.reshape(batch, length, heads, width), 1, 2)


def _tokens_first(queries: mx.array) -> mx.array:
    batch, heads, length, width = queries.shape
    if length == 1:
        return queries.squeeze(2)
    return mx.swapaxes(queries, 1, 2).reshape(batch * length, heads, width)


def _visible(first: mx.array | None, last: mx.array, batch: int, length: int) -> tuple[mx.array, mx.array]:
    """The visible columns of each new token. A single token of a row sees what is given: at decoding, each of the small
    operations below would cost as much as a launch of its own."""
    last = _int32(last)
    begins = _zeros(batch) if first is None else _int32(first)
    if length == 1:
        return begins, last
    back = mx.arange(length - 1, -1, -1, dtype=mx.int32)
    return mx.repeat(begins, length), (last[:, None] - back).reshape(-1)


def _int32(array: mx.array) -> mx.array:
    if array.dtype == mx.int32:
        return array
    if not mx.issubdtype(array.dtype, mx.integer):
        raise ValueError(f"columns are counted in integers, not {array.dtype}")
    return array.astype(mx.int32)


@lru_cache
def _zeros(count: int) -> mx.array:
    return mx.array([0] * count, dtype=mx.int32)


def choose_prefill_form(queries: mx.array, target: str | None) -> PrefillForm | Literal["mlx"]:
    """Tensor tiles on CUDA for 16-bit floats; MLX's own operation on Metal, where it is fused, and on a CPU; simdgroup
    matrices where a target is asked for that MLX's operation does not run on. Heads of other sizes are MLX's."""
    if queries.shape[-1] % 64 or queries.shape[-1] > 256:
        return "mlx"
    if target == "cuda":
        return "mlx" if queries.dtype == mx.float32 else "tensor"
    return "mlx" if target in (None, "metal", "native", "reference") else "simdgroup"


@takes_arrays
def prefill_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    start: mx.array,
    *,
    scale: float,
    first: mx.array | None = None,
    form: PrefillForm | Literal["mlx"] | None = None,
    target: str | None = None,
) -> mx.array:
    """Causal softmax(scale q k^T) v of a chunk of new tokens over buffers of fixed capacity.

    Args:
        queries: [B, Hq, L, D], float32, float16 or bfloat16; D 64, 128, 192 or 256 (form "mlx" takes any).
        keys, values: [B, Hkv, S, D]: whole buffers, the new tokens' columns written; Hq a multiple of Hkv.
        start: int32 [B]: the column of each row's first new token; token i sees the columns up to start + i.
        first: int32 [B]: the first visible column (left padding); 0 by default.
        form: by default what `choose_prefill_form` says.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [B, Hq, L, D] in the queries' dtype, sums in fp32; zeros for a token that sees nothing.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: Dao 2023, FlashAttention-2 (arXiv 2307.08691), with the order of a head's elements chosen so that 16-byte
    reads are the tensor cores' operands.
    """
    batch = queries.shape[0]
    start = _int32(start)
    first = _zeros(batch) if first is None else _int32(first)
    form = form or choose_prefill_form(queries, target_in_use(target))
    if form == "mlx":
        column, token = mx.arange(keys.shape[2]), mx.arange(queries.shape[2])
        sees = (column >= first[:, None, None]) & (column <= start[:, None, None] + token[:, None])
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=sees[:, None])
        # A row that is masked as a whole is undefined there.
        return mx.where(mx.any(sees, axis=-1)[:, None, :, None], out, 0.0).astype(queries.dtype)
    call = prefill_call(queries, keys, values, start, first, scale=scale, form=form)
    return PREFILL[form](**call, target=target)[0]
