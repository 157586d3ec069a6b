"""The experts' loops on a CPU: each expert's rows through its three matrices, then each token's sum."""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import inner
from labkit.kernels.fused.loops import copy, fill, swiglu
from labkit.kernels.quantized_matmul.loops import product
from labkit.kernels.quantized_matmul.panels import FIELDS, OUTPUTS, WIDTH
from labkit.kernels.views import floats, whole_numbers

ROWS = 96
"""Of one expert at a time."""


@inner
def mlp(x, x_row, rows, weights, gate, up, down, expert, hidden, out, out_row):
    """out = down(silu(gate x) up x) for some rows.

    Args (addresses, but for sizes and the number of the expert):
        x, x_row, rows: float32 rows, floats from row to row, how many. weights: the arena.
        gate, up, down: int64 [FIELDS], matrices of one or several experts.
        hidden: float32 [rows 2 outputs of gate], an array, as room. out, out_row: as for x, whole panels wide.
    """
    wide, room = whole_numbers(gate, FIELDS)[OUTPUTS], hidden.ctypes.data
    panels, last = wide // WIDTH, whole_numbers(down, FIELDS)[OUTPUTS] // WIDTH
    product(x, x_row, rows, weights, gate, expert, 0, panels, room, 2 * wide)
    product(x, x_row, rows, weights, up, expert, 0, panels, room + 4 * wide, 2 * wide)
    for m in range(rows):
        at = room + 8 * m * wide
        swiglu(floats(at, wide), floats(at + 4 * wide, wide))
    product(room, 2 * wide, rows, weights, down, expert, 0, last, out, out_row)


@inner
def experts(x, width, weights, gate, up, down, blocks, order, out, out_row, begin, end):
    """`mlp` for the blocks `begin` to `end`, each some rows of one expert.

    Args (besides those of `mlp`):
        x: address of [T, width]. blocks: of int64 [n, 3], each an expert, its first and last row.
        order: of int64 [assignments], the token of each. out: of [assignments, out_row].
    """
    most = 1  # room for no more than there is: a step that asked for pages anew each time would wait for them
    for i in range(begin, end):
        block = whole_numbers(blocks + 24 * i, 3)
        most = max(most, min(block[2] - block[1], ROWS))
    rows = np.empty(most * width, np.float32)
    hidden = np.empty(most * 2 * whole_numbers(gate, FIELDS)[OUTPUTS], np.float32)
    for i in range(begin, end):
        block = whole_numbers(blocks + 24 * i, 3)
        for first in range(block[1], block[2], ROWS):
            count = min(block[2] - first, ROWS)
            tokens = whole_numbers(order + 8 * first, count)
            for m in range(count):
                copy(floats(x + 4 * tokens[m] * width, width), floats(rows.ctypes.data + 4 * m * width, width))
            to = out + 4 * first * out_row
            mlp(rows.ctypes.data, width, count, weights, gate, up, down, block[0], hidden, to, out_row)


@inner
def combine(products, row, places, weights, x):
    """x += the sum of weights[k] products[places[k]], for one token.

    Args:
        products, row: address of float32 rows, floats from row to row. places: int64 [K]. weights: float32. x: [D].
    """
    total = np.empty(x.size, np.float32)
    fill(total, np.float32(0))
    for k in range(places.size):
        weight, part = weights[k], floats(products + 4 * row * places[k], x.size)
        for i in range(x.size):
            total[i] += weight * part[i]
    for i in range(x.size):
        x[i] += total[i]
