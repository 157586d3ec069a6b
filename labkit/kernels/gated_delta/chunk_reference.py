"""The chunked form of Gated DeltaNet in plain MLX operations, in fp32, and the order of tensor-core fragments."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from labkit.kernels.signature import Launch


def into_chunks(x: mx.array, spans: mx.array, chunk: int, repeats: int = 1) -> mx.array:
    """[B, T, H, ...] as chunks from each row's first valid token on, zero past its last one.

    Returns:
        [B * H * repeats, slots, chunk, ...]
    """
    batch, length = x.shape[:2]
    slots = -(-length // chunk)
    first = mx.clip(spans[:, :1], 0, length)
    last = mx.clip(spans[:, 1:], first, length)
    position = first + mx.arange(slots * chunk)
    index = mx.clip(position, 0, length - 1).reshape(batch, -1, *[1] * (x.ndim - 2))
    valid = (position < last).reshape(index.shape)
    rows = mx.where(valid, mx.take_along_axis(x.astype(mx.float32), index, axis=1), 0.0)
    rows = mx.repeat(mx.moveaxis(rows, 2, 1), repeats, axis=1)
    return rows.reshape(batch * rows.shape[1], slots, chunk, *x.shape[3:])


def from_chunks(y: mx.array, spans: mx.array, length: int, heads: int) -> mx.array:
    """The inverse for outputs: [B, T, Hv, Dv], zero at pads."""
    batch = spans.shape[0]
    y = mx.moveaxis(y.reshape(batch, heads, -1, y.shape[-1]), 1, 2)
    first = mx.clip(spans[:, :1], 0, length)
    last = mx.clip(spans[:, 1:], first, length)
    position = mx.arange(length)
    index = mx.clip(position - first, 0, y.shape[1] - 1)[..., None, None]
    valid = ((position >= first) & (position < last))[..., None, None]
    return mx.where(valid, mx.take_along_axis(y, index, axis=1), 0.0)


def prepare(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """All of a chunk that does not need the state.

    Args:
        q, k: [..., C, Dk]. v: [..., C, Dv]. log_decay, beta: [..., C].

    Returns:
        w = -T diag(beta exp(c)) K [..., C, Dk]; u = T diag(beta) V [..., C, Dv]; p_ij = exp(c_i - c_j) q_i . k_j for
        j <= i [..., C, C]; exp(c) and exp(c_last - c) [..., C].
    """
    chunk = q.shape[-2]
    c = mx.cumsum(log_decay, axis=-1)
    lower = mx.tril(mx.ones((chunk, chunk), dtype=mx.bool_))
    decay = mx.where(lower, mx.exp(mx.where(lower, c[..., :, None] - c[..., None, :], 0.0)), 0.0)
    a = mx.tril(beta[..., None] * decay * (k @ mx.swapaxes(k, -1, -2)), -1)
    inverse = mx.zeros_like(a)
    for i in range(chunk):  # forward substitution, row by row
        unit = mx.zeros((chunk,)).at[i].add(1.0)
        inverse[..., i, :] = unit - (a[..., i : i + 1, :] @ inverse)[..., 0, :]
    w = -(inverse * (beta * mx.exp(c))[..., None, :]) @ k
    u = (inverse * beta[..., None, :]) @ v
    return w, u, decay * (q @ mx.swapaxes(k, -1, -2)), mx.exp(c), mx.exp(c[..., -1:] - c)


def scan_chunks(
    q: mx.array, k: mx.array, w: mx.array, u: mx.array, p: mx.array, into: mx.array, left: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The state through the chunks. q, k, w, u, p, into, left: [H, slots, C, ...]; state: [H, Dv, Dk]."""
    outputs = []
    for n in range(q.shape[1]):
        fresh = u[:, n] + w[:, n] @ mx.swapaxes(state, -1, -2)
        outputs.append(into[:, n, :, None] * (q[:, n] @ mx.swapaxes(state, -1, -2)) + p[:, n] @ fresh)
        state = into[:, n, -1:, None] * state + mx.swapaxes(fresh * left[:, n, :, None], -1, -2) @ k[:, n]
    return mx.stack(outputs, axis=1), state


