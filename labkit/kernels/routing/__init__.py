"""Expert routing on the device: which experts a token goes to, and which rows each expert gets.

| kernel | launches for T tokens | what it does |
| --- | --- | --- |
| `route_few` | 1, up to `FEW` tokens | scores, top-k, counts, prefix sums, stable order, block map |
| `choose_experts`, `group_rows` | 2, any number | scores, top-k and counts of each block; then the rest |
| `count_experts` | 1 before `group_rows` | counts, where the experts are already chosen |

The host never waits: shapes depend on T, k, E and the tile alone. The baseline reads the counts back to size
the launches of the grouped matmul: one wait for the device in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.routing.launches import (
    CHOOSE_EXPERTS,
    COUNT_EXPERTS,
    FEW,
    GROUP_ROWS,
    ROUTE_FEW,
    Scoring,
    choose_experts_call,
    count_experts_call,
    group_rows_call,
    max_blocks,
    route_few_call,
)

__all__ = ["FEW", "Groups", "Routing", "Scoring", "choose_experts", "group_rows", "max_blocks", "route"]


@dataclass(frozen=True)
class Groups:
    """The N = T * k assignments (token, slot), flat index token * k + slot, sorted by expert; all int32.

    Attributes:
        order: [N], sorted position -> flat index; stable within an expert.
        inverse: [N], flat index -> sorted position, for the combine.
        offsets: [E + 1], expert e has the sorted positions offsets[e] to offsets[e + 1].
        block_map: [ceil(N / tile) + E, 4], rows of (expert, first sorted position, positions, 0): every expert cut into
            blocks of at most `tile`; unused entries are all 0.
        tile: it.
    """

    order: mx.array
    inverse: mx.array
    offsets: mx.array
    block_map: mx.array
    tile: int


@dataclass(frozen=True)
class Routing:
    """Where each token goes, and what each expert gets.

    Attributes:
        indices: [T, k] int32, experts of each token, best first. weights: [T, k] float32. groups: the rows by expert.
    """

    indices: mx.array
    weights: mx.array
    groups: Groups


@takes_arrays
def choose_experts(
    logits: mx.array,
    k: int,
    *,
    experts: int | None = None,
    scoring: Scoring = "softmax",
    bias: mx.array | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    shared: int = 0,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The k best experts of each token and their weights.

    Args:
        logits: [T, L] router logits, float32, float16 or bfloat16. NaN counts as -inf, +inf as the largest number.
        k: experts a token, at most 32.
        experts: E, at most 512; by default L. Columns past E are ignored: a shared expert's gate can ride there.
        scoring: "softmax" as Qwen, or "sigmoid" as DeepSeek V3 and its kin.
        bias: [E], added to the scores for choosing alone, never to the weights.
        renormalise: divide by the sum of the chosen scores; without it softmax weights are shares of all experts.
        scale: multiplies the weights.
        shared: slots after the k for a shared expert that runs as experts E and following: every token goes there,
            with the sigmoid of logit E, its gate, as weight.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        indices [T, k + shared] int32, best first, the lower expert among equals; weights [T, k + shared] float32, the
        first k all 0 in a row whose chosen scores are 0.

    Raises:
        ValueError: shapes or sizes that do not fit.

    Source: `Qwen3NextSparseMoeBlock` and `group_expert_select` (without groups) of mlx-lm; Fedus et al. 2021 (arXiv
    2101.03961), Liu et al. 2024 (arXiv 2412.19437) for the correction bias.
    """
    call = choose_experts_call(logits, k, experts, scoring, bias, renormalise, scale, shared=shared)
    indices, weights, _ = CHOOSE_EXPERTS(**call, target=target)
    return indices, weights


@takes_arrays
def group_rows(indices: mx.array, experts: int, tile: int, *, target: str | None = None) -> Groups:
    """Sort chosen experts into groups, for experts chosen elsewhere.

    Args:
        indices: [T, k] int32 or uint32, each in [0, experts).
        experts: E, at most 512.
        tile: rows of a block of the map.
        target: where to run (`labkit.kernels.targets`).

    Raises:
        ValueError: shapes or sizes that do not fit.

    Source: the token permutation of MegaBlocks, Gale et al. 2022 (arXiv 2211.15841); stable by counted ranks.
    """
    call = count_experts_call(indices, experts)
    (counts,) = COUNT_EXPERTS(**call, target=target)
    return Groups(*GROUP_ROWS(**group_rows_call(indices, counts, experts, tile), target=target), tile)


@takes_arrays
def route(
    logits: mx.array,
    k: int,
    tile: int,
    *,
    experts: int | None = None,
    scoring: Scoring = "softmax",
    bias: mx.array | None = None,
    renormalise: bool = True,
    scale: float = 1.0,
    shared: int = 0,
    target: str | None = None,
) -> Routing:
    """Choose experts and group the rows: one launch up to 32 tokens, two for more or with shared slots.

    Args as `choose_experts` and `group_rows`. Raises ValueError likewise.
    """
    arguments = (logits, k, experts, scoring, bias, renormalise, scale)
    if logits.ndim == 2 and logits.shape[0] <= FEW and not shared:
        indices, weights, *groups = ROUTE_FEW(**route_few_call(*arguments, tile), target=target)
        return Routing(indices, weights, Groups(*groups, tile))
    indices, weights, counts = CHOOSE_EXPERTS(**choose_experts_call(*arguments, shared=shared), target=target)
    experts = (experts or logits.shape[-1]) + shared
    groups = GROUP_ROWS(**group_rows_call(indices, counts, experts, tile), target=target)
    return Routing(indices, weights, Groups(*groups, tile))
