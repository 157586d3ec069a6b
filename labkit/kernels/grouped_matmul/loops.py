"""The experts' loops on a CPU: each expert's rows through its three matrices, then each token's sum."""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import inner, loop
from labkit.kernels.fused.loops import copy, fill, swiglu
from labkit.kernels.quantized_matmul.loops import product
from labkit.kernels.quantized_matmul.panels import OUTPUTS, WIDTH

ROWS = 96
"""Of one expert at a time."""


@inner
def expert_rows(x, weights, gate, up, down, expert, order, first, last, out):
    """down(silu(gate x) up x) for the rows of one expert.

    Args:
        x: [T, D]. weights: uint8, the arena. gate, up, down: int64 [FIELDS], matrices for each expert.
        order: int32, the token of each assignment; `first` to `last` are this expert's.
        out: [assignments, D padded].
    """
    width = gate[OUTPUTS]
    count = min(last - first, ROWS)
    rows, hidden = np.empty((count, x.shape[1]), np.float32), np.empty((count, 2 * width), np.float32)
    row, panels = 2 * width, width // WIDTH
    for begin in range(first, last, ROWS):
        count = min(last - begin, ROWS)
        for m in range(count):
            copy(x[order[begin + m]], rows[m])
        product(rows, x.shape[1], count, weights, gate, expert, 0, panels, hidden, row)
        product(rows, x.shape[1], count, weights, up, expert, 0, panels, hidden[:, width:], row)
        for m in range(count):
            swiglu(hidden[m, :width], hidden[m, width:])
        product(hidden, row, count, weights, down, expert, 0, down[OUTPUTS] // WIDTH, out[begin:], out.shape[1])


@loop
def experts(x, weights, gate, up, down, blocks, order, out, begin, end):
    """`expert_rows` for the blocks `begin` to `end`. blocks: int64 [n, 3], each an expert, its first and last row."""
    for i in range(begin, end):
        expert_rows(x, weights, gate, up, down, blocks[i, 0], order, blocks[i, 1], blocks[i, 2], out)


@loop
def combine(products, places, weights, x, begin, end):
    """x[t] += the sum of weights[t, k] products[places[t, k]] for tokens `begin` to `end`."""
    width = x.shape[1]
    total = np.empty(width, np.float32)
    for t in range(begin, end):
        fill(total, np.float32(0))
        for k in range(places.shape[1]):
            weight, row = weights[t, k], products[places[t, k]]
            for i in range(width):
                total[i] += weight * row[i]
        for i in range(width):
            x[t, i] += total[i]
