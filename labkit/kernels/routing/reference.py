"""Routing in plain MLX ops: the oracles of its kernels, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from labkit.kernels.signature import Launch

LARGEST = 3.402823466e38


def choose_experts(launch: Launch) -> list[mx.array]:
    """Experts and weights of each token, and the counts of each block of tokens."""
    template = dict(launch.template)
    indices, weights = choose_slots(launch.inputs[:3], template)
    block = template["TOKENS"] * indices.shape[1]
    return [indices, weights, _block_counts(indices.reshape(-1), block, template["E"] + template["SHARED"])]


def choose_slots(inputs: Sequence[mx.array], template: dict) -> tuple[mx.array, mx.array]:
    """Experts and weights of each token, the shared expert's slots after the chosen ones; logits, bias and scale."""
    indices, weights = _choose(inputs, template)
    if shared := template["SHARED"]:
        further = mx.arange(template["E"], template["E"] + shared, dtype=mx.int32)
        gate = mx.sigmoid(inputs[0][:, template["E"], None].astype(mx.float32))
        indices = mx.concatenate([indices, mx.broadcast_to(further, (indices.shape[0], shared))], axis=1)
        weights = mx.concatenate([weights, mx.broadcast_to(gate, (indices.shape[0], shared))], axis=1)
    return indices, weights


def count_experts(launch: Launch) -> list[mx.array]:
    """How many assignments of each block chose each expert."""
    template = dict(launch.template)
    return [_block_counts(launch.inputs[0].reshape(-1), template["BLOCK"], template["E"])]


def group_rows(launch: Launch) -> list[mx.array]:
    """Stable grouping by expert. The counts, the kernel's second input, are not needed here."""
    indices, _, _, _, tile, max_blocks = launch.inputs
    return group(indices.reshape(-1), dict(launch.template)["E"], tile, max_blocks.item())


def route_few(launch: Launch) -> list[mx.array]:
    """Choice and grouping at once."""
    template = dict(launch.template)
    indices, weights = _choose(launch.inputs[:3], template)
    tile, max_blocks = launch.inputs[-2:]
    return [indices, weights, *group(indices.reshape(-1), template["E"], tile, max_blocks.item())]


def group(flat: mx.array, experts: int, tile: mx.array | int, max_blocks: int) -> list[mx.array]:
    """order, inverse, offsets, block_map of the flat expert numbers [N]."""
    size = flat.size
    # A key that no two assignments share makes any sort a stable one.
    order = mx.argsort(flat.astype(mx.int64) * size + mx.arange(size)).astype(mx.int32)
    inverse = mx.zeros((size,), mx.int32)
    inverse[order] = mx.arange(size, dtype=mx.int32)
    counts = _block_counts(flat, size, experts)[0]
    offsets = _edges(counts)
    edges = _edges((counts + tile - 1) // tile)
    number = mx.arange(max_blocks, dtype=mx.int32)
    expert = mx.minimum((edges[1:][None] <= number[:, None]).sum(axis=1), experts - 1).astype(mx.int32)
    row = offsets[expert] + (number - edges[expert]) * tile
    rows = mx.minimum(tile, offsets[expert + 1] - row)
    block_map = mx.stack([expert, row, rows, mx.zeros_like(row)], axis=1)
    return [order, inverse, offsets, mx.where((number < edges[-1])[:, None], block_map, 0)]


def ordered_bits(x: mx.array) -> mx.array:
    """uint32 whose order is that of the fp32 values."""
    bits = x.view(mx.uint32)
    # All ones less the bits is their complement, in an operation that MLX can also export.
    return mx.where(bits >> 31, mx.array(0xFFFFFFFF, dtype=mx.uint32) - bits, bits | 0x80000000)


def clean(x: mx.array) -> mx.array:
    """fp32 values with NaN as -inf, +inf as the largest number, and one zero, since bits would order two."""
    x = mx.where(mx.isnan(x), -mx.inf, mx.minimum(x, LARGEST))
    return mx.where(x == 0, 0.0, x)


def _choose(inputs: Sequence[mx.array], template: dict) -> tuple[mx.array, mx.array]:
    logits, bias, scale = inputs
    experts, k = template["E"], template["K"]
    logits = clean(logits.reshape(-1, logits.shape[-1])[:, :experts].astype(mx.float32))
    rank_by = scores = mx.sigmoid(logits) if template["SIGMOID"] else logits
    if template["BIASED"]:
        rank_by = clean(scores + bias.astype(mx.float32))
    # The lower expert wins among equals: it makes the key unique.
    keys = (ordered_bits(rank_by).astype(mx.int64) << 16) | mx.arange(experts - 1, -1, -1).astype(mx.int64)
    best = mx.argpartition(-keys, kth=k - 1, axis=-1)[:, :k]
    by_key = mx.argsort(-mx.take_along_axis(keys, best, axis=-1), axis=-1)
    indices = mx.take_along_axis(best, by_key, axis=-1)
    if not template["SIGMOID"]:
        scores = mx.exp(logits - mx.maximum(logits.max(axis=-1, keepdims=True), -LARGEST))
    weights = mx.take_along_axis(scores, indices, axis=-1)
    if template["RENORMALISE"]:
        weights = _shares(weights, weights)
    elif not template["SIGMOID"]:
        weights = _shares(weights, scores)
    return indices.astype(mx.int32), weights * scale


def _shares(part: mx.array, whole: mx.array) -> mx.array:
    total = whole.sum(axis=-1, keepdims=True)
    return mx.where(total > 0, part / mx.where(total > 0, total, 1), 0)


def _block_counts(flat: mx.array, block: int, experts: int) -> mx.array:
    blocks = -(-flat.size // block)
    cell = mx.arange(flat.size) // block * experts + flat.astype(mx.int32)
    counts = mx.zeros((blocks * experts,), mx.int32).at[cell].add(1)  # integers: the order of adding does not matter
    return counts.reshape(blocks, experts)


def _edges(counts: mx.array) -> mx.array:
    return mx.concatenate([mx.zeros((1,), mx.int32), mx.cumsum(counts).astype(mx.int32)])
