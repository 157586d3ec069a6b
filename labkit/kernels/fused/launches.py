"""The attention, DeltaNet and router chains: kernels, limits, and the arguments of their launches."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from labkit.kernels.fused import chains_reference as reference
from labkit.kernels.fused.residual import norm_dtype
from labkit.kernels.header import Header
from labkit.kernels.headers import SHARED, TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.placement import on_device

_HERE = Path(__file__).parent
_VALUES = Header.from_file(_HERE / "values.h")
HEADS = Header.from_file(_HERE / "values.h", _HERE / "heads.h")
ROUTER = SHARED.followed_by(TILES, Header.from_file(_HERE / "router.h"))
_THREADS = 256

QK_NORM_ROPE = Kernel.from_file(
    _HERE / "qk_norm_rope.metal",
    ["queries", "keys", "q_weight", "k_weight", "inverse_frequency", "positions", "eps", "N", "L"],
    ["q", "k"],
    header=HEADS,
    reference=reference.qk_norm_rope,
)
APPEND_HEADS = Kernel.from_file(
    _HERE / "append_heads.metal",
    [
        *("projected", "q_weight", "k_weight", "inverse_frequency", "positions"),
        *("tail_keys", "tail_values", "write", "eps"),
    ],
    ["q", "tail_keys_out", "tail_values_out"],
    header=HEADS,
    reference=reference.append_heads,
    in_place={"tail_keys": "tail_keys_out", "tail_values": "tail_values_out"},
)
OUTPUT_GATE = Kernel.from_file(
    _HERE / "output_gate.metal",
    ["attended", "q_gate", "N", "L"],
    ["out"],
    header=_VALUES,
    reference=reference.output_gate,
)
GATED_RMS_NORM = Kernel.from_file(
    _HERE / "gated_rms_norm.metal",
    ["x", "z", "weight", "eps", "N", "WIDTH", "START"],
    ["out"],
    header=_VALUES,
    reference=reference.gated_rms_norm,
)
NORM_ROUTER = Kernel.from_file(
    _HERE / "norm_router.metal",
    ["x", "residual", "weight", "router", "scales", "biases", "eps", "E"],
    ["hidden", "normed", "logits"],
    header=ROUTER,
    reference=reference.norm_router,
)

MAX_ROUTED_ROWS = 8
"""Up to so many rows `norm_router` is one launch; more rows reuse the router's weights, which a matmul does better."""
MAX_ROUTED_DIM = 7 * 1024
"""The normalised row takes 28 of the 32 KB of threadgroup memory."""


