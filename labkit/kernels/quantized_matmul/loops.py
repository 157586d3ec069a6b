"""The quantised product's loops over rows and panels."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import entry, inner, loop
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
)
from labkit.kernels.quantized_matmul.tiles import tile
from labkit.kernels.vectors import float_of_bits, pointer

BITS, FACTORS = np.array([form.bits for form in FORMS]), np.array([form.factor for form in FORMS])

BLOCK = 96
"""Rows whose inputs are laid out together, and stay in a core's cache for all panels."""

PANELS_BYTES = 128 << 10
"""Of panels that all these rows pass before the next panels are read: half of a small second-level cache."""


@inner
def _tile_rows(left):
    """Rows of the next tile where `left` rows are left."""
    if left == 6 or left > 8:
        return 6
    if left >= 4 and left != 5:
        return 4
    return min(left, 3)


@inner
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


@entry
def product(x, x_row, rows, weights, matrix, expert, first, last, y, y_row):
    """y = x W^T for panels `first` to `last` (counted in sixteens of outputs) of one matrix.

    Args:
        x, x_row, rows: address of float32 rows, floats from row to row, how many.
        weights: address of the arena. matrix: address of the description in it, int64 [FIELDS].
        expert: which of the matrices.
        y, y_row: address of output 0 of the first row; as for x.
    """
    fields = carray(pointer(matrix), (FIELDS,), np.int64)
    k, group, form, panel = fields[INPUTS], fields[GROUP], fields[FORM], fields[PANEL]
    groups, start = k // group, weights + fields[START] + expert * fields[MATRIX]
    together = max(1, PANELS_BYTES // panel)
    inputs, sums = np.empty(min(rows, BLOCK) * k, np.float32), np.empty(min(rows, BLOCK) * groups, np.float32)
    for begin in range(0, rows, BLOCK):
        count, m = min(rows - begin, BLOCK), 0
        while m < count:
            size = _tile_rows(count - m)
            _interleave(x + 4 * (begin + m) * x_row, x_row, size, k, group, inputs[m * k :], sums[m * groups :])
            m += size
        for part in range(first, last, together):
            end, m = min(part + together, last), 0
            while m < count:
                size = _tile_rows(count - m)
                at, s = inputs.ctypes.data + 4 * m * k, sums.ctypes.data + 4 * m * groups
                p, w, to = part, start + part * panel, y + 4 * ((begin + m) * y_row + WIDTH * part)
                while p < end:
                    # Enough chains of additions side by side to hide the latency of each.
                    wide = 1
                    if size == 1 and p + 4 <= end:
                        wide = 4
                        tile(1, 4, form, at, s, w, panel, groups, group, to, y_row)
                    elif size == 1:
                        tile(1, 1, form, at, s, w, panel, groups, group, to, y_row)
                    elif size == 2 and p + 2 <= end:
                        wide = 2
                        tile(2, 2, form, at, s, w, panel, groups, group, to, y_row)
                    elif size == 2:
                        tile(2, 1, form, at, s, w, panel, groups, group, to, y_row)
                    elif size == 3:
                        tile(3, 1, form, at, s, w, panel, groups, group, to, y_row)
                    elif size == 4:
                        tile(4, 1, form, at, s, w, panel, groups, group, to, y_row)
                    else:
                        tile(6, 1, form, at, s, w, panel, groups, group, to, y_row)
                    p, w, to = p + wide, w + wide * panel, to + 4 * WIDTH * wide
                m += size


@inner
def side_by_side(x, x_row, rows, weights, matrices, y, y_row):
    """The products of several matrices with the same x, beside each other in y, which has room for whole panels."""
    column = 0
    for i in range(matrices.shape[0]):
        matrix = matrices[i]
        product(x, x_row, rows, weights, matrix, 0, 0, matrix[OUTPUTS] // WIDTH, y[:, column:], y_row)
        column += matrix[ROWS]


@inner
def _float_at(data, at, size):
    bits = np.int32(0)
    for byte in range(size):
        bits |= np.int32(data[at + byte]) << np.int32(8 * (4 - size + byte))
    return float_of_bits(bits)


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
