"""The chunked form: matrix products over 64 tokens at a time, and the state only between chunks.

Within a chunk the delta rule is a triangular system. With c the summed log decay, A_ij = beta_i exp(c_i - c_j) k_i . k_j below the
diagonal and T = (I + A)^-1 (the UT transform), the values that the tokens write are V' = T diag(beta) V - T diag(beta exp(c)) K S^T.
`prepare` finds both factors for all chunks at once; the scan over chunks then takes a few matrix products each.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.gated_delta import chunk_reference
from labkit.kernels.gated_delta.shapes import Shape, check_scan_inputs
from labkit.kernels.header import Header
from labkit.kernels.launch import Kernel

_HERE = Path(__file__).parent
FRAGMENTS = Header.from_file(_HERE / "fragments.h")

PREPARE_MMA = Kernel.from_file(
    _HERE / "chunk_prepare_mma.metal",
    ["q", "k", "v", "log_decay", "beta", "spans", "length"],
    ["w", "u", "p", "scales"],
    name="gated_delta_chunk_prepare_mma",
    header=FRAGMENTS,
    reference=chunk_reference.prepare_fragments,
)
SCAN_MMA = Kernel.from_file(
    _HERE / "chunk_scan_mma.metal",
    ["q", "k", "w", "u", "p", "scales", "state", "spans", "length"],
    ["y", "state_out"],
    name="gated_delta_chunk_scan_mma",
    header=FRAGMENTS,
    reference=chunk_reference.scan_fragments,
)


def prepare_mma_call(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, spans: mx.array, shape: Shape, chunk: int
) -> dict:
    """The arguments of `PREPARE_MMA`: chunks in the order of tensor-core fragments."""
    slots, heads = -(-shape.length // chunk), shape.batch * shape.hv
    return {
        "inputs": [q, k, v, log_decay, beta, spans, shape.length],
        "template": [("HK", shape.hk), ("HV", shape.hv), ("CHUNK", chunk)],
        "grid": (slots * chunk * 2, heads, 1),
        "threadgroup": (chunk * 2, 1, 1),
        "output_shapes": [
            (heads, slots, 8, chunk // 16, 32, 8),
            (heads, slots, 8, chunk // 8, 32, 4),
            (heads, slots, chunk // 16, chunk // 16, 32, 8),
            (heads, slots, 2, chunk),
        ],
        "output_dtypes": [mx.bfloat16, mx.float32, mx.bfloat16, mx.float32],
    }


def scan_mma_call(
    q: mx.array,
    k: mx.array,
    prepared: list[mx.array],
    state: mx.array,
    spans: mx.array,
    shape: Shape,
    chunk: int,
    simdgroups: int,
    split: bool,
) -> dict:
    """The arguments of `SCAN_MMA`."""
    return {
        "inputs": [q, k, *prepared, state, spans, shape.length],
        "template": [("HK", shape.hk), ("HV", shape.hv), ("CHUNK", chunk), ("SIMDGROUPS", simdgroups), ("SPLIT", split)],
        "grid": (8 * 32, shape.batch * shape.hv, 1),
        "threadgroup": (simdgroups * 32, 1, 1),
        "output_shapes": [(shape.batch, shape.length, shape.hv, shape.dv), state.shape],
        "output_dtypes": [q.dtype, mx.float32],
    }


def chunked_mma(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    spans: mx.array | None = None,
    *,
    chunk: int = 64,
    simdgroups: int = 4,
    split: bool = False,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """`chunked` by tensor-core fragments: bfloat16, heads of 128 x 128."""
    shape, spans = check_scan_inputs(q, k, v, log_decay, beta, state, spans)
    if (shape.dk, shape.dv) != (128, 128) or q.dtype != mx.bfloat16:
        raise ValueError(f"tensor-core fragments take bfloat16 heads of 128 x 128, not {q.dtype} of {shape.dk} x {shape.dv}")
    prepared = PREPARE_MMA(**prepare_mma_call(q, k, v, log_decay, beta, spans, shape, chunk), target=target)
    call = scan_mma_call(q, k, prepared, state, spans, shape, chunk, simdgroups, split)
    return tuple(SCAN_MMA(**call, target=target))
