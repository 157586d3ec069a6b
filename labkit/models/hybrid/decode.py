"""A few new tokens a row, as one function of arrays: what `mx.compile` builds once and replays for every token.

Decoding launches some hundred small kernels a token. Building them anew costs Python more time than a fast GPU needs to
run them, so the graph is built once for a number of rows and a capacity of the caches, and takes everything that
changes as arrays: tokens, positions, counts of columns, states, tails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from labkit.caches import BatchedContiguous, Cache
from labkit.caches.paged import PagedCache
from labkit.caches.paged_rows import int32s
from labkit.kernels.placement import on_device
from labkit.kernels.targets import device_target
from labkit.models.contract import Output
from labkit.models.hybrid import attention_layer, delta_layer, persistent
from labkit.models.hybrid.config import ATTENTION
from labkit.models.hybrid.graph import Graph
from labkit.models.hybrid.plan import Columns, Step

FEW = delta_layer.MAX_STEP
"""Tokens a row that count as few: a draft of eight can be verified."""

_MEMORY = {True: attention_layer.Memory, False: delta_layer.Memory}


class FewTokens:
    """The forward of up to `FEW` tokens a row through kernels.

    Args:
        graph: what it walks through. Nothing that is kept here leads back to whoever calls: a model goes, weights and
            compiled functions and all, with the last reference to it.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._compiled: dict[tuple, Callable[..., Any]] = {}
        self._tables: dict[tuple[int, int], mx.array] = {}

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
            _present(layer.mixer.memory(cache, step)) for layer, cache in zip(self._graph.layers, caches, strict=True)
        ]
        compute = self._function(step, logits, hidden, given, paged=paged, padded=len(counts) == 3)
        arrays = [x, step.positions, *counts]
        spans = [] if step.spans is None else [step.spans]
        asked, after = compute(arrays, spans, memory)
        for layer, cache, arrays in zip(self._graph.layers, caches, after, strict=True):
            layer.mixer.keep(cache, _MEMORY[layer.kind == ATTENTION](*arrays), step)
        return Output(*asked)

    def _function(
        self, step: Step, logits: str | None, hidden: bool, given: bool, *, paged: bool, padded: bool
    ) -> Callable:
        """The forward for steps of this form. Shapes may differ: `mx.compile` knows them itself."""
        graph = self._graph

        def compute(arrays: list[mx.array], spans: list[mx.array], memory: list[tuple]) -> tuple[tuple, list[tuple]]:
            x, positions, *counts = arrays
            batch, length = x.shape[:2]
            columns = Columns(*counts) if paged else _columns(*counts, tokens=batch * length, length=length)
            now = replace(step, batch=batch, length=length, positions=positions, columns=columns)
            now = replace(now, spans=spans[0] if spans else None)
            after = list(memory)

            def mix(index: int, normed: mx.array) -> mx.array:
                layer = graph.layers[index]
                known = _MEMORY[layer.kind == ATTENTION](*memory[index])
                out, left = layer.mixer.mix(normed, known, now)
                after[index] = _present(left)
                return out

            if not given:
                x = graph.embed(x)
            # Tokens without their rows: each change of shape would be an operation of its own.
            x = x.reshape(batch * length, -1)
            if persistent.takes_layers(now, paged):
                *parts, after = persistent.layers_through(graph.layers, x, memory, now)
            else:
                parts = graph.through(x, mix, now)
            parts = [part.reshape(batch, length, -1) for part in parts]
            return tuple(graph.head(*parts, None, logits, hidden, now)), after

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
        """int32 [4]: 0, columns before the step, those of them that are settled, and the tail's next column; what is
        added to them for each token (`_table`); and the rows' padding [B] if they have some. Every attention layer has
        taken the same tokens."""
        table = self._table(step.batch, step.length)
        attending = [cache for cache in caches if cache.kind == "contiguous"]
        if not attending:
            return [mx.zeros((4,), mx.int32), table]
        settled = {cache.open_tail(step.length)[2].settled for cache in attending}
        if len(settled) > 1:
            for cache in attending:
                cache.settle()
            settled = {cache.open_tail(step.length)[2].settled for cache in attending}
        filled, (settled,) = attending[0].size(), settled
        padding = [attending[0].left_padding] if isinstance(attending[0], BatchedContiguous) else []
        return [mx.array([0, filled, settled, filled - settled], dtype=mx.int32), table, *padding]

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


def _columns(
    counts: mx.array, table: mx.array, padding: mx.array | None = None, *, tokens: int, length: int
) -> Columns:
    placed = counts[:, None] + table
    first = placed[0, :tokens] if padding is None else mx.repeat(padding, length)
    return Columns(first, placed[1, :tokens], placed[2], placed[3])
