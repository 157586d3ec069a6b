"""A decode step of the hybrid for a recording: which of its arrays are counted, given and carried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from labkit.caches import BatchedContiguous, BatchedRecurrent, Cache, Contiguous, Recurrent
from labkit.caches.tail import TAIL
from labkit.models.decode_step import DecodeStep
from labkit.models.hybrid import delta_layer
from labkit.models.hybrid.config import ATTENTION
from labkit.models.hybrid.graph import Layer
from labkit.models.hybrid.plan import Step

KINDS = {Contiguous, BatchedContiguous, Recurrent, BatchedRecurrent}
"""Caches whose columns all rows count alike: pages count each row's own, and are flushed as they fill."""


def decode_step(
    layers: Sequence[Layer], compute: Callable, caches: list[Cache], step: Step, positions: Sequence[int], tokens: int
) -> DecodeStep | None:
    """The step for these caches, or None if it is not the same launches from token to token.

    Args:
        compute: `FewTokens`' forward for this step, as a function of arrays.
        step: of one token a row. positions: of each row's next token.
        tokens: that each row may still want at most.
    """
    if {type(cache) for cache in caches} - KINDS or step.spans is not None or step.recording:
        return None
    attending = [cache for cache in caches if cache.kind == "contiguous"]
    for cache in attending:
        cache.make_room(tokens)
    tails = [cache.open_tail(1)[2] for cache in attending]
    filled = attending[0].size() if attending else 0
    if len({tail.settled for tail in tails}) > 1 or any(cache.size() != filled for cache in attending):
        return None
    settled = tails[0].settled if tails else 0
    padding = [attending[0].left_padding] if attending and isinstance(attending[0], BatchedContiguous) else []
    parts = [layer.mixer.memory(cache, step) for layer, cache in zip(layers, caches, strict=True)]
    given, memory = list(padding), []
    for layer, part in zip(layers, parts, strict=True):
        if layer.kind == ATTENTION:
            given += [part.keys, part.values]
            memory += [part.tail_keys, part.tail_values]
        else:
            memory += part
    rows = len(positions)

    def by_arrays(
        fed: mx.array, counters: mx.array, given: list[mx.array], memory: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        arrays = [fed, *mx.split(counters, [rows, rows + 1, rows + 2])[:3], *given[: len(padding)]]
        buffers, changing = iter(given[len(padding) :]), iter(memory)
        known = [_memory(layer, buffers, changing) for layer in layers]
        (logits, _), after = compute(arrays, [], known)
        return logits, [array for layer, part in zip(layers, after, strict=True) for array in _changed(layer, part)]

    def keep(memory: list[mx.array], steps: int) -> None:
        arrays, took = iter(memory), replace(step, length=steps)
        for layer, cache in zip(layers, caches, strict=True):
            if layer.kind == ATTENTION:
                cache.take_tail(next(arrays), next(arrays), steps)
            else:
                layer.mixer.keep(cache, delta_layer.Memory(next(arrays), next(arrays)), took)

    return DecodeStep(
        by_arrays,
        counters=(*positions, filled, settled),
        by=(*(1,) * rows, 1, 0),
        given=given,
        memory=memory,
        room=TAIL - (filled - settled) if attending else TAIL,
        keep=keep,
    )


def _memory(layer: Layer, buffers: Any, changing: Any) -> tuple[mx.array, ...]:
    if layer.kind == ATTENTION:
        keys, values = next(buffers), next(buffers)
        return keys, values, next(changing), next(changing)
    return next(changing), next(changing)


def _changed(layer: Layer, part: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return tuple(part[2:4]) if layer.kind == ATTENTION else tuple(part[:2])
