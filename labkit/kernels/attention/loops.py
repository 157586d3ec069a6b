"""Attention's loops on a CPU: keys in blocks counted from each row's first token, a running maximum.

What a query's result is depends on its own row's tokens alone, not on how many queries are asked together.
"""

from __future__ import annotations

import numpy as np

from labkit.kernels.attention.tiles import dots, weigh, weigh_all
from labkit.kernels.compiled import entry, inner
from labkit.kernels.fused.loops import copy, exp, fill, gated, rms_norm
from labkit.kernels.vectors import ask_for
from labkit.kernels.views import floats, whole_numbers

KEYS = 64
"""Of a block."""

QUERIES = 32
"""Tokens whose queries pass over the keys together."""

EVERY = 8
"""Queries of a single token that meet each key together. Its keys and values come from memory, once; those of many
tokens stay in a cache, where four queries and two keys at a time take fewer reads."""


@inner
def _scores(q, size, k, v, width, count, out):
    """out [size, KEYS] = q k^T for `size` rows, eight, four or one, and `count` keys. v: the values that follow."""
    if size == EVERY:
        for j in range(count):
            ask_for(v + 4 * j * width, 4 * width)
            dots(8, 1, q, width, k + 4 * j * width, width, width, out + 4 * j, KEYS)
        return
    whole = count // 2 * 2 if size == 4 else 0
    for j in range(0, whole, 2):
        dots(4, 2, q, width, k + 4 * j * width, width, width, out + 4 * j, KEYS)
    for j in range(whole, count):
        if size == 4:
            dots(4, 1, q, width, k + 4 * j * width, width, width, out + 4 * j, KEYS)
        else:
            dots(1, 1, q, width, k + 4 * j * width, width, width, out + 4 * j, KEYS)


@inner
def _weigh(weights, size, v, width, count, out):
    """out [size, width] += weights^T v for `count` keys. weights: [count, size]."""
    if size == EVERY:
        weigh_all(8, weights, v, width, count, width, out, width)
        return
    whole = count // 2 * 2 if size == 4 else 0
    for j in range(0, whole, 2):
        weigh(4, 2, weights + 16 * j, v + 4 * j * width, width, width, out, width)
    for j in range(whole, count):
        if size == 4:
            weigh(4, 1, weights + 16 * j, v + 4 * j * width, width, width, out, width)
        else:
            weigh(1, 1, weights + 4 * j, v + 4 * j * width, width, width, out, width)


