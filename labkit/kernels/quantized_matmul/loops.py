"""The quantised product's loops over rows and panels."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import loop
from labkit.kernels.quantized_matmul import panels
from labkit.kernels.quantized_matmul.panels import FORM, FORMS, GROUP, INPUTS, MATRIX, OUTPUTS, PANEL, START, WIDTH
from labkit.kernels.quantized_matmul.tiles import tile
from labkit.kernels.vectors import float_of_bits, pointer

BITS, FACTORS = np.array([form.bits for form in FORMS]), np.array([form.factor for form in FORMS])

ROWS = 96
"""Rows whose inputs are laid out together, and stay in a core's cache for all panels."""

PANELS_BYTES = 128 << 10
"""Of panels that all these rows pass before the next panels are read: half of a small second-level cache."""


@loop
def product(x, x_row, rows, weights, matrix, expert, first, last, y, y_row):
    """y = x W^T for panels `first` to `last` (counted in sixteens of outputs) of one matrix.

    Args:
        x, x_row, rows: address of float32 rows, floats from row to row, how many.
        weights: uint8, the arena. matrix: int64 [FIELDS], where in it. expert: which of the matrices.
        y, y_row: address of output 0 of the first row; as for x.
    """
    k, group, panel = matrix[INPUTS], matrix[GROUP], matrix[PANEL]
    start = weights.ctypes.data + matrix[START] + expert * matrix[MATRIX]
    together = max(1, PANELS_BYTES // panel)
    block = min(rows, ROWS)
    inputs, sums = np.empty(block * k, np.float32), np.empty(block * (k // group), np.float32)
    for begin in range(0, rows, ROWS):
        count = min(rows - begin, ROWS)
        m = 0
        while m < count:
            size = tile_rows(count - m)
            _interleave(x + 4 * (begin + m) * x_row, x_row, size, k, group, inputs[m * k :], sums[m * (k // group) :])
            m += size
        for p in range(first, last, together):
            end = min(p + together, last)
            _tiles(inputs, sums, count, start, matrix, p, end, y + 4 * (begin * y_row + WIDTH * p), y_row)


@loop
def side_by_side(x, x_row, rows, weights, matrices, y, y_row):
    """The products of several matrices with the same x, beside each other in y, which has room for whole panels."""
    for i in range(matrices.shape[0]):
        matrix = matrices[i]
        product(x, x_row, rows, weights, matrix, 0, 0, matrix[OUTPUTS] // WIDTH, y, y_row)
        y += 4 * matrix[panels.ROWS]


@loop
def tile_rows(left):
    """Rows of the next tile where `left` rows are left."""
    if left == 6 or left > 8:
        return 6
    if left >= 4 and left != 5:
        return 4
    return min(left, 3)


@loop
def _interleave(x, x_row, rows, k, group, inputs, sums):
    """inputs [k, rows] and their sums over each group [k / group, rows], of `rows` rows at address x."""
    for m in range(rows):
        values = carray(pointer(x + 4 * m * x_row), (k,), np.float32)
        for i in range(k):
            inputs[i * rows + m] = values[i]
        for g in range(k // group):
            total = np.float32(0)
            for i in range(g * group, (g + 1) * group):
                total += values[i]
            sums[g * rows + m] = total


@loop
def _tiles(inputs, sums, rows, start, matrix, first, last, y, y_row):
    form, k, group, panel = matrix[FORM], matrix[INPUTS], matrix[GROUP], matrix[PANEL]
    groups = k // group
    m = 0
    while m < rows:
        size = tile_rows(rows - m)
        x, s = inputs.ctypes.data + 4 * m * k, sums.ctypes.data + 4 * m * groups
        at, p = y + 4 * m * y_row, first
        # Enough chains of additions side by side to hide the latency of each: rows times panels is at least 3.
        while size == 1 and p + 4 <= last:
            tile(1, 4, form, x, s, start + p * panel, panel, groups, group, at, y_row)
            p, at = p + 4, at + 16 * WIDTH
        while size == 2 and p + 2 <= last:
            tile(2, 2, form, x, s, start + p * panel, panel, groups, group, at, y_row)
            p, at = p + 2, at + 8 * WIDTH
        while p < last:
            w = start + p * panel
            if size == 6:
                tile(6, 1, form, x, s, w, panel, groups, group, at, y_row)
            elif size == 4:
                tile(4, 1, form, x, s, w, panel, groups, group, at, y_row)
            elif size == 3:
                tile(3, 1, form, x, s, w, panel, groups, group, at, y_row)
            elif size == 2:
                tile(2, 1, form, x, s, w, panel, groups, group, at, y_row)
            else:
                tile(1, 1, form, x, s, w, panel, groups, group, at, y_row)
            p, at = p + 1, at + 4 * WIDTH
        m += size


@loop
def take_rows(numbers, weights, matrix, rows):
    """rows[i] = row numbers[i] of a matrix, dequantised. rows: [n, K]."""
    k, group, panel, form = matrix[INPUTS], matrix[GROUP], matrix[PANEL], matrix[FORM]
    bits, factor = BITS[form], FACTORS[form]
    header, step = 2 * WIDTH * factor, WIDTH * bits // 8
    for i in range(numbers.size):
        at, lane = matrix[START] + numbers[i] // WIDTH * panel, numbers[i] % WIDTH
        for g in range(k // group):
            codes = at + header
            scale, bias = np.float32(1), np.float32(0)
            if factor:
                scale = _float_at(weights, at + lane * factor, factor)
                bias = _float_at(weights, at + (WIDTH + lane) * factor, factor)
            for j in range(group):
                if bits == 4:
                    byte = weights[codes + j * step + lane % (WIDTH // 2)]
                    code = np.float32(byte & 15) if lane < WIDTH // 2 else np.float32(byte >> 4)
                elif bits == 8:
                    code = np.float32(weights[codes + j * step + lane])
                else:
                    code = _float_at(weights, codes + j * step + lane * bits // 8, bits // 8)
                rows[i, g * group + j] = code * scale + bias
            at += header + group * step


@loop
def _float_at(data, at, size):
    bits = np.int32(0)
    for byte in range(size):
        bits |= np.int32(data[at + byte]) << np.int32(8 * (4 - size + byte))
    return float_of_bits(bits)
