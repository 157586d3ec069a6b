"""The likeliest tokens of rows whose logits the host has: chosen there, and the same as MLX would choose.

MLX gives the smallest graph to a thread of its own. Where the CPU computes, waiting for that thread takes a tenth of a
small model's step, and more than all of it where other programs are at work.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from labkit.engine.sampling import Choice, RowSampler
from labkit.kernels.targets import target_in_use

NEAR = np.float32(1e-5)
"""Logits so close to the largest may be the same log-probability, of which `choose` takes the first: two are if they
differ by less than one unit in the last place of the logarithm of the vocabulary's size."""


def likeliest(logits: mx.array, rows: Sequence[RowSampler], masks: Sequence[mx.array | None]) -> Choice | None:
    """As `choose` for rows that want nothing but their likeliest token; None where it must be asked.

    Args:
        logits: float32 [B, n, V], computed; the last of each row counts.
    """
    greedy = all(row.together == () for row in rows) and all(mask is None for mask in masks)
    if not greedy or target_in_use() is not None:
        return None
    scores = np.asarray(logits)[:, -1]
    tokens = scores.argmax(axis=-1)
    largest = scores[np.arange(len(tokens)), tokens]  # NaN where any is
    if not np.isfinite(largest).all() or np.count_nonzero(scores > (largest - NEAR)[:, None]) != len(tokens):
        return None
    nothing: list[None] = [None] * len(tokens)
    return Choice(mx.array(tokens.astype(np.uint32)), mx.array(largest), nothing, nothing, {})