@entry
def attend(q, rows, width, k, v, first, column, count, scale, y):
    """Causal attention of `count` consecutive tokens of one row and one key-value head.

    Args (addresses of float32, but for sizes and columns):
        q, y: [rows, width], the queries and results of a token together. k, v: [columns, width], the head's buffers.
        first: the row's first column. column: that of the first query's own key.
        scale: of [1].
    """
    end, factor = column + count, floats(scale, 1)[0]
    group, out = rows // count, floats(y, rows * width)
    largest, total = np.empty(rows, np.float32), np.zeros(rows, np.float32)
    fill(largest, np.float32(-np.inf))
    fill(out, np.float32(0))
    scores, weights = np.empty(EVERY * KEYS, np.float32), np.empty(EVERY * KEYS, np.float32)
    here = np.empty(KEYS, np.float32)
    for begin in range(first, end, KEYS):
        present = min(end - begin, KEYS)
        m = max(0, begin - column) * group
        while m < rows:
            size = EVERY if count == 1 and rows - m >= EVERY else 4 if rows - m >= 4 else 1
            # The last of these queries sees the most.
            seen = min(present, column + (m + size - 1) // group - begin + 1)
            at = 4 * m * width
            values = v + 4 * begin * width
            _scores(q + at, size, k + 4 * begin * width, values, width, seen, scores.ctypes.data)
            for row in range(size):
                visible = max(0, min(present, column + (m + row) // group - begin + 1))
                top, sum_of_weights = largest[m + row], np.float32(0)
                for j in range(visible):
                    here[j] = scores[row * KEYS + j] * factor
                for j in range(visible):
                    top = max(top, here[j])
                for j in range(visible):
                    here[j] = exp(here[j] - top)
                for j in range(visible):
                    sum_of_weights += here[j]
                if visible:
                    faded = exp(largest[m + row] - top)
                    total[m + row] = total[m + row] * faded + sum_of_weights
                    largest[m + row] = top
                    for i in range((m + row) * width, (m + row + 1) * width):
                        out[i] *= faded
                for j in range(visible):
                    weights[j * size + row] = here[j]
                for j in range(visible, seen):
                    weights[j * size + row] = np.float32(0)
            _weigh(weights.ctypes.data, size, values, width, seen, y + at)
            m += size
    for m in range(rows):
        for i in range(m * width, (m + 1) * width):
            out[i] /= total[m]


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


@inner
def attention_inputs(
    inputs, columns, q_norm, k_norm, eps, cosines, sines, half, hq, hkv, width, starts, row_of, column, keys, values,
    capacity, begin, end,
):  # fmt: skip
    """Norm and rotate the queries in place, write keys and values into their buffers, for tokens `begin` to `end`.

    Args (addresses of float32, but for sizes, eps and the int64 of `starts`, `row_of` and `column`):
        inputs, columns: [T, columns], as projected: query and gate of head 0, of head 1, ..., keys, values.
        q_norm, k_norm: [width]. cosines, sines: [T, half].
        hq, hkv, width: query heads, key-value heads, values of a head.
        starts: [B + 1], the rows' first tokens. row_of: [T]. column: [B], where the key of a row's first token goes.
        keys, values: [B, hkv, capacity, width].
    """
    rows, q_weight, k_weight = whole_numbers(row_of, end), floats(q_norm, width), floats(k_norm, width)
    for t in range(begin, end):
        row, x = rows[t], inputs + 4 * columns * t
        cos, sin = floats(cosines + 4 * half * t, half), floats(sines + 4 * half * t, half)
        for h in range(hq):
            query = floats(x + 8 * h * width, width)
            norm_and_rotate(query, q_weight, eps, cos, sin, query)
        place = whole_numbers(column, row + 1)[row] + t - whole_numbers(starts, row + 1)[row]
        for h in range(hkv):
            key, to = x + 4 * (2 * hq + h) * width, 4 * ((row * hkv + h) * capacity + place) * width
            norm_and_rotate(floats(key, width), k_weight, eps, cos, sin, floats(keys + to, width))
            copy(floats(key + 4 * hkv * width, width), floats(values + to, width))


BLOCK_FIELDS = 4
ROW, HEAD, BEGIN, COUNT = range(BLOCK_FIELDS)
"""Of a block of queries: its row and key-value head, its first token, how many tokens."""


@inner
def attention_blocks(
    inputs, columns, keys, values, capacity, hq, hkv, width, scale, blocks, starts, first, column, out, begin, end
):
    """Attention of blocks `begin` to `end` of consecutive tokens, gated.

    Args (besides those of `attention_inputs`, which was called before):
        scale: address of float32 [1]. blocks: of int64 [n, BLOCK_FIELDS].
        first: address of int64 [B], each row's first column in use.
        out: address of float32 [T, hq width].
    """
    group = hq // hkv
    most = 1
    for number in range(begin, end):
        most = max(most, whole_numbers(blocks + 8 * BLOCK_FIELDS * number, BLOCK_FIELDS)[COUNT])
    queries, result = np.empty(most * group * width, np.float32), np.empty(most * group * width, np.float32)
    for number in range(begin, end):
        block = whole_numbers(blocks + 8 * BLOCK_FIELDS * number, BLOCK_FIELDS)
        row, head, at, count = block[ROW], block[HEAD], block[BEGIN], block[COUNT]
        for i in range(count * group):
            x = inputs + 4 * (columns * (at + i // group) + 2 * (head * group + i % group) * width)
            copy(floats(x, width), floats(queries.ctypes.data + 4 * i * width, width))
        buffer = 4 * (row * hkv + head) * capacity * width
        own = whole_numbers(column, row + 1)[row] + at - whole_numbers(starts, row + 1)[row]
        start = whole_numbers(first, row + 1)[row]
        attend(queries, count * group, width, keys + buffer, values + buffer, start, own, count, scale, result)
        for i in range(count * group):
            h = head * group + i % group
            gate = floats(inputs + 4 * (columns * (at + i // group) + (2 * h + 1) * width), width)
            to = floats(out + 4 * ((at + i // group) * hq + h) * width, width)
            gated(floats(result.ctypes.data + 4 * i * width, width), gate, to)
