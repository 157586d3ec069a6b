"""The quantised product's loops on weights in MLX's own layout: few rows as they lie, many through panels."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import entry, inner, loop
from labkit.kernels.fused.loops import copy
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
from labkit.kernels.quantized_matmul.tiles import packed_tile
from labkit.kernels.vectors import pointer
from labkit.kernels.views import floats

FOUR, EIGHT = FORMS.index(Form(4, 4)), FORMS.index(Form(8, 4))


TOGETHER = 128
"""Outputs whose weights stay in the second-level cache while all rows meet them."""


@entry
def packed_rows(w, w_row, scales, biases, factors, x, sums, rows, bits, k, group, count, y, y_row):
    """`count` outputs of some rows; arguments as for `packed_tile`."""
    groups = k // group
    for begin in range(0, count, TOGETHER):
        last = begin + TOGETHER if begin + TOGETHER < count else count
        m = 0
        while m < rows:
            # Four chains of additions side by side, for two halves of a byte, hide the latency of each.
            tall = 2 if rows - m >= 2 else 1
            n = begin
            while n < last:
                wide = 4 // tall if n + 4 // tall <= last else 1
                skip = 4 * n * factors
                ws, ss, bs = w + n * w_row, scales + skip, biases + skip
                for i in range(m, m + tall, tall if wide * tall == 4 else 1):
                    at, s, to = x + 4 * i * k, sums + 4 * i * groups, y + 4 * (i * y_row + n)
                    if wide * tall < 4 and bits == 4:
                        packed_tile(1, 1, 4, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                    elif wide * tall < 4:
                        packed_tile(1, 1, 8, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                    elif tall == 2 and bits == 4:
                        packed_tile(2, 2, 4, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                    elif tall == 2:
                        packed_tile(2, 2, 8, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                    elif bits == 4:
                        packed_tile(1, 4, 4, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                    else:
                        packed_tile(1, 4, 8, ws, w_row, ss, bs, factors, at, s, k, group, to, y_row)
                n += wide
            m += tall


@entry
def rows_by_packed(w, scales, biases, x, rows, bits, k, group, y, n, begin, end):
    """Outputs `begin` to `end` of y [rows, n].

    Args (addresses, but for sizes):
        w: bytes [n, k bits / 8]. scales, biases: float32 [n, groups]. x: float32 [rows, k].
    """
    groups, w_row = k // group, k * bits // 8
    inputs, sums = np.empty(rows * k, np.float32), np.empty(rows * groups, np.float32)
    for m in range(rows):
        values = floats(x + 4 * m * k, k)
        for g in range(groups):
            total = np.float32(0)
            for i in range(g * group, (g + 1) * group):
                total += values[i]
            sums[m * groups + g] = total
        if bits == 4:  # a byte holds one weight of an even and one of an odd place
            for i in range(k // 2):
                inputs[m * k + i], inputs[m * k + k // 2 + i] = values[2 * i], values[2 * i + 1]
        else:
            copy(values, inputs[m * k : (m + 1) * k])
    packed_rows(
        w + begin * w_row, w_row, scales + 4 * begin * groups, biases + 4 * begin * groups, groups, inputs, sums, rows,
        bits, k, group, end - begin, y + 4 * begin, n,
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
