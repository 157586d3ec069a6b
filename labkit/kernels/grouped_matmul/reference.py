"""The experts' products in plain MLX ops: the oracles of their kernels."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.quantized_matmul.reference import packed_of
from labkit.kernels.routing.reference import choose_slots
from labkit.kernels.signature import Launch


def expert_products(rows: mx.array, experts: mx.array, weights: Packed) -> mx.array:
    """[A, N] fp32: row a of `rows` [A, K] by the weights of expert experts[a]."""
    matrices = weights.dequantize().reshape(weights.experts, weights.n, weights.k)
    return (matrices[experts] @ rows.astype(mx.float32)[:, :, None])[:, :, 0]


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up."""
    return gate * mx.sigmoid(gate) * up


def expert_gate_up(launch: Launch) -> list[mx.array]:
    """Rows in sorted order."""
    x, order, block_map = launch.inputs[0], *launch.inputs[7:9]
    rows = x[order // dict(launch.template)["TOPK"]]
    experts = experts_of_rows(block_map, order.size)
    return [swiglu(*(expert_products(rows, experts, packed_of(launch, first)) for first in (1, 4)))]


def expert_down(launch: Launch) -> list[mx.array]:
    """Rows by assignment, weighed."""
    hidden, order, block_map, weights = launch.inputs[0], *launch.inputs[4:7]
    products = expert_products(hidden, experts_of_rows(block_map, order.size), packed_of(launch, 1))
    return [(products * weights.reshape(-1)[order].astype(mx.float32)[:, None])[mx.argsort(order)]]


def combine_experts(launch: Launch) -> list[mx.array]:
    """Sums of each token's products, and the shared expert."""
    products, shared, factor = (array.astype(mx.float32) for array in launch.inputs[:3])
    total = products.sum(axis=1)
    return [total + factor.reshape(-1, 1) * shared if dict(launch.template)["SHARED"] else total]


def decode_gate_up(launch: Launch) -> list[mx.array]:
    """Rows by assignment."""
    x, indices = launch.inputs[0], launch.inputs[7].reshape(-1)
    rows = mx.repeat(x, dict(launch.template)["TOPK"], axis=0)
    return [swiglu(*(expert_products(rows, indices, packed_of(launch, first)) for first in (1, 4)))]


def choose_gate_up(launch: Launch) -> list[mx.array]:
    """Rows by assignment, experts, and their weights."""
    x, logits, template = launch.inputs[0], launch.inputs[7], dict(launch.template)
    choice = {**template, "K": template["TOPK"], "SIGMOID": False, "BIASED": False}
    indices, weights = choose_slots((logits, logits, mx.array(1.0)), choice)
    rows, flat = mx.repeat(x, indices.shape[1], axis=0), indices.reshape(-1)
    hidden = swiglu(*(expert_products(rows, flat, packed_of(launch, first)) for first in (1, 4)))
    return [hidden, indices, weights]


def decode_down(launch: Launch) -> list[mx.array]:
    """Sums of each token's weighed products, and the shared expert."""
    hidden, indices, weights, shared, factor = launch.inputs[0], *launch.inputs[4:]
    products = expert_products(hidden, indices.reshape(-1), packed_of(launch, 1))
    products = products * weights.reshape(-1, 1).astype(mx.float32)
    total = products.reshape(*indices.shape, -1).sum(axis=1)
    if dict(launch.template)["SHARED"]:
        total = total + factor.reshape(-1, 1).astype(mx.float32) * shared.astype(mx.float32)
    return [total]


def experts_of_rows(block_map: mx.array, rows: int) -> mx.array:
    """[rows] int32: the expert of each sorted row, read from a block map."""
    experts = [0] * rows
    for expert, start, count, _ in block_map.tolist():
        experts[start : start + count] = [expert] * count
    return mx.array(experts, dtype=mx.int32)
