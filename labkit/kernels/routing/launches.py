"""The routing kernels, their limits, and the arguments of their launches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx

from labkit.kernels.header import Header
from labkit.kernels.launch import Kernel
from labkit.kernels.routing import reference
from labkit.kernels.targets import threads_that_fit

Scoring = Literal["softmax", "sigmoid"]
SCORINGS = get_args(Scoring)

MAX_EXPERTS = 512
"""Sixteen scores in the registers of each lane, and one thread an expert."""
MAX_K = 32
"""Lane l of a simdgroup keeps choice l."""
FEW = 32
"""Tokens up to which one threadgroup routes them in one launch: a simdgroup a token."""
MAX_BLOCK = 4096
"""Assignments of a threadgroup of `group_rows`: its choices take 8 KB of threadgroup memory."""

_HERE = Path(__file__).parent
ROUTING = Header.from_file(_HERE / "routing.h")
_GROUPS = ["order", "inverse", "offsets", "block_map"]

CHOOSE_EXPERTS = Kernel.from_file(
    _HERE / "choose_experts.metal",
    ["logits", "bias", "scale", "T", "L"],
    ["indices", "weights", "counts"],
    header=ROUTING,
    reference=reference.choose_experts,
)
COUNT_EXPERTS = Kernel.from_file(
    _HERE / "count_experts.metal", ["indices", "N"], ["counts"], header=ROUTING, reference=reference.count_experts
)
GROUP_ROWS = Kernel.from_file(
    _HERE / "group_rows.metal",
    ["indices", "counts", "N", "BLOCKS", "tile", "MAX_BLOCKS"],
    _GROUPS,
    header=ROUTING,
    reference=reference.group_rows,
)
ROUTE_FEW = Kernel.from_file(
    _HERE / "route_few.metal",
    ["logits", "bias", "scale", "T", "L", "tile", "MAX_BLOCKS"],
    ["indices", "weights", *_GROUPS],
    header=ROUTING,
    reference=reference.route_few,
)


def choose_experts_call(
    logits: mx.array,
    k: int,
    experts: int | None = None,
    scoring: Scoring = "softmax",
    bias: mx.array | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    threads: int = 512,
    block: int | None = None,
    shared: int = 0,
) -> dict:
    """The arguments of `CHOOSE_EXPERTS`; `block` tokens a threadgroup, by default `tokens_per_block`.

    Args:
        shared: experts after the E that every token goes to, with the sigmoid of logit E as their weight.

    Raises:
        ValueError: shapes or sizes that do not fit.
    """
    inputs, template = _choice(logits, k, experts, scoring, bias, renormalise, scale)
    tokens, experts = logits.shape[0], dict(template)["E"]
    threads = threads_that_fit(threads)
    check_choice(logits, k, experts, shared)
    slots, groups = k + shared, experts + shared
    block = block or tokens_per_block(tokens, slots)
    blocks = -(-tokens // block)
    return {
        "inputs": inputs,
        "template": [*template, ("TOKENS", block), ("THREADS", threads), ("SHARED", shared)],
        "grid": (blocks * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(tokens, slots), (tokens, slots), (blocks, groups)],
        "output_dtypes": [mx.int32, mx.float32, mx.int32],
    }


def count_experts_call(indices: mx.array, experts: int) -> dict:
    """The arguments of `COUNT_EXPERTS`. Raises ValueError for shapes or sizes that do not fit."""
    _check_indices(indices, experts)
    block = tokens_per_block(*indices.shape) * indices.shape[1]
    blocks = -(-indices.size // block)
    threads = _lanes(experts)
    return {
        "inputs": [indices, indices.size],
        "template": [("E", experts), ("BLOCK", block), ("THREADS", threads)],
        "grid": (blocks * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(blocks, experts)],
        "output_dtypes": [mx.int32],
    }


def group_rows_call(
    indices: mx.array, counts: mx.array, experts: int, tile: int, threads: int = 1024, block: int | None = None
) -> dict:
    """The arguments of `GROUP_ROWS`, for the counts of `CHOOSE_EXPERTS` or `COUNT_EXPERTS` with as many tokens a block.

    Raises:
        ValueError: shapes or sizes that do not fit.
    """
    _check_indices(indices, experts)
    _check_tile(tile)
    block = (block or tokens_per_block(*indices.shape)) * indices.shape[1]
    blocks = -(-indices.size // block)
    threads = threads_that_fit(threads, least=_lanes(experts))
    if counts.shape != (blocks, experts):
        raise ValueError(f"counts need shape {(blocks, experts)} for indices {indices.shape}, not {counts.shape}")
    return {
        "inputs": [indices, counts, indices.size, blocks, tile, max_blocks(indices.size, experts, tile)],
        "template": [("E", experts), ("BLOCK", block), ("THREADS", threads)],
        "grid": (blocks * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        **_group_outputs(indices.size, experts, tile),
    }


def route_few_call(
    logits: mx.array,
    k: int,
    experts: int | None,
    scoring: Scoring,
    bias: mx.array | None,
    renormalise: bool,
    scale: float,
    tile: int,
) -> dict:
    """The arguments of `ROUTE_FEW`. Raises ValueError for shapes or sizes that do not fit."""
    inputs, template = _choice(logits, k, experts, scoring, bias, renormalise, scale)
    _check_tile(tile)
    tokens, experts = logits.shape[0], dict(template)["E"]
    if tokens > FEW:
        raise ValueError(f"one launch routes at most {FEW} tokens, not {tokens}")
    room = 8 if tokens <= 8 else FEW
    threads = max(threads_that_fit(32 * room), _lanes(experts))
    groups = _group_outputs(tokens * k, experts, tile)
    return {
        "inputs": [*inputs, tile, max_blocks(tokens * k, experts, tile)],
        "template": [*template, ("TOKENS", room), ("THREADS", threads)],
        "grid": (threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(tokens, k), (tokens, k), *groups["output_shapes"]],
        "output_dtypes": [mx.int32, mx.float32, *groups["output_dtypes"]],
    }


def _lanes(experts: int) -> int:
    """A thread for each expert, in whole simdgroups."""
    return -(-experts // 32) * 32


def max_blocks(assignments: int, experts: int, tile: int) -> int:
    """Entries of a block map: every expert may have one block that is not full."""
    return -(-assignments // tile) + experts


def tokens_per_block(tokens: int, k: int) -> int:
    """Tokens of a threadgroup: a power of two from 32 on, at most `MAX_BLOCK` assignments, for about 128 threadgroups.

    More threadgroups would read more counts each (all of them), fewer would leave a large GPU idle.
    """
    block = 32
    while block * 128 < tokens and 2 * block * k <= MAX_BLOCK:
        block *= 2
    return block


def _choice(logits, k, experts, scoring, bias, renormalise, scale) -> tuple[list, list]:
    if logits.ndim == 2 and experts is None:
        experts = logits.shape[1]
    check_choice(logits, k, experts)
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is one of {', '.join(SCORINGS)}, not {scoring!r}")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"bias needs shape {(experts,)}, not {bias.shape}")
    template = [("E", experts), ("K", k), ("SIGMOID", scoring == "sigmoid"), ("BIASED", bias is not None)]
    biases = _no_bias() if bias is None else bias
    inputs = [logits, biases, float(scale), logits.shape[0], logits.shape[1]]
    return inputs, [*template, ("RENORMALISE", renormalise)]


def check_choice(logits: mx.array, k: int, experts: int, shared: int = 0) -> None:
    """Raises ValueError unless logits [T, L] can choose k of `experts`, with `shared` slots more for every token."""
    if logits.ndim != 2 or logits.size == 0:
        raise ValueError(f"router logits need shape [T, L] with at least one value, not {logits.shape}")
    if not 1 <= experts <= min(logits.shape[1], MAX_EXPERTS):
        raise ValueError(
            f"experts must be 1 to {min(logits.shape[1], MAX_EXPERTS)} for logits {logits.shape}, not {experts}"
        )
    if not 1 <= k <= min(experts, MAX_K):
        raise ValueError(f"k must be 1 to {min(experts, MAX_K)} for {experts} experts, not {k}")
    if shared and (experts >= logits.shape[1] or k + shared > MAX_K or experts + shared > MAX_EXPERTS):
        raise ValueError(
            f"{shared} shared slots beside {k} of {experts} experts: logits {logits.shape} need one column more than "
            f"experts, and at most {MAX_K} slots and {MAX_EXPERTS} experts are possible in all"
        )


def _check_indices(indices: mx.array, experts: int) -> None:
    if indices.ndim != 2 or indices.size == 0 or indices.dtype not in (mx.int32, mx.uint32):
        raise ValueError(f"indices need shape [T, k], int32 or uint32, not {indices.shape} {indices.dtype}")
    if not 1 <= experts <= MAX_EXPERTS or indices.shape[1] > MAX_K:
        raise ValueError(f"at most {MAX_EXPERTS} experts and k at most {MAX_K}, not {experts} and {indices.shape[1]}")


def _check_tile(tile: int) -> None:
    if tile < 1:
        raise ValueError(f"a tile has at least one row, not {tile}")


def _group_outputs(assignments: int, experts: int, tile: int) -> dict:
    shapes = [(assignments,), (assignments,), (experts + 1,), (max_blocks(assignments, experts, tile), 4)]
    return {"output_shapes": shapes, "output_dtypes": [mx.int32] * 4}


@cache
def _no_bias() -> mx.array:
    # Computed: a pending array would be computed again in every compiled graph.
    nothing = mx.zeros((8,), dtype=mx.float32)
    mx.eval(nothing)
    return nothing
