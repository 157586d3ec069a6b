"""Gated DeltaNet's loops on a CPU. A token's arithmetic is the same wherever it stands in a call.

The state [DV, DK] is taken two rows at a time through a block of tokens: they stay in the first-level cache, and one
pass over them updates them for a token, reads that token's output, and what the next token will find under its key.
"""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import loop
from labkit.kernels.fused.loops import scale_to, sigmoid
from labkit.kernels.gated_delta.tiles import ROWS, turn

BLOCK = 16
"""Tokens whose queries, keys and values are at hand together."""

TAPS = 4
"""Of the convolution."""


@loop
def scan_block(state, q, k, v, decay, beta, count, y, change, seen):
    """`count` tokens, at most BLOCK, through one head's state [DV, DK].

    Args:
        q: [BLOCK, DK]. k: [BLOCK + 1, DK], of which the last row is never used for a token.
        v, y: [BLOCK, DV]. decay, beta: [BLOCK].
        change, seen: scratch [ROWS].
    """
    dv, dk = state.shape
    for d in range(0, dv, ROWS):
        rows = state[d : d + ROWS]
        at, keys, queries = rows.ctypes.data, k.ctypes.data, q.ctypes.data
        change[:] = np.float32(0)
        # Nothing changes in a turn without decay and change: it only reads what the first key finds.
        turn(at, keys, queries, keys, np.float32(1), change.ctypes.data, seen.ctypes.data, y[0, d:].ctypes.data, dk)
        for t in range(count):
            for row in range(ROWS):
                change[row] = beta[t] * (v[t, d + row] - decay[t] * seen[row])
            turn(
                at, keys + 4 * dk * t, queries + 4 * dk * t, keys + 4 * dk * (t + 1), decay[t], change.ctypes.data,
                seen.ctypes.data, y[t, d:].ctypes.data, dk,
            )  # fmt: skip


@loop
def scan_head(q, k, v, log_decay, beta, first, last, state, y):
    """Tokens `first` to `last` of one head of one row: q, k [T, DK]; v, y [T, DV]; log_decay, beta [T]."""
    dv, dk = state.shape
    queries, keys = np.zeros((BLOCK, dk), np.float32), np.zeros((BLOCK + 1, dk), np.float32)
    values, out = np.empty((BLOCK, dv), np.float32), np.empty((BLOCK, dv), np.float32)
    decays, betas = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    change, seen = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for begin in range(first, last, BLOCK):
        count = min(last - begin, BLOCK)
        for t in range(count):
            queries[t], keys[t], values[t] = q[begin + t], k[begin + t], v[begin + t]
            decays[t], betas[t] = np.exp(log_decay[begin + t]), beta[begin + t]
        scan_block(state, queries, keys, values, decays, betas, count, out, change, seen)
        for t in range(count):
            y[begin + t] = out[t]


@loop
def convolve(qkv, tail, weight, channel, first, t, out):
    """out = silu of the causal convolution at token t of a row that begins at token `first`.

    Args:
        qkv: [T, channels or more]. tail: [3, channels], the tokens before. weight: [4, channels].
        channel: the first of out.size channels.
    """
    out[:] = np.float32(0)
    for tap in range(TAPS):
        at = t - (TAPS - 1) + tap
        source = qkv[at] if at >= first else tail[at - first + TAPS - 1]
        for i in range(out.size):
            out[i] += source[channel + i] * weight[tap, channel + i]
    for i in range(out.size):
        out[i] *= sigmoid(out[i])


@loop
def decay_of(a, a_log, dt_bias):
    """exp(-exp(a_log) softplus(a + dt_bias))."""
    x = a + dt_bias
    softplus = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
    return np.exp(-np.exp(a_log) * softplus)


@loop
def mixer_heads(
    inputs, tail, state, conv, a_log, dt_bias, norm, eps, heads, first, last, row, group, tokens, states, out
):
    """The mixer of one row between its projections, for one key head and the value heads that share it.

    Args:
        inputs: [T, q k v z a b], as projected. tail: [B, 3, channels]. state: [B, HV, DV, DK], updated.
        conv: [4, channels]. a_log, dt_bias: [HV]. norm: [DV]. heads: (HK, HV).
        first, last: the row's tokens. row, group: which row, which key head.
        tokens: for how many of them the state is kept: `last - first`, or 0.
        states: [B, tokens, HV, DV, DK], the states after each token.
        out: [T, HV DV].
    """
    hk, hv = heads
    dv, dk = state.shape[2:]
    share, channels = hv // hk, 2 * hk * dk + hv * dv
    z, a, b = channels, channels + hv * dv, channels + hv * dv + hv
    queries, keys = np.zeros((BLOCK, dk), np.float32), np.zeros((BLOCK + 1, dk), np.float32)
    values, y = np.empty((BLOCK, dv), np.float32), np.empty((BLOCK, dv), np.float32)
    decays, betas = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    change, seen = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    block = 1 if tokens else BLOCK
    for begin in range(first, last, block):
        count = min(last - begin, block)
        for t in range(count):
            convolve(inputs, tail[row], conv, group * dk, first, begin + t, queries[t])
            convolve(inputs, tail[row], conv, (hk + group) * dk, first, begin + t, keys[t])
            scale_to(queries[t], np.float32(1) / np.sqrt(np.float32(dk)))
            scale_to(keys[t], np.float32(1))
        for h in range(group * share, (group + 1) * share):
            for t in range(count):
                convolve(inputs, tail[row], conv, 2 * hk * dk + h * dv, first, begin + t, values[t])
                decays[t] = decay_of(inputs[begin + t, a + h], a_log[h], dt_bias[h])
                betas[t] = sigmoid(inputs[begin + t, b + h])
            scan_block(state[row, h], queries, keys, values, decays, betas, count, y, change, seen)
            if tokens:
                states[row, begin - first, h] = state[row, h]
            for t in range(count):
                gated_norm(y[t], inputs[begin + t, z + h * dv :], norm, eps, out[begin + t, h * dv :])


@loop
def gated_norm(y, gate, weight, eps, out):
    """out[i] = rms_norm(y)[i] weight[i] silu(gate[i])."""
    total = np.float32(0)
    for i in range(y.size):
        total += y[i] * y[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(y.size) + eps)
    for i in range(y.size):
        out[i] = y[i] * factor * weight[i] * gate[i] * sigmoid(gate[i])


@loop
def tail_after(inputs, tail, first, last, row, after):
    """The last three tokens of a row as the convolution sees them -> after [3, channels]."""
    for i in range(TAPS - 1):
        at = last - (TAPS - 1) + i
        for c in range(after.shape[1]):
            after[i, c] = inputs[at, c] if at >= first else tail[row, at - first + TAPS - 1, c]
