"""Gated DeltaNet's loops on a CPU. A token's arithmetic is the same wherever it stands in a call.

The state [DV, DK] is taken two rows at a time through a block of tokens: they stay in the first-level cache, and one
pass over them updates them for a token, reads that token's output, and what the next token will find under its key.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import entry, inner, loop
from labkit.kernels.fused.loops import copy, fill, scale_to, sigmoid
from labkit.kernels.gated_delta.tiles import ROWS, turn
from labkit.kernels.vectors import pointer

BLOCK = 16
"""Tokens whose queries, keys and values are at hand together."""

TAPS = 4
"""Of the convolution."""


@entry
def scan_block(state, dv, dk, q, k, v, decay, beta, count, y):
    """`count` tokens through one head's state.

    Args (addresses of float32):
        state: [dv, dk], updated. q: [count, dk]. k: [count + 1, dk], the last row of no meaning. v, y: [count, dv].
        decay, beta: [count].
    """
    values, out = carray(pointer(v), (count, dv), np.float32), carray(pointer(y), (count, dv), np.float32)
    decays, betas = carray(pointer(decay), (count,), np.float32), carray(pointer(beta), (count,), np.float32)
    change, seen, read = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for d in range(0, dv, ROWS):
        # The first turn changes nothing, without decay and change: it only reads what the first key finds.
        fill(change, np.float32(0))
        fade, at = np.float32(1), 0
        for t in range(-1, count):
            if t >= 0:
                fade, at = decays[t], 4 * dk * t
                for row in range(ROWS):
                    change[row] = betas[t] * (values[t, d + row] - fade * seen[row])
            turn(
                state + 4 * dk * d, k + at, q + at, k + 4 * dk * (t + 1), fade, change.ctypes.data, seen.ctypes.data,
                read.ctypes.data, dk,
            )  # fmt: skip
            if t >= 0:
                for row in range(ROWS):
                    out[t, d + row] = read[row]


@loop
def scan_heads(q, k, v, log_decay, beta, limits, state, y, begin, end):
    """The scan alone, for the tasks `begin` to `end`: task row HV + h is head h of a row.

    Args:
        q, k: [B, T, HK, DK]. v, y: [B, T, HV, DV]. log_decay, beta: [B, T, HV].
        limits: int64 [B, 2], each row's tokens. state: [B, HV, DV, DK], updated.
    """
    hv, dv = v.shape[2:]
    dk, share = q.shape[3], hv // q.shape[2]
    queries, keys = np.empty((BLOCK, dk), np.float32), np.zeros((BLOCK + 1, dk), np.float32)
    values, out = np.empty((BLOCK, dv), np.float32), np.empty((BLOCK, dv), np.float32)
    decays, betas = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for task in range(begin, end):
        row, h = task // hv, task % hv
        for first in range(limits[row, 0], limits[row, 1], BLOCK):
            count = min(limits[row, 1] - first, BLOCK)
            for t in range(count):
                copy(q[row, first + t, h // share], queries[t])
                copy(k[row, first + t, h // share], keys[t])
                copy(v[row, first + t, h], values[t])
                decays[t], betas[t] = np.exp(log_decay[row, first + t, h]), beta[row, first + t, h]
            scan_block(state[row, h], dv, dk, queries, keys, values, decays, betas, count, out)
            for t in range(count):
                copy(out[t], y[row, first + t, h])


@entry
def convolve(x, x_row, tail, channels, weight, begin, count, width, out):
    """out = silu of the causal convolution of `width` channels, for tokens `begin` to `begin + count` of a row.

    Args (addresses of float32, but for sizes):
        x, x_row: the first of the channels at the row's first token, floats from token to token.
        tail: the same channels of the three tokens before the row, `channels` floats apart. weight: of [4, channels].
        out: [count, width].
    """
    for t in range(count):
        to = carray(pointer(out + 4 * t * width), (width,), np.float32)
        fill(to, np.float32(0))
        for tap in range(TAPS):
            at = begin + t - (TAPS - 1) + tap
            source = x + 4 * at * x_row if at >= 0 else tail + 4 * (at + TAPS - 1) * channels
            values = carray(pointer(source), (width,), np.float32)
            factors = carray(pointer(weight + 4 * tap * channels), (width,), np.float32)
            for i in range(width):
                to[i] += values[i] * factors[i]
        for i in range(width):
            to[i] *= sigmoid(to[i])


@inner
def decay_of(a, a_log, dt_bias):
    """exp(-exp(a_log) softplus(a + dt_bias))."""
    x = a + dt_bias
    softplus = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
    return np.exp(-np.exp(a_log) * softplus)


@inner
def mixer_head(
    inputs, tail, state, conv, a_log, dt_bias, norm, eps, heads, first, last, row, group, recorded, states, out
):
    """The mixer of one row between its projections, for one key head and the value heads that share it.

    Args:
        inputs: [T, q k v z a b], as projected. tail: [B, 3, channels]. state: [B, HV, DV, DK], updated.
        conv: [4, channels]. a_log, dt_bias: [HV]. norm: [DV]. heads: (HK, HV).
        first, last: the row's tokens. row, group: which row, which key head.
        recorded: whether `states` [B, tokens, HV, DV, DK] takes the state after each token.
        out: [T, HV DV].
    """
    hk, hv = heads
    dv, dk = state.shape[2:]
    share, channels = hv // hk, 2 * hk * dk + hv * dv
    z, a = channels, channels + hv * dv
    size = 1 if recorded else BLOCK
    queries, keys = np.zeros((size, dk), np.float32), np.zeros((size + 1, dk), np.float32)
    values, y = np.empty((size, dv), np.float32), np.empty((size, dv), np.float32)
    decays, betas = np.empty(size, np.float32), np.empty(size, np.float32)
    x, x_row = inputs[first:], inputs.shape[1]
    for begin in range(first, last, size):
        count, behind = min(last - begin, size), begin - first
        for c, to in ((group * dk, queries), ((hk + group) * dk, keys)):
            convolve(x[:, c:], x_row, tail[row, :, c:], channels, conv[:, c:], behind, count, dk, to)
        for t in range(count):
            scale_to(queries[t], np.float32(1) / np.sqrt(np.float32(dk)))
            scale_to(keys[t], np.float32(1))
        for h in range(group * share, (group + 1) * share):
            c = 2 * hk * dk + h * dv
            convolve(x[:, c:], x_row, tail[row, :, c:], channels, conv[:, c:], behind, count, dv, values)
            for t in range(count):
                decays[t] = decay_of(inputs[begin + t, a + h], a_log[h], dt_bias[h])
                betas[t] = sigmoid(inputs[begin + t, a + hv + h])
            scan_block(state[row, h], dv, dk, queries, keys, values, decays, betas, count, y)
            if recorded:
                for d in range(dv):
                    copy(state[row, h, d], states[row, behind, h, d])
            for t in range(count):
                gated_norm(y[t], inputs[begin + t, z + h * dv :], norm, eps, out[begin + t, h * dv :])


@inner
def gated_norm(y, gate, weight, eps, out):
    """out[i] = rms_norm(y)[i] weight[i] silu(gate[i])."""
    total = np.float32(0)
    for i in range(y.size):
        total += y[i] * y[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(y.size) + eps)
    for i in range(y.size):
        out[i] = y[i] * factor * weight[i] * gate[i] * sigmoid(gate[i])


@loop
def mixer_heads(inputs, tail, state, conv, a_log, dt_bias, norm, eps, heads, starts, recorded, states, out, begin, end):
    """`mixer_head` for the tasks `begin` to `end`: task row HK + g is key head g of a row.

    Args:
        starts: int64 [B + 1], the rows' first tokens.
    """
    for task in range(begin, end):
        row, group = task // heads[0], task % heads[0]
        mixer_head(
            inputs, tail, state, conv, a_log, dt_bias, norm, eps, heads, starts[row], starts[row + 1], row, group,
            recorded, states, out,
        )  # fmt: skip


@inner
def tail_after(inputs, tail, first, last, after):
    """The last three tokens as the convolution sees them -> after [3, channels]. tail: those before, [3, channels]."""
    for i in range(TAPS - 1):
        at = last - (TAPS - 1) + i
        source = inputs[at] if at >= first else tail[at - first + TAPS - 1]
        copy(source[: after.shape[1]], after[i])


@loop
def tails_after(inputs, tail, starts, count, after):
    """The tails once `count` tokens of each row (at most those that it has) have passed -> after [B, 3, channels]."""
    for row in range(tail.shape[0]):
        last = min(starts[row] + count, starts[row + 1])
        tail_after(inputs, tail[row], starts[row], last, after[row])