@lru_cache
def _row_fragments(tokens: int, dims: int) -> mx.array:
    """Where each element of a chunk's fragments [dims / 16, tokens / 16, 32, 8] lies in its matrix [tokens, dims]."""
    d, pair, lane, e = np.indices((dims // 16, tokens // 16, 32, 8))
    word = e // 2
    token = pair * 16 + lane // 4 + word // 2 * 8
    return mx.array(token * dims + d * 16 + word % 2 * 8 + lane % 4 * 2 + e % 2)


@lru_cache
def _column_fragments(tokens: int, dims: int) -> mx.array:
    """The same for accumulators of the transposed matrix, [dims / 16, tokens / 8, 32, 4]."""
    d, tile, lane, e = np.indices((dims // 16, tokens // 8, 32, 4))
    token = tile * 8 + lane % 4 * 2 + e % 2
    return mx.array(token * dims + d * 16 + lane // 4 + e // 2 * 8)


def _gather(x: mx.array, index: mx.array) -> mx.array:
    flat = x.reshape(*x.shape[:-2], -1)
    return mx.take(flat, index.reshape(-1), axis=-1).reshape(*x.shape[:-2], *index.shape)


def _scatter(fragments: mx.array, index: mx.array, shape: tuple[int, int]) -> mx.array:
    order = mx.argsort(index.reshape(-1))
    flat = fragments.astype(mx.float32).reshape(*fragments.shape[: fragments.ndim - index.ndim], -1)
    return mx.take(flat, order, axis=-1).reshape(*flat.shape[:-1], *shape)


def _rounded_parts(fragments: mx.array, split: bool) -> mx.array:
    """Fragments [heads, slots, ...] rounded to bf16, and with `split` the remainder: [heads, slots, parts, ...]."""
    rounded = fragments.astype(mx.bfloat16).astype(mx.float32)
    return mx.stack([rounded, fragments - rounded] if split else [rounded], axis=2)


def _chunks_of(launch: Launch, arrays: list[mx.array], spans: mx.array, shared: int) -> list[mx.array]:
    template = dict(launch.template)
    repeats = template["HV"] // template["HK"]
    return [
        into_chunks(x, spans, template.get("CHUNK", 32), repeats if i < shared else 1) for i, x in enumerate(arrays)
    ]


def prepare_plain(launch: Launch) -> list[mx.array]:
    """Oracle of `chunk_prepare`."""
    *tokens, spans, _ = launch.inputs
    w, u, p, into, left = prepare(*_chunks_of(launch, tokens, spans, 2))
    return [w, u, p, mx.stack([into, left], axis=2)]


def scan_plain(launch: Launch) -> list[mx.array]:
    """Oracle of `chunk_scan`."""
    q, k, w, u, p, scales, state, spans, _ = launch.inputs
    return _through_chunks(launch, q, k, w, u, p, scales, state, spans)


def _through_chunks(
    launch: Launch,
    q: mx.array,
    k: mx.array,
    w: mx.array,
    u: mx.array,
    p: mx.array,
    scales: mx.array,
    state: mx.array,
    spans: mx.array,
) -> list[mx.array]:
    length, heads = q.shape[1], dict(launch.template)["HV"]
    q, k = _chunks_of(launch, [q, k], spans, 2)
    y, last = scan_chunks(q, k, w, u, p, scales[:, :, 0], scales[:, :, 1], state.reshape(-1, *state.shape[2:]))
    return [from_chunks(y, spans, length, heads), last.reshape(state.shape)]


def prepare_fragments(launch: Launch) -> list[mx.array]:
    """Oracle of `chunk_prepare_mma`."""
    *tokens, spans, _ = launch.inputs
    w, u, p, into, left = prepare(*_chunks_of(launch, tokens, spans, 2))
    chunk, dims = w.shape[-2:]
    split = dict(launch.template)["SPLIT"]
    return [
        _rounded_parts(_gather(w, _row_fragments(chunk, dims)), split),
        _gather(u, _column_fragments(chunk, dims)),
        _rounded_parts(_gather(p, _row_fragments(chunk, chunk)), split),
        mx.stack([into, left], axis=2),
    ]


def scan_fragments(launch: Launch) -> list[mx.array]:
    """Oracle of `chunk_scan_mma`."""
    q, k, w, u, p, scales, state, spans, _ = launch.inputs
    chunk, dims = dict(launch.template)["CHUNK"], q.shape[3]
    w = _scatter(w.astype(mx.float32).sum(axis=2), _row_fragments(chunk, dims), (chunk, dims))
    u = _scatter(u, _column_fragments(chunk, dims), (chunk, dims))
    p = _scatter(p.astype(mx.float32).sum(axis=2), _row_fragments(chunk, chunk), (chunk, chunk))
    return _through_chunks(launch, q, k, w, u, p, scales, state, spans)
