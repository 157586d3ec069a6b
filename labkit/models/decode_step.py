"""A decode step as a function of arrays alone, so that it can be recorded: a model may offer it for its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

Compute = Callable[[mx.array, mx.array, list[mx.array], list[mx.array]], tuple[mx.array, list[mx.array]]]
"""(tokens [B, 1], counters int32 [C], given, memory) -> (logits [B, 1, V], memory after the step)."""


@dataclass(frozen=True)
class DecodeStep:
    """One token a row, by labkit's launches and views alone.

    Attributes:
        compute: the step. It neither reads nor moves the caches.
        counters: what is counted at this step, and `by` how much each of them moves on with a step.
        given: arrays that no step changes while `room` lasts.
        memory: arrays that each step leaves anew.
        room: steps until the caches must be asked again.
        keep: (memory, steps): let the caches take what so many steps have left.
    """

    compute: Compute
    counters: tuple[int, ...]
    by: tuple[int, ...]
    given: list[mx.array]
    memory: list[mx.array]
    room: int
    keep: Callable[[list[mx.array], int], None]
