"""Routing's loops on a CPU."""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import inner
from labkit.kernels.fused.loops import exp, sigmoid


@inner
def choose(logits, experts, top_k, renormalise, chosen, weights):
    """The best `top_k` of a token's experts with their softmax weights; every further slot is an expert that all take.

    Args:
        logits: [E, then the gate of the shared slots]. experts: E.
        chosen, weights: int64 and float32 [top_k + slots]; slots get experts E, E + 1, ... and the gate's sigmoid.
            weights may have one more: the sigmoid for a shared expert that is no slot.
    """
    largest = logits[0]
    for e in range(1, experts):
        largest = max(largest, logits[e])
    total = np.float32(0)
    for e in range(experts):
        logits[e] = exp(logits[e] - largest)
    for e in range(experts):
        total += logits[e]
    taken = np.float32(0)
    for k in range(top_k):
        best = 0
        for e in range(1, experts):
            if logits[e] > logits[best]:
                best = e
        chosen[k], weights[k] = best, logits[best]
        taken += logits[best]
        logits[best] = np.float32(-1)
    for k in range(top_k):
        weights[k] /= taken if renormalise else total
    for k in range(top_k, weights.size):
        weights[k] = sigmoid(logits[experts])
        if k < chosen.size:
            chosen[k] = experts + k - top_k


@inner
def group(chosen, experts, taken, order, places, rows, blocks):
    """Assignments by expert, in the tokens' order.

    Args:
        chosen: int64 [T taken], each token's experts, below `experts`.
        order: int64 [T taken], the tokens. places: int64 [T taken], where in that order each assignment stands.
        rows: of a block at most. blocks: int64 [n 3], of each an expert, its first and last row in that order.

    Returns:
        how many blocks there are, never more than experts + T taken / rows.
    """
    offsets = np.zeros(experts + 1, np.int64)
    for i in range(chosen.size):
        offsets[chosen[i] + 1] += 1
    for e in range(experts):
        offsets[e + 1] += offsets[e]
    ahead = offsets.copy()
    for i in range(chosen.size):
        at = ahead[chosen[i]]
        order[at], places[i] = i // taken, at
        ahead[chosen[i]] += 1
    count = 0
    for e in range(experts):
        for begin in range(offsets[e], offsets[e + 1], rows):
            blocks[3 * count], blocks[3 * count + 1] = e, begin
            blocks[3 * count + 2] = min(begin + rows, offsets[e + 1])
            count += 1
    return count
