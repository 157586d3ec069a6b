"""The chunked form: matrix products over 64 tokens at a time, and the state only between chunks.

Within a chunk the delta rule is a triangular system. With c the summed log decay, A_ij = beta_i exp(c_i - c_j) k_i.k_j
below the diagonal and T = (I + A)^-1 (the UT transform), the values that the tokens write are
V' = T diag(beta) V - T diag(beta exp(c)) K S^T. `PREPARE` finds both factors for all chunks at once; the scan over
chunks then takes a few matrix products each.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta import chunk_reference
from labkit.kernels.gated_delta.shapes import RuleInputs
from labkit.kernels.header import Header
from labkit.kernels.launch import Kernel
from labkit.kernels.targets import target_in_use

_HERE = Path(__file__).parent
MATRICES = Header.from_file(_HERE / "matrices.h")
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


PREPARE = Kernel.from_file(
    _HERE / "chunk_prepare.metal",
    ["q", "k", "v", "log_decay", "beta", "spans", "length"],
    ["w", "u", "p", "scales"],
    name="gated_delta_chunk_prepare",
    header=MATRICES,
    reference=chunk_reference.prepare_plain,
)
SCAN_CHUNKS = Kernel.from_file(
    _HERE / "chunk_scan.metal",
    ["q", "k", "w", "u", "p", "scales", "state", "spans", "length"],
    ["y", "state_out"],
    name="gated_delta_chunk_scan",
    header=MATRICES,
    reference=chunk_reference.scan_plain,
)

PLAIN_CHUNK = 32
"""Tokens of a chunk in `PREPARE` and `SCAN_CHUNKS`: keys and triangle in fp32 fill threadgroup memory."""


class Tensor(NamedTuple):
    """How tensor cores take the chunked form.

    Attributes:
        chunk: tokens, 32 or 64. simdgroups: of a threadgroup, 16 columns of the state each.
        split: what is rounded to bf16 before a product is kept with its remainder, and multiplied twice or thrice: 2.4
            times the products, for errors close to those of fp32.
    """

    chunk: int = 64
    simdgroups: int = 4
    split: bool = False


def prepare_call(rule: RuleInputs) -> dict:
    """The arguments of `PREPARE`: chunks of 32 tokens in fp32."""
    shape = rule.shape
    heads, slots = shape.batch * shape.hv, -(-shape.length // PLAIN_CHUNK)
    chunks = (heads, slots, PLAIN_CHUNK)
    return {
        "inputs": [*rule.tokens, rule.spans, shape.length],
        "template": [("T", rule.q.dtype), *shape.template()],
        "grid": (slots * 128, heads, 1),
        "threadgroup": (128, 1, 1),
        "output_shapes": [
            (*chunks, shape.dk),
            (*chunks, shape.dv),
            (*chunks, PLAIN_CHUNK),
            (heads, slots, 2, PLAIN_CHUNK),
        ],
        "output_dtypes": [mx.float32] * 4,
    }


def scan_chunks_call(rule: RuleInputs, prepared: list[mx.array]) -> dict:
    """The arguments of `SCAN_CHUNKS`."""
    shape = rule.shape
    rows = 2 if shape.dk <= 128 else 1  # 128 registers hold the state of 16 columns, or of 8
    simdgroups = 2
    return {
        "inputs": [rule.q, rule.k, *prepared, rule.state, rule.spans, shape.length],
        "template": [("T", rule.q.dtype), *shape.template(), ("ROWS", rows), ("SIMDGROUPS", simdgroups)],
        "grid": (shape.dv // (8 * rows) * 32, shape.batch * shape.hv, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        **rule.results(),
    }


def prepare_mma_call(rule: RuleInputs, how: Tensor) -> dict:
    """The arguments of `PREPARE_MMA`: chunks in the order of tensor-core fragments."""
    shape, chunk, parts = rule.shape, how.chunk, 2 if how.split else 1
    slots, heads = -(-shape.length // chunk), shape.batch * shape.hv
    return {
        "inputs": [*rule.tokens, rule.spans, shape.length],
        "template": [("HK", shape.hk), ("HV", shape.hv), ("CHUNK", chunk), ("SPLIT", how.split)],
        "grid": (slots * chunk * 2, heads, 1),
        "threadgroup": (chunk * 2, 1, 1),
        "output_shapes": [
            (heads, slots, parts, 8, chunk // 16, 32, 8),
            (heads, slots, 8, chunk // 8, 32, 4),
            (heads, slots, parts, chunk // 16, chunk // 16, 32, 8),
            (heads, slots, 2, chunk),
        ],
        "output_dtypes": [mx.bfloat16, mx.float32, mx.bfloat16, mx.float32],
    }


def scan_mma_call(rule: RuleInputs, prepared: list[mx.array], how: Tensor) -> dict:
    """The arguments of `SCAN_MMA`."""
    shape = rule.shape
    template = [("CHUNK", how.chunk), ("SIMDGROUPS", how.simdgroups), ("SPLIT", how.split)]
    return {
        "inputs": [rule.q, rule.k, *prepared, rule.state, rule.spans, shape.length],
        "template": [("HK", shape.hk), ("HV", shape.hv), *template],
        "grid": (8 * 32, shape.batch * shape.hv, 1),
        "threadgroup": (how.simdgroups * 32, 1, 1),
        **rule.results(),
    }


def takes_tensor_cores(rule: RuleInputs) -> bool:
    """Whether the tensor-core kernels take such heads."""
    return (rule.shape.dk, rule.shape.dv) == (128, 128) and rule.q.dtype == mx.bfloat16


@takes_arrays
def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    spans: mx.array | None = None,
    *,
    tensor: Tensor | bool | None = None,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule by matrix products over chunks of tokens: what `scan` computes, in another order of sums.

    Two launches: one over all chunks at once, one that carries the state from chunk to chunk. Cut into calls at
    multiples of the chunk's tokens, a sequence gives the same bits; elsewhere other roundings.

    Args:
        q, k, v, log_decay, beta, state, spans: as for `scan`; Dk at most 192.
        tensor: use the tensor-core kernels (bfloat16, 128 x 128), and how; by default where CUDA has them and the
        inputs fit.
            They multiply in bf16 with fp32 sums: root-mean-square errors near 4e-3 of y and 3e-3 of the state, where
            bf16's own rounding of y is 1.7e-3. The others multiply in fp32.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        y and the new state, as `scan`.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (arXiv 2406.06484) and Gated Delta
    Networks (arXiv 2412.06464); flash-linear-attention's gated_delta_rule has the same two parts.
    """
    rule = RuleInputs.checked(q, k, v, log_decay, beta, state, spans)
    if tensor is None:
        tensor = target_in_use(target) == "cuda" and takes_tensor_cores(rule)
    return run_chunked(rule, Tensor() if tensor is True else tensor or None, target)


def run_chunked(rule: RuleInputs, tensor: Tensor | None, target: str | None = None) -> tuple[mx.array, mx.array]:
    """`chunked` of inputs that were checked, by tensor cores or, without a way for these, in fp32."""
    shape = rule.shape
    if tensor is None:
        if shape.dk > 192:
            raise ValueError(f"the chunked form takes keys of up to 192 dimensions, not {shape.dk}; take scan")
        prepared = PREPARE(**prepare_call(rule), target=target)
        return tuple(SCAN_CHUNKS(**scan_chunks_call(rule, prepared), target=target))
    if not takes_tensor_cores(rule):
        raise ValueError(
            f"tensor cores take bfloat16 heads of 128 x 128, not {rule.q.dtype} of {shape.dk} x {shape.dv}"
        )
    prepared = PREPARE_MMA(**prepare_mma_call(rule, tensor), target=target)
    return tuple(SCAN_MMA(**scan_mma_call(rule, prepared, tensor), target=target))
