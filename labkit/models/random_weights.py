"""Random weights for a module of a real shape.

Values decide nothing about time, except where they route tokens. So codes are drawn directly (a full shape in bf16
would take four times the memory of its 4-bit codes), and the router's rows are drawn so that experts are chosen
evenly, or with a skew that is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

ROUTER = ("mlp.gate", "shared_expert_gate")
"""Matrices that decide the routing: quantised on their own terms."""


def draw_weights(module: Any, skew: float, seed: int) -> None:
    """Replace every parameter of mlx-lm's module by drawn values, and compute them, one layer's at a time.

    Args:
        skew: the spread of the logarithm of the lengths of the router's rows; 0 chooses experts evenly.
        seed: of everything drawn.
    """
    from mlx.nn import Module
    from mlx.utils import tree_flatten

    leaves = tree_flatten(module.leaf_modules(), is_leaf=lambda leaf: isinstance(leaf, Module))
    for number, (path, leaf) in enumerate(leaves):
        keys = mx.random.split(mx.random.key((seed << 20) + number), 4)
        values = _quantised(path, leaf, keys, skew) if "scales" in leaf else _plain(path, leaf, keys, skew)
        leaf.update(values)
        mx.eval(leaf.parameters())
    # What modules hold themselves, outside their leaves: decays and biases of the recurrence.
    for number, (_, owner) in enumerate(module.named_modules()):
        if "A_log" in owner:
            keys = mx.random.split(mx.random.key((seed << 20) + len(leaves) + number), 2)
            owner.A_log = mx.log(mx.random.uniform(1.0, 16.0, owner.A_log.shape, key=keys[0])).astype(owner.A_log.dtype)
            # Softplus of this bias is the step of Mamba's initialisation, log-uniform from 0.001 to 0.1.
            step = mx.exp(mx.random.uniform(math.log(1e-3), math.log(0.1), owner.dt_bias.shape, key=keys[1]))
            owner.dt_bias = (step + mx.log(-mx.expm1(-step))).astype(owner.dt_bias.dtype)
    mx.eval(module.parameters())


def _quantised(path: str, leaf: Any, keys: mx.array, skew: float) -> dict[str, mx.array]:
    """Codes drawn evenly; scales such that a row of the matrix has length `_gain`, and no code is preferred."""
    top = 2**leaf.bits - 1
    columns = leaf.scales.shape[-1] * leaf.group_size
    spread = math.sqrt((top * (top + 2)) / 12)  # of a number drawn evenly from 0..top
    scales = mx.random.uniform(0.75, 1.25, leaf.scales.shape, key=keys[1]) * (_gain(path) / (spread * columns**0.5))
    scales = (scales * _row_lengths(path, leaf.scales.shape[:-1], skew, keys[2])).astype(leaf.scales.dtype)
    # Splitting a key is MLX's way to plain random words.
    words = mx.random.split(keys[0], -(-leaf.weight.size // 2)).reshape(-1)
    codes = words[: leaf.weight.size].reshape(leaf.weight.shape)
    return {"weight": codes, "scales": scales, "biases": scales * (-top / 2)}


def _plain(path: str, leaf: Any, keys: mx.array, skew: float) -> dict[str, mx.array]:
    """Norms stay at one; matrices get rows of length `_gain`, biases nothing."""
    values = {}
    for name, array in leaf.parameters().items():
        if array.ndim < 2:
            values[name] = mx.ones(array.shape, array.dtype) if name == "weight" else mx.zeros_like(array)
            continue
        fan_in = math.prod(array.shape[1:]) if path.endswith("conv1d") else array.shape[-1]
        drawn = mx.random.normal(array.shape, array.dtype, scale=_gain(path) / fan_in**0.5, key=keys[0])
        values[name] = drawn * _row_lengths(path, array.shape[:-1], skew, keys[2]).astype(array.dtype)
    return values


def _gain(path: str) -> float:
    """The length of a matrix's rows. Embeddings are as large as what a layer adds, so that tokens stay different."""
    return math.sqrt(2048) if path.endswith("embed_tokens") else 1.0


def _row_lengths(path: str, rows: tuple[int, ...], skew: float, key: mx.array) -> mx.array:
    if not skew or not path.endswith(ROUTER[0]):
        return mx.ones((*rows, 1))
    return mx.exp(skew * mx.random.normal((*rows, 1), key=key))