def qk_norm_rope_call(
    queries: mx.array,
    keys: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,
    eps: float,
    rotary: int,
    base: float = 10000.0,
    inverse_frequency: mx.array | None = None,
    vector: int | None = None,
) -> dict:
    """The arguments of `QK_NORM_ROPE`. Raises ValueError for what does not fit."""
    if keys.ndim != 4 or queries.ndim != 4 or queries.shape[:2] != keys.shape[:2] or queries.dtype != keys.dtype:
        raise ValueError(
            f"queries [B, L, Hq, D or 2 D] and keys [B, L, Hk, D] of one dtype are needed, not {queries.shape} "
            f"{queries.dtype} and {keys.shape} {keys.dtype}"
        )
    (rows, length, query_heads, width), (key_heads, dim) = queries.shape, keys.shape[2:]
    if width not in (dim, 2 * dim):
        raise ValueError(f"queries are {dim} or {2 * dim} wide for keys {dim} wide, not {width}")
    if q_weight.shape != (dim,) or k_weight.shape != (dim,):
        raise ValueError(f"norm weights need shape ({dim},), not {q_weight.shape} and {k_weight.shape}")
    if positions.shape not in ((rows,), (rows, length)):
        raise ValueError(f"positions need shape ({rows},) or ({rows}, {length}), not {positions.shape}")
    if not 0 <= rotary <= dim or rotary % 2:
        raise ValueError(f"rotary must be even and at most {dim}, not {rotary}")
    frequency = frequencies(rotary, base) if inverse_frequency is None else inverse_frequency
    if frequency.shape != (max(rotary // 2, 1),):
        raise ValueError(f"inverse_frequency needs shape ({rotary // 2},), not {frequency.shape}")
    return {
        "inputs": [queries, keys, q_weight, k_weight, frequency, positions, float(eps), rows * length, length],
        "template": [
            ("T", queries.dtype),
            ("D", dim),
            ("HQ", query_heads),
            ("HK", key_heads),
            ("ROTARY", rotary),
            ("GATED", width != dim),
            ("PER_TOKEN", positions.ndim == 2),
            ("VEC", _vector(dim) if vector is None else vector),
            ("THREADS", _THREADS),
        ],
        **_simdgroups(rows * length * (query_heads + key_heads)),
        "output_shapes": [(rows, query_heads, length, dim), (rows, key_heads, length, dim)],
        "output_dtypes": [queries.dtype] * 2,
    }


def append_heads_call(
    projected: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,
    tail_keys: mx.array,
    tail_values: mx.array,
    write: mx.array,
    eps: float,
    rotary: int,
    base: float = 10000.0,
) -> dict:
    """The arguments of `APPEND_HEADS`. Raises ValueError for what does not fit."""
    tails = tail_keys.ndim == 4 and tail_keys.size and tail_keys.shape == tail_values.shape
    if projected.ndim not in (2, 3) or not tails:
        raise ValueError(
            f"projected [B, L, W] or [B * L, W] and tails [B, Hk, C, D] are needed, not {projected.shape}, "
            f"{tail_keys.shape} and {tail_values.shape}"
        )
    rows, key_heads, columns, dim = tail_keys.shape
    *tokens, width = projected.shape
    length = prod(tokens) // rows
    heads, rest = divmod(width - 2 * key_heads * dim, 2 * dim)
    by_rows = tokens in ([rows, length], [rows * length])
    if not by_rows or rest or heads < 1 or not 0 < length <= columns or width % 4 or dim % 4:
        raise ValueError(
            f"projected {projected.shape} holds no queries with gates, keys and values for tails {tail_keys.shape}"
        )
    if projected.dtype != tail_keys.dtype or projected.dtype != tail_values.dtype:
        raise ValueError(f"projected and tails need one dtype, not {projected.dtype} and {tail_keys.dtype}")
    if q_weight.shape != (dim,) or k_weight.shape != (dim,):
        raise ValueError(f"norm weights need shape ({dim},), not {q_weight.shape} and {k_weight.shape}")
    each = write.ndim == 2
    if positions.shape != (rows,) or write.dtype != mx.int32 or (write.shape != (rows, 1) if each else write.ndim != 1):
        raise ValueError(
            f"positions [{rows}] and write [1 or more] or [{rows}, 1] int32 are needed, not {positions.shape}, {write}"
        )
    if not 0 <= rotary <= dim or rotary % 2:
        raise ValueError(f"rotary must be even and at most {dim}, not {rotary}")
    frequency = frequencies(rotary, base)
    tasks = heads * length + key_heads * columns
    return {
        "inputs": [projected, q_weight, k_weight, frequency, positions, tail_keys, tail_values, write, float(eps)],
        "template": [
            *(("T", projected.dtype), ("D", dim), ("HQ", heads), ("HK", key_heads), ("L", length), ("C", columns)),
            *(("ROTARY", rotary), ("PITCH", width), ("VEC", 4), ("THREADS", _THREADS), ("WRITES", int(each))),
        ],
        "grid": (-(-tasks // (_THREADS // 32)) * _THREADS, rows, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [(rows * length, heads, dim), tail_keys.shape, tail_values.shape],
        "output_dtypes": [projected.dtype] * 3,
    }


def output_gate_call(attended: mx.array, q_gate: mx.array, vector: int | None = None) -> dict:
    """The arguments of `OUTPUT_GATE`. Raises ValueError for what does not fit."""
    if attended.ndim != 4 or attended.size == 0 or attended.dtype != q_gate.dtype:
        raise ValueError(f"attended [B, H, L, D] of q_gate's dtype is needed, not {attended.shape} {attended.dtype}")
    rows, heads, length, dim = attended.shape
    if q_gate.shape != (rows, length, heads, 2 * dim):
        raise ValueError(f"q_gate needs shape {(rows, length, heads, 2 * dim)}, not {q_gate.shape}")
    return {
        "inputs": [attended, q_gate, rows * length, length],
        "template": [
            ("T", attended.dtype),
            ("D", dim),
            ("H", heads),
            ("VEC", _vector(dim) if vector is None else vector),
            ("THREADS", _THREADS),
        ],
        **_simdgroups(rows * length * heads),
        "output_shapes": [(rows, length, heads * dim)],
        "output_dtypes": [attended.dtype],
    }


def gated_rms_norm_call(
    x: mx.array, z: mx.array, weight: mx.array, eps: float, start: int = 0, vector: int | None = None
) -> dict:
    """The arguments of `GATED_RMS_NORM`. Raises ValueError for what does not fit."""
    if x.ndim < 2 or x.size == 0 or z.dtype != x.dtype:
        raise ValueError(f"x [..., H, D] of z's dtype is needed, not {x.shape} {x.dtype} with z {z.dtype}")
    heads, dim = x.shape[-2:]
    width = heads * dim if z.shape == x.shape else z.shape[-1]
    if z.shape not in (x.shape, (*x.shape[:-2], width)) or not 0 <= start <= width - heads * dim:
        raise ValueError(f"z needs x's shape {x.shape}, or {heads * dim} columns from {start} on; it has {z.shape}")
    if weight.shape != (dim,):
        raise ValueError(f"weight needs shape ({dim},), not {weight.shape}")
    return {
        "inputs": [x, z, weight, float(eps), x.size // dim, width, start],
        "template": [
            ("T", x.dtype),
            ("D", dim),
            ("H", heads),
            ("VEC", _vector(dim, width, start) if vector is None else vector),
            ("THREADS", _THREADS),
        ],
        **_simdgroups(x.size // dim),
        "output_shapes": [x.shape],
        "output_dtypes": [x.dtype],
    }


def norm_router_call(
    x: mx.array,
    residual: mx.array,
    weight: mx.array,
    router: tuple[mx.array, mx.array, mx.array],
    eps: float,
    group_size: int,
    bits: int,
    threads: int = _THREADS,
) -> dict:
    """The arguments of `NORM_ROUTER`. Raises ValueError for what does not fit."""
    norm_dtype(x, residual, weight)
    if x.ndim != 2 or x.size == 0:
        raise ValueError(f"x and residual need shape [T, D], not {x.shape}")
    rows, dim = x.shape
    packed, scales, biases = router
    experts = packed.shape[0]
    if bits not in (4, 8) or group_size not in (32, 64, 128) or dim % group_size:
        raise ValueError(f"4 or 8 bits in groups of 32, 64 or 128 that divide D = {dim}, not {bits} and {group_size}")
    if dim > MAX_ROUTED_DIM or weight.shape != (dim,):
        raise ValueError(f"weight needs shape ({dim},) with at most {MAX_ROUTED_DIM} values, not {weight.shape}")
    shapes = (packed.shape, scales.shape, biases.shape)
    if shapes != ((experts, dim * bits // 32), (experts, dim // group_size), (experts, dim // group_size)):
        raise ValueError(
            f"router of {bits} bits in groups of {group_size} does not fit D = {dim}: it has shapes {shapes}"
        )
    return {
        "inputs": [x, residual, weight, packed, scales, biases, float(eps), experts],
        "template": [("T", x.dtype), ("D", dim), ("BITS", bits), ("GROUP", group_size), ("THREADS", threads)],
        "grid": (-(-experts // (threads // 32)) * threads, rows, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [x.shape, x.shape, (rows, experts)],
        "output_dtypes": [residual.dtype, x.dtype, mx.float32],
    }


def _simdgroups(count: int) -> dict:
    groups = -(-count // (_THREADS // 32))
    return {"grid": (groups * _THREADS, 1, 1), "threadgroup": (_THREADS, 1, 1)}


def _vector(*sizes: int) -> int:
    # 4-vectors need rows that begin on multiples of four.
    return 1 if any(size % 4 for size in sizes) else 4


@lru_cache
def frequencies(rotary: int, base: float) -> mx.array:
    # In float64, so that an angle at position 100,000 is as good as fp32 can say it.
    exponent = np.arange(0, max(rotary, 2), 2, dtype=np.float64) / max(rotary, 1)
    return on_device(mx.array((base**-exponent).astype(np.float32)))
