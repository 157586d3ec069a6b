"""What a forward in compiled loops holds besides weights and caches: one room for all layers, and a task's own arrays.

Unlike MLX's graph it writes no scores of attention and keeps no layer's outputs, so its memory grows with the tokens
of a call and hardly with those before them; these count where a buffer that grows is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.caches import Contiguous, Layout
from labkit.kernels.attention.loops import EVERY, KEYS, QUERIES
from labkit.kernels.grouped_matmul.loops import ROWS
from labkit.kernels.quantized_matmul.panels import INPUTS, OUTPUTS
from labkit.models.hybrid.config import ATTENTION, HybridConfig
from labkit.models.hybrid.native.forward import BLOCK, TOGETHER
from labkit.models.hybrid.native.weights import Dense, Experts, NativeLayer

FLOAT, WHOLE = 4, 8
TOKEN_NUMBERS = 6
"""Whole numbers of a token that no layer asks for: its id as given and as read, row, column, position, angle's."""
BLOCK_BYTES = 512
"""Of a block of queries, first as Python's numbers."""
MARGIN = 16
"""One in so many bytes more: whole pages, and what Python and the allocators keep beside arrays."""
SMALL = 64 << 10
"""Of a task's smallest arrays (a head's tokens in a scan, one row of an expert), and of records."""


def temporary_bytes(
    sizes: HybridConfig,
    layers: Sequence[NativeLayer],
    layouts: Sequence[Layout],
    head_outputs: int,
    *,
    length: int,
    context: int,
    batch: int,
    positions: int,
    threads: int,
) -> int:
    """The most bytes that one forward holds at a time. Monotone in every size.

    Args:
        head_outputs: of the vocabulary's matrix, whole panels.
        length: tokens of a row. context: tokens before them. batch: rows. positions: of a row, whose logits are wanted.
        threads: that share a forward of many tokens.
    """
    tokens, parts = batch * length, min(threads, batch)
    # Threads have rows of their own, or blocks of all tokens once these are many; padding may keep it at rows.
    block = -(-batch // parts) * (length if threads == 1 else min(length, TOGETHER))
    if threads > 1 and length >= TOGETHER:
        parts, block = threads, max(block, min(tokens, BLOCK))
    stream = tokens * (FLOAT * sizes.hidden + WHOLE * TOKEN_NUMBERS)
    task = max(_task(sizes, layer, block, min(length, QUERIES)) for layer in layers) + SMALL
    scored, copies = batch * positions, 2 + (head_outputs != sizes.vocabulary)
    head = scored * FLOAT * (sizes.hidden + copies * head_outputs) + parts * _product(scored, sizes.hidden)
    working = _room(sizes, layers, tokens, block, parts) + task * parts + head
    working += BLOCK_BYTES * batch * -(-length // QUERIES) * sizes.kv_heads
    most = stream + max(working, max(_moving(layout, context, batch) for layout in layouts))
    return most + most // MARGIN


def _room(sizes: HybridConfig, layers: Sequence[NativeLayer], tokens: int, block: int, parts: int) -> int:
    """Of `Forward`, for all tokens and the widest layer."""
    heads = sizes.query_heads * sizes.head_dim if ATTENTION in sizes.layer_kinds else 0
    columns, mixed = max(layer.mixer.columns for layer in layers), max(heads, sizes.delta_width)
    floats, whole, fixed = sizes.hidden + columns + mixed + 3 * sizes.rotary // 2, 0, 0
    if isinstance(mlp := layers[0].mlp, Experts):
        taken = sizes.top_k + mlp.slots
        floats += taken + 1 + taken * int(mlp.routed.down[OUTPUTS])
        whole, fixed = 3 * taken, 3 * (parts * (sizes.experts + mlp.slots) + tokens * taken // block)
    return tokens * (FLOAT * floats + WHOLE * whole) + WHOLE * fixed


def _task(sizes: HybridConfig, layer: NativeLayer, block: int, queries: int) -> int:
    """The widest stage of a layer for a block of tokens."""
    mixer, mlp = layer.mixer, layer.mlp
    entering = _product(block, sizes.hidden)
    leaving = block * FLOAT * int(mixer.output[OUTPUTS]) + _product(block, int(mixer.output[INPUTS]))
    group = sizes.query_heads // max(1, sizes.kv_heads)
    attending = FLOAT * group * queries * (2 * sizes.head_dim + 2) + FLOAT * (2 * EVERY + 1) * KEYS
    every, routing, routed = mlp, 0, 0
    if isinstance(mlp, Experts):
        routing = block * FLOAT * int(mlp.router[:, OUTPUTS].sum()) + entering
        rows = min(block, ROWS)
        routed, every = FLOAT * rows * sizes.hidden + _mlp(mlp.routed, rows, sizes.hidden), mlp.shared
    dense = _mlp(every, block, sizes.hidden) + block * FLOAT * int(every.down[OUTPUTS]) if every else 0
    return max(entering, leaving, attending, routing, routed, dense)


def _mlp(mlp: Dense, rows: int, hidden: int) -> int:
    """Gate and up of some rows, and the product's inputs beside them."""
    wide = int(mlp.gate[OUTPUTS])
    return rows * FLOAT * 2 * wide + _product(rows, max(hidden, wide))


def _product(rows: int, inputs: int) -> int:
    """A product's inputs as laid out, with a sum for each group of at least 32."""
    return FLOAT * min(rows, BLOCK) * (inputs + inputs // 32 + 1)


def _moving(layout: Layout, context: int, batch: int) -> int:
    """A layer's old arrays while new ones are filled; and of several rows, one that moves to the right."""
    if layout.kind == "recurrent":
        return batch * layout.bytes_fixed if context else 0
    old = Contiguous.bytes_of(layout, context)
    return batch * old + (old // 2 if batch > 1 else 0)
