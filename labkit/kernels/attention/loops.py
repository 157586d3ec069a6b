"""Attention's loops on a CPU: keys in blocks counted from each row's first token, a running maximum.

What a query's result is depends on its own row's tokens alone, not on how many queries are asked together.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.attention.tiles import COLUMNS, dots, weigh
from labkit.kernels.compiled import entry, inner, loop
from labkit.kernels.fused.loops import copy, exp, fill, gated, rms_norm
from labkit.kernels.vectors import pointer

KEYS = 64
"""Of a block."""

QUERIES = 32
"""Tokens whose queries pass over the keys together."""


@inner
def _scores(queries, size, keys, count, scores):
    width = queries.shape[1]
    q, q_row = queries.ctypes.data, queries.strides[0] // 4
    k, k_row = keys.ctypes.data, keys.strides[0] // 4
    out = scores.ctypes.data
    j = 0
    while j + 2 <= count:
        at, to = k + 4 * j * k_row, out + 4 * j
        if size == 4:
            dots(4, 2, q, q_row, at, k_row, width, to, KEYS)
        elif size == 2:
            dots(2, 2, q, q_row, at, k_row, width, to, KEYS)
        else:
            dots(1, 2, q, q_row, at, k_row, width, to, KEYS)
        j += 2
    if j < count:
        at, to = k + 4 * j * k_row, out + 4 * j
        if size == 4:
            dots(4, 1, q, q_row, at, k_row, width, to, KEYS)
        elif size == 2:
            dots(2, 1, q, q_row, at, k_row, width, to, KEYS)
        else:
            dots(1, 1, q, q_row, at, k_row, width, to, KEYS)


@inner
def _weigh(weights, faded, size, values, count, out):
    width, whole = out.shape[1], out.shape[1] // COLUMNS * COLUMNS
    w, f = weights.ctypes.data, faded.ctypes.data
    v, v_row = values.ctypes.data, values.strides[0] // 4
    o, o_row = out.ctypes.data, out.strides[0] // 4
    for c in range(0, whole, COLUMNS):
        if size == 4:
            weigh(4, w, f, v + 4 * c, v_row, count, o + 4 * c, o_row)
        elif size == 2:
            weigh(2, w, f, v + 4 * c, v_row, count, o + 4 * c, o_row)
        else:
            weigh(1, w, f, v + 4 * c, v_row, count, o + 4 * c, o_row)
    for m in range(size):
        for c in range(whole, width):
            value = out[m, c] * faded[m]
            for j in range(count):
                value += weights[j * size + m] * values[j, c]
            out[m, c] = value


@entry
def attend(q, rows, width, k, v, first, column, count, scale, y):
    """Causal attention of `count` consecutive tokens of one row and one key-value head.

    Args (addresses of float32, but for sizes and columns):
        q, y: [rows, width], the queries and results of a token together. k, v: [columns, width], the head's buffers.
        first: the row's first column. column: that of the first query's own key.
        scale: of [1].
    """
    end, factor = column + count, carray(pointer(scale), (1,), np.float32)[0]
    queries, out = carray(pointer(q), (rows, width), np.float32), carray(pointer(y), (rows, width), np.float32)
    keys, values = carray(pointer(k), (end, width), np.float32), carray(pointer(v), (end, width), np.float32)
    group = rows // count
    largest, total = np.empty(rows, np.float32), np.zeros(rows, np.float32)
    fill(largest, np.float32(-np.inf))
    for m in range(rows):
        fill(out[m], np.float32(0))
    scores, weights = np.empty((4, KEYS), np.float32), np.empty(4 * KEYS, np.float32)
    faded, row_weights = np.empty(4, np.float32), np.empty(KEYS, np.float32)
    for begin in range(first, end, KEYS):
        present = min(end - begin, KEYS)
        m = max(0, begin - column) * group
        while m < rows:
            size = min(4, rows - m)
            size = size if size != 3 else 2
            # The last of these queries sees the most.
            seen = min(present, column + (m + size - 1) // group - begin + 1)
            _scores(queries[m:], size, keys[begin:], seen, scores)
            for row in range(size):
                visible = min(present, column + (m + row) // group - begin + 1)
                if visible <= 0:
                    faded[row] = np.float32(1)
                    for j in range(seen):
                        weights[j * size + row] = np.float32(0)
                    continue
                top = largest[m + row]
                for j in range(visible):
                    scores[row, j] *= factor
                for j in range(visible):
                    top = max(top, scores[row, j])
                sum_of_weights = np.float32(0)
                for j in range(visible):
                    row_weights[j] = exp(scores[row, j] - top)
                for j in range(visible):
                    sum_of_weights += row_weights[j]
                faded[row] = exp(largest[m + row] - top)
                total[m + row] = total[m + row] * faded[row] + sum_of_weights
                largest[m + row] = top
                for j in range(visible):
                    weights[j * size + row] = row_weights[j]
                for j in range(visible, seen):
                    weights[j * size + row] = np.float32(0)
            _weigh(weights, faded, size, values[begin:], seen, out[m:])
            m += size
    for m in range(rows):
        for i in range(width):
            out[m, i] /= total[m]


@inner
def norm_and_rotate(x, weight, eps, cosines, sines, out):
    """One head [D]: RMS norm, then the first 2 cosines.size values rotated, value i with value i + half.

    Args:
        cosines, sines: of the token's angles, [half].
    """
    rms_norm(x, weight, eps, out)
    half = cosines.size
    for i in range(half):
        a, b = out[i], out[i + half]
        out[i] = a * cosines[i] - b * sines[i]
        out[i + half] = a * sines[i] + b * cosines[i]


@loop
def attention_inputs(inputs, q_norm, k_norm, eps, cosines, sines, heads, rows, columns, keys, values, begin, end):
    """Norm and rotate the queries in place, write keys and values into their buffers.

    Args:
        inputs: [T, q gates k v], as projected: query and gate of head 0, of head 1, ..., keys, values.
        heads: (query heads, key-value heads). cosines, sines: [T, half].
        rows, columns: int64 [T], where a token's key goes. keys, values: [B, HKV, S, D].
        begin, end: the tokens to work on.
    """
    hq, hkv = heads
    width = keys.shape[3]
    for t in range(begin, end):
        for h in range(hq):
            q = inputs[t, 2 * h * width : (2 * h + 1) * width]
            norm_and_rotate(q, q_norm, eps, cosines[t], sines[t], q)
        for h in range(hkv):
            at = (2 * hq + h) * width
            to = keys[rows[t], h, columns[t]]
            norm_and_rotate(inputs[t, at : at + width], k_norm, eps, cosines[t], sines[t], to)
            at += hkv * width
            copy(inputs[t, at : at + width], values[rows[t], h, columns[t]])


BLOCK_FIELDS = 6
ROW, HEAD, FIRST, COLUMN, BEGIN, COUNT = range(BLOCK_FIELDS)
"""Of a block of queries: its row and key-value head, the row's first column, the first query's own column, its place
among all tokens, how many tokens."""


@loop
def attention_blocks(inputs, keys, values, heads, scale, blocks, out, begin, end):
    """Attention of blocks `begin` to `end` of consecutive tokens, gated.

    Args:
        inputs: after `attention_inputs`. blocks: int64 [n, BLOCK_FIELDS].
        out: [T, HQ D].
    """
    hq, hkv = heads
    group, width = hq // hkv, keys.shape[3]
    scales = np.empty(1, np.float32)
    scales[0] = scale
    for number in range(begin, end):
        row, head, at, count = (
            blocks[number, ROW], blocks[number, HEAD], blocks[number, BEGIN], blocks[number, COUNT]
        )  # fmt: skip
        rows = count * group
        queries, result = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
        for t in range(count):
            for g in range(group):
                c = 2 * (head * group + g) * width
                copy(inputs[at + t, c : c + width], queries[t * group + g])
        attend(
            queries, rows, width, keys[row, head], values[row, head], blocks[number, FIRST], blocks[number, COLUMN],
            count, scales, result,
        )  # fmt: skip
        for t in range(count):
            for g in range(group):
                h = head * group + g
                gate = inputs[at + t, (2 * h + 1) * width : (2 * h + 2) * width]
                gated(result[t * group + g], gate, out[at + t, h * width : (h + 1) * width])
