"""Attention in plain MLX ops: the oracles of its kernels."""

from __future__ import annotations

import math

import mlx.core as mx

from labkit.kernels.signature import Launch

LOG2E = math.log2(math.e)


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, first: mx.array, last: mx.array, scale: float
) -> mx.array:
    """softmax(scale q k^T) v over columns first <= column < last of each row, in fp32.

    Args:
        queries: [R, Hq, D]. keys, values: [B, Hkv, S, D]; R / B consecutive rows of queries share one of B.
        first, last: int32 [R].

    Returns:
        [R, Hq, D] float32; zeros for a row that sees nothing.
    """
    scores, sees = _scores(queries, keys, first, last, scale)
    weights = mx.where(sees, mx.softmax(scores, axis=-1), 0.0)
    seen = mx.any(sees, axis=-1, keepdims=True)
    return (mx.where(seen, weights, 0.0) @ _of_rows(values, queries)).reshape(queries.shape)


def prefill(launch: Launch) -> list[mx.array]:
    """The reference of the prefill kernels: query i of a row sees the columns from first to start + i."""
    queries, keys, values, start, first, scale = launch.inputs[:6]
    batch, heads, length, width = queries.shape
    rows = mx.swapaxes(queries, 1, 2).reshape(batch * length, heads, width)
    ends = mx.minimum(start[:, None] + mx.arange(1, length + 1), keys.shape[2]).reshape(-1)
    out = attention(rows, keys, values, mx.repeat(first, length), ends, scale.item())
    return [mx.swapaxes(out.reshape(batch, length, heads, width), 1, 2)]


def parts(launch: Launch) -> list[mx.array]:
    """The reference of the decode kernels: each part's weighted sum, its largest score (in powers of two), its sum."""
    queries, keys, values, *tail, first, last, settled, table, scale, _, _, _, _, count, block = launch.inputs
    count, block = count.item(), block.item()
    if dict(launch.template)["PAGE"]:
        keys, values = (_from_pages(array, table) for array in (keys, values))
    else:
        settled = settled[:1]
    if dict(launch.template)["TAILED"]:
        keys, values = (_with_tail(array, more, settled) for array, more in zip((keys, values), tail, strict=True))
    scores, _ = _scores(queries, keys, first, last, scale.item() * LOG2E)
    rows, heads, _ = queries.shape
    scores, rows_values = scores.reshape(rows, heads, -1), _of_rows(values, queries)
    outputs, tops, sums = [], [], []
    for part in range(count):
        share = block if block > 0 else (mx.maximum(last - first, 0) + count - 1) // count
        begin = first + part * share
        end = mx.minimum(last, begin + share)
        column = mx.arange(keys.shape[2])
        inside = ((column >= begin[:, None]) & (column < end[:, None]))[:, None, :]
        mine = mx.where(inside, scores, -mx.inf)
        top = mine.max(axis=-1, keepdims=True)
        weights = mx.where(inside, _power_of_two(mine - mx.where(top == -mx.inf, 0.0, top)), 0.0)
        grouped = weights.reshape(rows, keys.shape[1], -1, keys.shape[2])
        outputs.append((grouped @ rows_values).reshape(queries.shape))
        tops.append(top[..., 0])
        sums.append(weights.sum(axis=-1))
    return [mx.stack(outputs, axis=2), mx.stack([mx.stack(tops, axis=2), mx.stack(sums, axis=2)], axis=-1)]


def _from_pages(pool: mx.array, table: mx.array) -> mx.array:
    """pool [P, Hkv, PAGE, D] by table [B, N] -> [B, Hkv, N * PAGE, D]."""
    rows = pool[table].swapaxes(1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _with_tail(buffer: mx.array, tail: mx.array, settled: mx.array) -> mx.array:
    """[B, Hkv, S + C, D]: the first columns of a buffer, settled[b] or settled[0] of them, then the tail's."""
    both = mx.concatenate([buffer, tail], axis=2)
    column, settled = mx.arange(both.shape[2]), settled[:, None]
    behind = mx.minimum(buffer.shape[2] + column - settled, both.shape[2] - 1)
    index = mx.where(column < settled, column, behind)[:, None, :, None]
    return mx.take_along_axis(both, mx.broadcast_to(index, (both.shape[0], 1, both.shape[2], 1)), axis=2)


def merge(launch: Launch) -> list[mx.array]:
    """The reference of the merge kernel."""
    partial, stats, gates, _ = launch.inputs
    top, total = stats[..., 0], stats[..., 1]
    highest = top.max(axis=-1, keepdims=True)
    weights = mx.where(top == -mx.inf, 0.0, _power_of_two(top - mx.where(highest == -mx.inf, 0.0, highest)))
    whole = (weights * total).sum(axis=-1)[..., None]
    out = (weights[..., None] * partial).sum(axis=-2) / mx.where(whole > 0, whole, 1.0)
    out = mx.where(whole > 0, out, 0.0)
    if dict(launch.template)["GATED"]:
        rows, heads, width = out.shape
        gates = gates.astype(mx.float32).reshape(rows, -1)[:, : 2 * heads * width]
        out = out * mx.sigmoid(gates.reshape(rows, heads, 2 * width)[..., width:])
    return [out.reshape(launch.output_shapes[0])]


def _scores(
    queries: mx.array, keys: mx.array, first: mx.array, last: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """Scores [R, Hkv, G, S] with -inf where a row does not see a column, and where it sees."""
    rows, heads, width = queries.shape
    grouped = queries.astype(mx.float32).reshape(rows, keys.shape[1], heads // keys.shape[1], width)
    scores = scale * grouped @ mx.swapaxes(_of_rows(keys, queries), -1, -2)
    column = mx.arange(keys.shape[2])
    sees = ((column >= first[:, None]) & (column < last[:, None]))[:, None, None, :]
    return mx.where(sees, scores, -mx.inf), sees


def _of_rows(cached: mx.array, queries: mx.array) -> mx.array:
    """Keys or values of each row of queries, [R, Hkv, S, D] in fp32."""
    return mx.repeat(cached.astype(mx.float32), queries.shape[0] // cached.shape[0], axis=0)


def _power_of_two(x: mx.array) -> mx.array:
    return mx.exp(x / LOG2E)
