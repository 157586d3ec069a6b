"""The quantised product's loops over rows and panels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray

from labkit.kernels.compiled import call_of, entry, inner, native_code
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
from labkit.kernels.views import floats, whole_numbers

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
        values = floats(x + 4 * m * x_row, k)
        for i in range(k):
            inputs[i * rows + m] = values[i]
        for g in range(k // group):
            total = np.float32(0)
            for i in range(g * group, (g + 1) * group):
                total += values[i]
            sums[g * rows + m] = total


def _product(form: int) -> Callable:
    """`product` for matrices of one form."""

    def product(x, x_row, rows, weights, matrix, expert, first, last, y, y_row):
        """y = x W^T for panels `first` to `last` (counted in sixteens of outputs) of one matrix.

        Args:
            x, x_row, rows: address of float32 rows, floats from row to row, how many.
            weights: address of the arena. matrix: address of the description in it, int64 [FIELDS]; its form must be
                `ready`.
            expert: which of the matrices.
            y, y_row: address of output 0 of the first row; as for x.
        """
        fields = whole_numbers(matrix, FIELDS)
        k, group, panel = fields[INPUTS], fields[GROUP], fields[PANEL]
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

    return product


_CODE = np.zeros(len(FORMS), np.int64)
"""Where the product of each form is, once it is `ready`: few models have more than two, and each takes seconds."""
binding.add_symbol("labkit_products", _CODE.ctypes.data)


@cache
def ready(form: int) -> Any:
    """Compile the product of a form, or take it from the cache; to be called before matrices of that form are met."""
    compiled = native_code(_product(int(form)))
    _CODE[form] = compiled.address
    return compiled


def _of_form(builder, kind, arguments):
    """The code for the matrix among a product's arguments."""
    table = ir.ArrayType(ir.IntType(64), len(FORMS))
    name = "labkit_products"
    place = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, table, name)
    field = builder.add(arguments[4], ir.Constant(ir.IntType(64), 8 * FORM))
    form = builder.load(builder.inttoptr(field, ir.IntType(64).as_pointer()))
    code = builder.load(builder.gep(place, [ir.Constant(ir.IntType(64), 0), form]))
    return builder.inttoptr(code, kind.as_pointer())


product = call_of(list(inspect.signature(_product(0)).parameters), _of_form)


@inner
def side_by_side(x, x_row, rows, weights, matrices, parts, y, y_row):
    """The products of several matrices with the same x, beside each other in y, which has room for whole panels.

    Args:
        matrices, parts: address of their descriptions, int64 [parts, FIELDS]. The others as for `product`.
    """
    column = 0
    for i in range(parts):
        matrix = matrices + 8 * FIELDS * i
        fields = whole_numbers(matrix, FIELDS)
        product(x, x_row, rows, weights, matrix, 0, 0, fields[OUTPUTS] // WIDTH, y + 4 * column, y_row)
        column += fields[ROWS]


@inner
def _float_at(data, at, size):
    """The float of so many bytes, the last its sign's."""
    bits = np.int32(0)
    for byte in range(size):
        bits |= np.int32(data[at + byte]) << np.int32(8 * (4 - size + byte))
    return float_of_bits(bits)


@entry
def take_rows(numbers, count, weights, matrix, rows):
    """Rows of a matrix, dequantised.

    Args (addresses): numbers: int64 [count], which. weights, matrix: as for `product`. rows: float32 [count, K].
    """
    fields, wanted = whole_numbers(matrix, FIELDS), whole_numbers(numbers, count)
    k, group, panel, form = fields[INPUTS], fields[GROUP], fields[PANEL], fields[FORM]
    bits, factor = BITS[form], FACTORS[form]
    header, step = 2 * WIDTH * factor, WIDTH * bits // 8
    for i in range(count):
        row, lane = floats(rows + 4 * i * k, k), wanted[i] % WIDTH
        data = carray(pointer(weights + fields[START] + wanted[i] // WIDTH * panel), (panel,), np.uint8)
        scale, bias, at = np.float32(1), np.float32(0), 0
        for begin in range(0, k, group):
            if factor:
                scale = _float_at(data, at + lane * factor, factor)
                bias = _float_at(data, at + (WIDTH + lane) * factor, factor)
            at += header
            for j in range(begin, begin + group):
                if bits == 4:
                    byte = data[at + lane % (WIDTH // 2)]
                    code = np.float32(byte & 15) if lane < WIDTH // 2 else np.float32(byte >> 4)
                elif bits == 8:
                    code = np.float32(data[at + lane])
                else:
                    code = _float_at(data, at + lane * bits // 8, bits // 8)
                row[j] = code * scale + bias
                at += step
