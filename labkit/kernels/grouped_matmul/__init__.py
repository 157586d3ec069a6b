"""Products of routed rows with their experts' packed weights.

| form | launches | for |
| --- | --- | --- |
| `grouped_experts` | 3 | many tokens: tiles of sorted rows, as high as the experts' load asks for |
| `decode_experts` | 2 | a few tokens: each assignment reads its expert's weights once, nothing is sorted |
| `choose_decode_experts` | 2 | the same from the router's scores: the first launch chooses, too |

Both fuse gate, up and SwiGLU into one launch, and weigh the down products before they are stored. The decode form also
adds them up, with the shared expert, in the same launch. Tiles leave that to `combine_experts`, since a token's experts
lie in different tiles: sums in the order of slots, the same at every run, for a write and a read of T * k * N values.
"""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.grouped_matmul.launches import (
    CHOOSE_GATE_UP,
    COMBINE_EXPERTS,
    DECODE_DOWN,
    DECODE_GATE_UP,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    choose_gate_up_call,
    combine_experts_call,
    decode_down_call,
    decode_gate_up_call,
    expert_down_call,
    expert_gate_up_call,
)
from labkit.kernels.quantized_matmul.packed import Packed, forms
from labkit.kernels.targets import target_in_use

__all__ = [
    "CHOOSE_GATE_UP",
    "COMBINE_EXPERTS",
    "DECODE_DOWN",
    "DECODE_GATE_UP",
    "DECODE_TOKENS",
    "EXPERT_DOWN",
    "EXPERT_GATE_UP",
    "choose_decode_experts",
    "choose_tile",
    "decode_experts",
    "form_for",
    "grouped_experts",
]

DECODE_TOKENS = 8
"""Tokens up to which `decode_experts` is the better form: 64 assignments to 256 experts still meet about 57 of them."""


def form_for(x: mx.array, *weights: Packed, target: str | None = None) -> str:
    """ "tensor" on CUDA where the dtypes allow it, else "plain"."""
    return "tensor" if target_in_use(target) == "cuda" and "tensor" in forms(x, *weights) else "plain"


def choose_tile(assignments: int, experts: int) -> int:
    """Rows of a tile for the mean load of an expert.

    A block's cost follows its rows in steps of 16 (fragments without rows are skipped), but each block dequantises all
    of its columns: so the tile holds nearly every expert's load, two deviations above the mean of an even routing.
    Tiles of 128 rows leave too few threadgroups a multiprocessor. `Groups.block_map` must be made for it.

    H200, 2048 to 512, gate and up (data/measured/h200_grouped_matmul.json): a mean of 16 took 271, 230 and 245 us in
    tiles of 16, 32 and 64; 64 took 477 and 596 in 64 and 128; 128 took 1,014, 815 and 945 in 32, 64 and 128.
    """
    mean = assignments / experts
    return next((tile for tile in (16, 32) if mean + 2 * mean**0.5 <= tile), 64)


@takes_arrays
def grouped_experts(
    x: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    weights: mx.array,
    order: mx.array,
    block_map: mx.array,
    tile: int,
    *,
    shared: mx.array | None = None,
    shared_factor: mx.array | None = None,
    target: str | None = None,
) -> mx.array:
    """The routed experts' part of a sparse MLP, for many tokens.

    Args:
        x: [T, D], float32, float16 or bfloat16.
        gate, up: E experts of I x D. down: E experts of D x I.
        weights: [T, k], of each token's experts, any float dtype.
        order, block_map, tile: `labkit.kernels.routing.Groups` made for `choose_tile`'s tile.
        shared, shared_factor: [T, D] and [T], added as shared_factor * shared.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [T, D] in x's dtype: sum over k of weights * down(silu(gate x) * up x), plus the shared part. The hidden rows
        and the weighed products are rounded to x's dtype; sums are fp32.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: the sparse block of Qwen3-Next (mlx-lm's qwen3_next.py); block maps as in MegaBlocks (Gale et al. 2022,
    arXiv 2211.15841).
    """
    k = weights.shape[-1]
    form = form_for(x, gate, up, down, target=target)
    (hidden,) = EXPERT_GATE_UP[form](
        **expert_gate_up_call(x, gate, up, order, block_map, k, form, tile=tile), target=target
    )
    (products,) = EXPERT_DOWN[form](
        **expert_down_call(hidden, down, order, block_map, weights, form, tile=tile), target=target
    )
    products = products.reshape(x.shape[0], k, down.n)
    (y,) = COMBINE_EXPERTS(**combine_experts_call(products, shared, shared_factor), target=target)
    return y


@takes_arrays
def decode_experts(
    x: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    indices: mx.array,
    weights: mx.array,
    *,
    shared: mx.array | None = None,
    shared_factor: mx.array | None = None,
    target: str | None = None,
) -> mx.array:
    """The routed experts' part of a sparse MLP, for up to about `DECODE_TOKENS` tokens: two launches, no sorting.

    Args:
        x: [T, D]. gate, up, down, weights, shared, shared_factor, target: as for `grouped_experts`.
        indices: [T, k] int32, experts of each token.

    Returns:
        [T, D] in x's dtype, as `grouped_experts`; here the weighed products are not rounded before they are summed, and
        the weights are used exactly.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    form = form_for(x, gate, up, down, target=target)
    (hidden,) = DECODE_GATE_UP[form](**decode_gate_up_call(x, gate, up, indices, form), target=target)
    call = decode_down_call(hidden, down, indices, weights, shared, shared_factor, form)
    (y,) = DECODE_DOWN[form](**call, target=target)
    return y


@takes_arrays
def choose_decode_experts(
    x: mx.array,
    gate: Packed,
    up: Packed,
    down: Packed,
    logits: mx.array,
    k: int,
    *,
    experts: int | None = None,
    renormalise: bool = True,
    shared: int = 0,
    target: str | None = None,
) -> mx.array:
    """`choose_experts` by softmax and `decode_experts` in two launches for their three.

    Every threadgroup of gate and up chooses for its token, no further than its own slot: 256 scores are 1 KB, and while
    the last slots choose, the first ones' weights arrive.

    Args:
        x: [T, D]. gate, up, down: experts + shared matrices, as for `grouped_experts`.
        logits: [T, L] float32, the router's scores. k, experts, renormalise, shared: as for `choose_experts`.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [T, D] in x's dtype: the bits of the three launches.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: as `choose_experts` and `grouped_experts`.
    """
    experts = gate.experts - shared if experts is None else experts
    form = form_for(x, gate, up, down, target=target)
    choice = {"experts": experts, "renormalise": renormalise, "shared": shared}
    call = choose_gate_up_call(x, gate, up, logits, k, form, **choice)
    hidden, indices, weights = CHOOSE_GATE_UP[form](**call, target=target)
    (y,) = DECODE_DOWN[form](**decode_down_call(hidden, down, indices, weights, form=form), target=target)
    return y
