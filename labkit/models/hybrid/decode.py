"""A few new tokens a row, as one function of arrays: what `mx.compile` builds once and replays for every token.

Decoding launches some hundred small kernels a token. Building them anew costs Python more time than a fast GPU needs to
run them, so the graph is built once for a number of rows and a capacity of the caches, and takes everything that
changes as arrays: tokens, positions, counts of columns, states, tails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from labkit.caches import BatchedContiguous, Cache
from labkit.caches.paged import PagedCache
from labkit.caches.paged_rows import int32s
from labkit.kernels.placement import on_device
from labkit.kernels.targets import device_target
from labkit.models.contract import Output
from labkit.models.hybrid import attention_layer, delta_layer
from labkit.models.hybrid.config import ATTENTION
from labkit.models.hybrid.plan import Columns, Step

if TYPE_CHECKING:
    from labkit.models.hybrid.hybrid import Hybrid

FEW = delta_layer.MAX_STEP
"""Tokens a row that count as few: a draft of eight can be verified."""

_MEMORY = {True: attention_layer.Memory, False: delta_layer.Memory}


class FewTokens:
    """The forward of up to `FEW` tokens a row through kernels.

    Args:
        model: whose layers and head are used.
    """

    def __init__(self, model: Hybrid):
        self._model = model
        self._compiled: dict[tuple, Callable[..., Any]] = {}

    def __call__(
        self, x: mx.array, caches: list[Cache], step: Step, *, logits: str | None, hidden: bool, given: bool
    ) -> Output:
        """Tokens [B, L], or embeddings [B, L, D] if `given`, to what was asked for; moves the caches on.

        Args:
            logits: "last", "all" or None.
        """
        paged = any(isinstance(cache, PagedCache) for cache in caches)
        counts = self._paged_columns(caches, step) if paged else self._counts(caches, step)
        memory = [
            _present(layer.mixer.memory(cache, step)) for layer, cache in zip(self._model.layers, caches, strict=True)
        ]
        compute = self._function(step, logits, hidden, given, paged=paged, padded=len(counts) == 2)
        arrays = [x, step.positions, *counts]
        spans = [] if step.spans is None else [step.spans]
        asked, after = compute(arrays, spans, memory)
        for layer, cache, arrays in zip(self._model.layers, caches, after, strict=True):
            layer.mixer.keep(cache, _MEMORY[layer.kind == ATTENTION](*arrays), step)
        return Output(*asked)

    def _function(
        self, step: Step, logits: str | None, hidden: bool, given: bool, *, paged: bool, padded: bool
    ) -> Callable:
        """The forward for steps of this form. Shapes may differ: `mx.compile` knows them itself."""

        def compute(arrays: list[mx.array], spans: list[mx.array], memory: list[tuple]) -> tuple[tuple, list[tuple]]:
            x, positions, *counts = arrays
            batch, length = x.shape[:2]
            if paged:
                columns = Columns(*counts)
            else:
                columns = _columns(counts[0], counts[1:], self._table(batch, length), batch * length, length)
            now = replace(step, batch=batch, length=length, positions=positions, columns=columns)
            now = replace(now, spans=spans[0] if spans else None)
            after = list(memory)

            def mix(index: int, normed: mx.array) -> mx.array:
                layer = self._model.layers[index]
                known = _MEMORY[layer.kind == ATTENTION](*memory[index])
                out, left = layer.mixer.mix(normed, known, now)
                after[index] = _present(left)
                return out

            if not given:
                x = self._model.embed(x)
            # Tokens without their rows: each change of shape would be an operation of its own.
            parts = self._model.through(x.reshape(batch * length, -1), mix, now)
            parts = [part.reshape(batch, length, -1) for part in parts]
            return tuple(self._model.head(*parts, None, logits, hidden, now)), after

        if not self._may_compile(step):
            return compute
        key = (step.plan, step.length, step.recording, logits, hidden, given, paged, padded)
        if key not in self._compiled:
            self._compiled[key] = mx.compile(compute)
        return self._compiled[key]

    def _may_compile(self, step: Step) -> bool:
        """Compiled graphs are for GPUs, and for references, whose operations MLX can trace on a CPU."""
        on_graph = device_target() == step.plan.target or step.plan.target == "reference"
        return on_graph and step.plan.variants.compiled and step.spans is None

    def _paged_columns(self, caches: list[Cache], step: Step) -> Columns:
        """Where each row's tokens stand. Every attention layer has taken the same, and keeps as many in its tail."""
        attending = [cache for cache in caches if isinstance(cache, PagedCache)]
        for cache in attending:
            cache.open_tail(step.length)
        if len({tuple(cache.rows.held()) for cache in attending}) > 1:
            for cache in attending:
                cache.rows.flush()
        rows = attending[0].rows
        last = tuple(length + 1 + i for length in rows.lengths for i in range(step.length))
        return Columns(int32s((0,) * len(last)), int32s(last), rows.finished(), int32s(tuple(rows.held()))[:, None])

    def _counts(self, caches: list[Cache], step: Step) -> list[mx.array]:
        """int32 [4]: 0, columns before the step, those of them that are settled, and the tail's next column; and the
        rows' padding [B] if they have some. Every attention layer has taken the same tokens."""
        attending = [cache for cache in caches if cache.kind == "contiguous"]
        if not attending:
            return [mx.zeros((4,), mx.int32)]
        settled = {cache.open_tail(step.length)[2].settled for cache in attending}
        if len(settled) > 1:
            for cache in attending:
                cache.settle()
            settled = {cache.open_tail(step.length)[2].settled for cache in attending}
        filled, (settled,) = attending[0].size(), settled
        padding = [attending[0].left_padding] if isinstance(attending[0], BatchedContiguous) else []
        return [mx.array([0, filled, settled, filled - settled], dtype=mx.int32), *padding]

    @cached_property
    def _tables(self) -> dict[tuple[int, int], mx.array]:
        return {}

    def _table(self, batch: int, length: int) -> mx.array:
        """[4, B * L, at least 8]: what is added to the counts for each token. Wide enough to lie in a GPU's memory."""
        if (batch, length) not in self._tables:
            tokens = batch * length
            later = [1 + index % length for index in range(tokens)] + [0] * max(0, 8 - tokens)
            none = [0] * len(later)
            self._tables[batch, length] = on_device(mx.array([none, later, none, none], dtype=mx.int32))
        return self._tables[batch, length]


def _present(arrays: tuple) -> tuple:
    return tuple(array for array in arrays if array is not None)


def _columns(counts: mx.array, padding: list[mx.array], table: mx.array, tokens: int, length: int) -> Columns:
    placed = counts[:, None] + table
    first = mx.repeat(padding[0], length) if padding else placed[0, :tokens]
    return Columns(first, placed[1, :tokens], placed[2], placed[3])
