"""Gated DeltaNet's loops on a CPU. A token's arithmetic is the same wherever it stands in a call.

The state [DV, DK] is taken two rows at a time through a block of tokens: they stay in the first-level cache, and one
pass over them updates them for a token, reads that token's output, and what the next token will find under its key.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import entry, inner, loop
from labkit.kernels.fused.loops import copy, fill, scale_to, sigmoid
from labkit.kernels.gated_delta.tiles import AHEAD, LAST_ROWS, ROWS, last_turn, look, turn
from labkit.kernels.vectors import pointer
from labkit.kernels.views import floats, whole_numbers

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
    change, seen, read = np.empty(LAST_ROWS, np.float32), np.empty(LAST_ROWS, np.float32), np.empty(ROWS, np.float32)
    alone = dv // LAST_ROWS * LAST_ROWS if count == 1 else 0
    for d in range(0, alone, LAST_ROWS):
        at = state + 4 * dk * d
        look(LAST_ROWS, AHEAD, at, k, seen.ctypes.data, dk)
        for row in range(LAST_ROWS):
            change[row] = betas[0] * (values[0, d + row] - decays[0] * seen[row])
        last_turn(at, k, q, decays[0], change.ctypes.data, y + 4 * d, dk)
    for d in range(alone, dv, ROWS):
        look(ROWS, 0, state + 4 * dk * d, k, seen.ctypes.data, dk)
        for t in range(count):
            for row in range(ROWS):
                change[row] = betas[t] * (values[t, d + row] - decays[t] * seen[row])
            turn(
                state + 4 * dk * d, k + 4 * dk * t, q + 4 * dk * t, k + 4 * dk * (t + 1), decays[t],
                change.ctypes.data, seen.ctypes.data, read.ctypes.data, dk,
            )  # fmt: skip
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
def mixer_heads(
    inputs, columns, tail, state, conv, a_log, dt_bias, norm, eps, hk, hv, dk, dv, starts, recorded, states, out,
    begin, end,
):  # fmt: skip
    """The mixer between its projections, for the tasks `begin` to `end`: task row HK + g is key head g of a row and the
    value heads that share it.

    Args (addresses of float32, but for sizes, `starts` and eps):
        inputs, columns: [T, columns], q k v z a b as projected. tail: [B, 3, channels].
        state: [B, HV, DV, DK], updated. conv: [4, channels]. a_log, dt_bias: [HV]. norm: [DV]. eps: float32.
        starts: address of int64 [B + 1], the rows' first tokens.
        recorded, states: of how many tokens of a row `states` [B, tokens, HV, DV, DK] takes the state after each; or 0.
        out: [T, HV DV].
    """
    share, channels, head = hv // hk, 2 * hk * dk + hv * dv, 4 * dv * dk
    size = 1 if recorded else BLOCK
    queries, keys = np.zeros((size, dk), np.float32), np.zeros((size + 1, dk), np.float32)
    values, y = np.empty((size, dv), np.float32), np.empty((size, dv), np.float32)
    decays, betas = np.empty(size, np.float32), np.empty(size, np.float32)
    first_tokens = whole_numbers(starts, (end - 1) // hk + 2)
    for task in range(begin, end):
        row, group = task // hk, task % hk
        first, last = first_tokens[row], first_tokens[row + 1]
        x, before = inputs + 4 * columns * first, tail + 4 * row * (TAPS - 1) * channels
        for at in range(first, last, size):
            count, behind = min(last - at, size), at - first
            convolve_at(x, columns, before, channels, conv, group * dk, behind, count, dk, queries)
            convolve_at(x, columns, before, channels, conv, (hk + group) * dk, behind, count, dk, keys)
            for t in range(count):
                scale_to(queries[t], np.float32(1) / np.sqrt(np.float32(dk)))
                scale_to(keys[t], np.float32(1))
            for h in range(group * share, (group + 1) * share):
                convolve_at(x, columns, before, channels, conv, 2 * hk * dk + h * dv, behind, count, dv, values)
                for t in range(count):
                    gates = floats(x + 4 * (columns * (behind + t) + channels + hv * dv), 2 * hv)
                    decays[t] = decay_of(gates[h], floats(a_log, hv)[h], floats(dt_bias, hv)[h])
                    betas[t] = sigmoid(gates[hv + h])
                here = state + (row * hv + h) * head
                scan_block(here, dv, dk, queries, keys, values, decays, betas, count, y)
                if recorded:
                    copy(floats(here, dv * dk), floats(states + ((row * recorded + behind) * hv + h) * head, dv * dk))
                for t in range(count):
                    gate = floats(x + 4 * (columns * (behind + t) + channels + h * dv), dv)
                    to = floats(out + 4 * ((at + t) * hv + h) * dv, dv)
                    gated_norm(y[t], gate, floats(norm, dv), eps, to)


@inner
def convolve_at(x, columns, tail, channels, conv, channel, begin, count, width, out):
    """`convolve` for `width` channels from `channel` on."""
    at = 4 * channel
    convolve(x + at, columns, tail + at, channels, conv + at, begin, count, width, out)


@inner
def gated_norm(y, gate, weight, eps, out):
    """out[i] = rms_norm(y)[i] weight[i] silu(gate[i])."""
    total = np.float32(0)
    for i in range(y.size):
        total += y[i] * y[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(y.size) + eps)
    for i in range(y.size):
        out[i] = y[i] * factor * weight[i] * gate[i] * sigmoid(gate[i])


@inner
def tail_after(inputs, columns, tail, channels, count, after):
    """The last three tokens as the convolution sees them, once `count` of a row have passed -> after [3, channels].

    Args: addresses of float32, but for sizes. inputs: the row's first token. tail: those before it, [3, channels]; may
    be `after` itself.
    """
    for i in range(TAPS - 1):
        at = count - (TAPS - 1) + i
        source = inputs + 4 * columns * at if at >= 0 else tail + 4 * channels * (at + TAPS - 1)
        copy(floats(source, channels), floats(after + 4 * channels * i, channels))


@loop
def step_rows(inputs, tail, state, conv, a_log, dt_bias, norm, eps, key_heads, starts, recorded, states, out, after):
    """`mixer_heads` for all heads of all rows, and the tails once each row's tokens have passed -> after.

    Args:
        inputs: [T, q k v z a b]. tail, after: [B, 3, channels]. state: [B, HV, DV, DK], updated. starts: int64 [B + 1].
        recorded: tokens of a row whose states are wanted in `states`. out: [T, HV DV]. The others as for `mixer_heads`.
    """
    rows, hv, dv, dk = state.shape
    columns, channels = inputs.shape[1], tail.shape[2]
    mixer_heads(
        inputs.ctypes.data, columns, tail.ctypes.data, state.ctypes.data, conv.ctypes.data, a_log.ctypes.data,
        dt_bias.ctypes.data, norm.ctypes.data, eps, key_heads, hv, dk, dv, starts.ctypes.data, recorded,
        states.ctypes.data, out.ctypes.data, 0, rows * key_heads,
    )  # fmt: skip
    for row in range(rows):
        at, offset = inputs.ctypes.data + 4 * columns * starts[row], 4 * row * (TAPS - 1) * channels
        count = starts[row + 1] - starts[row]
        tail_after(at, columns, tail.ctypes.data + offset, channels, count, after.ctypes.data + offset)
