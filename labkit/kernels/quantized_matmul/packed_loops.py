"""The quantised product's loops on weights in MLX's own layout: few rows as they lie, many through panels."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import entry, inner, loop
from labkit.kernels.quantized_matmul.loops import product, ready
from labkit.kernels.quantized_matmul.panels import (
    FIELDS,
    FORM,
    FORMS,
    GROUP,
    INPUTS,
    MATRIX,
    OUTPUTS,
    PANEL,
    ROWS,
    START,
    WIDTH,
    Form,
)
from labkit.kernels.quantized_matmul.tiles import WORD, packed_tile
from labkit.kernels.vectors import LANES, pointer
from labkit.kernels.views import floats

FOUR, EIGHT = FORMS.index(Form(4, 4)), FORMS.index(Form(8, 4))


TOGETHER = 128
"""Outputs whose weights stay in the second-level cache while all rows meet them."""


@entry
def packed_rows(w, w_row, words, turns, scales, biases, groups, shift, x, x_row, sums, rows, bits, count, y, y_row):
    """`count` outputs of some rows; arguments as for `packed_tile`."""
    for begin in range(0, count, TOGETHER):
        last = begin + TOGETHER if begin + TOGETHER < count else count
        m = 0
        while m < rows:
            # One row takes one of W's at a time, from the first to the last, as memory likes it.
            tall = 2 if rows - m >= 2 else 1
            at, s = x + m * x_row, sums + 4 * m * turns
            n = begin
            while n < last:
                wide = 2 if tall == 2 and n + 2 <= last else 1
                ws, factors, to = w + n * w_row, 4 * n * groups, y + 4 * (m * y_row + n)
                ss, bs = scales + factors, biases + factors
                if tall == 1 and bits == 4:
                    packed_tile(1, 1, 4, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                elif tall == 1:
                    packed_tile(1, 1, 8, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                elif wide == 1 and bits == 4:
                    packed_tile(2, 1, 4, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                elif wide == 1:
                    packed_tile(2, 1, 8, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                elif bits == 4:
                    packed_tile(2, 2, 4, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                else:
                    packed_tile(2, 2, 8, ws, w_row, words, turns, ss, bs, groups, shift, at, x_row, s, to, y_row)
                n += wide
            m += tall


@entry
def lane_by_lane(values, words, turns, bits, inputs, sums):
    """One row's values as `packed_tile` takes them: the last code of a word meets them as they are, each other one as
    many times smaller as it is larger where it stands.

    Args (addresses of float32, but for sizes):
        values: the row. words, turns: words that are read at once, and how often. bits: of a weight.
        inputs: [turns, parts of a word, 8], zeros in lanes beyond `words`. sums: [turns], of the values.
    """
    parts = WORD // bits
    x, to, totals = floats(values, turns * words * parts), floats(inputs, turns * parts * LANES), floats(sums, turns)
    for turn in range(turns):
        total, scale = np.float32(0), np.float32(1)
        for part in range(parts):
            if part == parts - 1:
                scale = np.float32(1)
            for lane in range(LANES):
                value = x[(turn * words + lane) * parts + part] if lane < words else np.float32(0)
                to[(turn * parts + part) * LANES + lane] = value * scale
                total += value
            scale /= np.float32(1 << bits)
        totals[turn] = total


@entry
def rows_by_packed(w, scales, biases, x, rows, bits, k, group, y, n, begin, end):
    """Outputs `begin` to `end` of y [rows, n].

    Args (addresses, but for sizes):
        w: bytes [n, k bits / 8]. scales, biases: float32 [n, groups]. x: float32 [rows, k].
    """
    groups, w_row, words = k // group, k * bits // 8, min(LANES, group * bits // WORD)
    turns, shift = w_row // (4 * words), 0
    while groups << shift < turns:
        shift += 1
    x_row = 4 * turns * LANES * (WORD // bits)
    inputs, sums = np.empty(rows * x_row // 4, np.float32), np.empty(rows * turns, np.float32)
    for m in range(rows):
        to, totals = inputs.ctypes.data + m * x_row, sums.ctypes.data + 4 * m * turns
        lane_by_lane(x + 4 * m * k, words, turns, bits, to, totals)
    packed_rows(
        w + begin * w_row, w_row, words, turns, scales + 4 * begin * groups, biases + 4 * begin * groups, groups, shift,
        inputs, x_row, sums, rows, bits, end - begin, y + 4 * begin, n,
    )  # fmt: skip


def use_panels(bits: int) -> None:
    """To be called before `rows_by_panels` for weights of so many bits: their product is compiled."""
    ready(FOUR if bits == 4 else EIGHT)


@loop
def rows_by_panels(w, scales, biases, x, bits, group, y, begin, end):
    """Outputs `begin` to `end` of y [rows, n] = x W^T, the weights of these outputs laid out in panels first.

    Args:
        w: uint8 [n, K bits / 8]. scales, biases: float32 [n, groups]. x: float32 [rows, K].
    """
    panels, k = (end - begin + WIDTH - 1) // WIDTH, x.shape[1]
    row = WIDTH * bits // 8
    matrix = np.empty(FIELDS, np.int64)
    matrix[START], matrix[FORM], matrix[ROWS] = 0, FOUR if bits == 4 else EIGHT, end - begin
    matrix[OUTPUTS], matrix[INPUTS], matrix[GROUP] = panels * WIDTH, k, group
    matrix[PANEL] = k // group * (8 * WIDTH + group * row)
    matrix[MATRIX] = panels * matrix[PANEL]
    data = np.zeros(matrix[MATRIX], np.uint8)
    for n in range(begin, end):
        lay_out(
            w[n], scales[n], biases[n], bits, group, data[(n - begin) // WIDTH * matrix[PANEL] :], (n - begin) % WIDTH
        )
    out = np.empty((x.shape[0], panels * WIDTH), np.float32)
    product(x, k, x.shape[0], data, matrix, 0, 0, panels, out, panels * WIDTH)
    for m in range(x.shape[0]):
        for n in range(begin, end):
            y[m, n] = out[m, n - begin]


@inner
def lay_out(w, scales, biases, bits, group, panel, lane):
    """One row of packed weights into its lane of a panel that is zero there."""
    row, size, at = WIDTH * bits // 8, group * bits // 8, 0
    for g in range(scales.size):
        factors = carray(pointer(panel[at:].ctypes.data), (2 * WIDTH,), np.float32)
        factors[lane], factors[WIDTH + lane] = scales[g], biases[g]
        at += 8 * WIDTH
        if bits == 8:
            for i in range(size):
                panel[at + i * row + lane] = w[g * size + i]
        else:
            place, shift = at + lane % (WIDTH // 2), np.uint8(4 * (lane // (WIDTH // 2)))
            for i in range(size):
                byte = w[g * size + i]
                panel[place + 2 * i * row] |= (byte & np.uint8(15)) << shift
                panel[place + (2 * i + 1) * row] |= (byte >> np.uint8(4)) << shift
        at += group * row
