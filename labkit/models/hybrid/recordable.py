"""A decode step of the hybrid for a recording: which of its arrays are counted, given and carried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from labkit.caches import BatchedContiguous, BatchedRecurrent, Cache, Contiguous, Recurrent
from labkit.caches.paged import Paged
from labkit.caches.paged_batch import BatchedPaged
from labkit.caches.paged_cache import open_together
from labkit.caches.recurrent_slots import BatchedSlottedRecurrent, SlottedRecurrent
from labkit.caches.tail import TAIL
from labkit.models.decode_step import DecodeStep
from labkit.models.hybrid import delta_layer
from labkit.models.hybrid.config import ATTENTION
from labkit.models.hybrid.graph import Layer
from labkit.models.hybrid.plan import Step

RECURRENT = {Recurrent, BatchedRecurrent, SlottedRecurrent, BatchedSlottedRecurrent}
PAGED = {Paged, BatchedPaged}
KINDS = RECURRENT | PAGED | {Contiguous, BatchedContiguous}


class Counted(NamedTuple):
    """Where attention's columns stand, as numbers that the device counts on.

    Attributes:
        numbers, by: at this step, and how much each of them moves on with one.
        given: arrays besides that stay.
        room: steps until a tail is full.
        columns: the numbers, int32 [len(numbers)], and `given` -> what the step's function takes behind positions.
    """

    numbers: tuple[int, ...]
    by: tuple[int, ...]
    given: list[mx.array]
    room: int
    columns: Callable[[mx.array, list[mx.array]], list[mx.array]]


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
    counted = _in_pages(attending) if {type(cache) for cache in attending} & PAGED else _in_rectangle(attending)
    if counted is None:
        return None
    parts = [layer.mixer.memory(cache, step) for layer, cache in zip(layers, caches, strict=True)]
    given, memory = list(counted.given), []
    for layer, part in zip(layers, parts, strict=True):
        if layer.kind == ATTENTION:
            given += [part.keys, part.values, *([] if part.table is None else [part.table])]
            memory += [part.tail_keys, part.tail_values]
        else:
            memory += part
    rows, paged = len(positions), [type(cache) in PAGED for cache in caches]

    def by_arrays(
        fed: mx.array, counters: mx.array, given: list[mx.array], memory: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        places, numbers = mx.split(counters, [rows])
        besides = len(counted.given)
        buffers, changing = iter(given[besides:]), iter(memory)
        known = [_memory(layer, part, buffers, changing) for layer, part in zip(layers, paged, strict=True)]
        (logits, _), after = compute([fed, places, *counted.columns(numbers, given[:besides])], [], known)
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
        counters=(*positions, *counted.numbers),
        by=(*(1,) * rows, *counted.by),
        given=given,
        memory=memory,
        room=counted.room,
        keep=keep,
    )


def _in_rectangle(attending: Sequence[Contiguous | BatchedContiguous]) -> Counted | None:
    """All rows and layers hold the same columns, as many of them settled. With no layer that attends, of none."""
    settled = {cache.open_tail(1)[2].settled for cache in attending} or {0}
    filled = {cache.size() for cache in attending} or {0}
    if len(settled) > 1 or len(filled) > 1:
        return None
    (settled,), (filled,) = settled, filled
    padding = [cache.left_padding for cache in attending[:1] if isinstance(cache, BatchedContiguous)]
    room = TAIL - (filled - settled)
    return Counted((filled, settled), (1, 0), padding, room, lambda n, given: [*mx.split(n, [1, 2])[:2], *given])


def _in_pages(attending: Sequence[Paged | BatchedPaged]) -> Counted:
    """Each row counts its own tokens. The table stays until a tail is full: only then blocks are taken."""
    rows = open_together(attending, 1)
    held, count = rows.held(), len(rows)
    finished = [tokens - tail for tokens, tail in zip(rows.lengths, held, strict=True)]
    numbers = [*[0] * count, *(tokens + 1 for tokens in rows.lengths), *finished, *held]

    def columns(numbers: mx.array, given: list[mx.array]) -> list[mx.array]:
        first, last, finished, held = mx.split(numbers, [count, 2 * count, 3 * count, 4 * count])[:4]
        return [first, last, finished, held[:, None]]

    by = [number for number in (0, 1, 0, 1) for _ in range(count)]
    return Counted(tuple(numbers), tuple(by), [], rows.pages.tail_tokens - max(held), columns)


def _memory(layer: Layer, paged: bool, buffers: Any, changing: Any) -> tuple[mx.array, ...]:
    if layer.kind == ATTENTION:
        keys, values, *table = (next(buffers) for _ in range(3 if paged else 2))
        return keys, values, next(changing), next(changing), *table
    return next(changing), next(changing)


def _changed(layer: Layer, part: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    return tuple(part[2:4]) if layer.kind == ATTENTION else tuple(part[:2])
