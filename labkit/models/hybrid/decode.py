"""A few new tokens a row, as one function of arrays: what `mx.compile` builds once and replays for every token.

Decoding launches some hundred small kernels a token. Building them anew costs Python more time than a fast GPU needs to
run them, so the graph is built once for a number of rows and a capacity of the caches, and takes everything that
changes as arrays: tokens, positions, counts of columns, states, tails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from labkit.caches import BatchedContiguous, Cache
from labkit.caches.paged_cache import PagedCache, open_together
from labkit.caches.paged_reads import int32s
from labkit.kernels.fused import place_columns
from labkit.kernels.targets import device_target
from labkit.models.contract import Output
from labkit.models.decode_step import DecodeStep
from labkit.models.hybrid import attention_layer, delta_layer, persistent
from labkit.models.hybrid.config import ATTENTION
from labkit.models.hybrid.graph import Graph
from labkit.models.hybrid.plan import Columns, Step
from labkit.models.hybrid.recordable import decode_step

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

    def __call__(
        self, x: mx.array, caches: list[Cache], step: Step, *, logits: str | None, hidden: bool, given: bool
    ) -> Output:
        """Tokens [B, L], or embeddings [B, L, D] if `given`, to what was asked for; moves the caches on.

        Args:
            logits: "last", "all" or None.
        """
        # By their types: this is asked at every token.
        paged = _in_pages(caches)
        counts = self._paged_columns(caches, step) if paged else self._counts(caches, step)
        memory = [
            _present(layer.mixer.memory(cache, step)) for layer, cache in zip(self._graph.layers, caches, strict=True)
        ]
        compute = self._function(step, logits, hidden, given, paged=paged, padded=len(counts) > _COUNTS)
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
        compute = self._by_arrays(step, logits, hidden, given, paged=paged)
        if not self._may_compile(step):
            return compute
        key = (step.plan, step.length, step.recording, logits, hidden, given, paged, padded)
        if key not in self._compiled:
            self._compiled[key] = mx.compile(compute)
        return self._compiled[key]

    def _by_arrays(self, step: Step, logits: str | None, hidden: bool, given: bool, *, paged: bool) -> Callable:
        """(tokens, positions and counts; spans; what each layer remembers) -> (what was asked for, what they remember
        then)."""
        graph = self._graph

        def compute(arrays: list[mx.array], spans: list[mx.array], memory: list[tuple]) -> tuple[tuple, list[tuple]]:
            x, positions, *counts = arrays
            batch, length = x.shape[:2]
            columns = Columns(*(counts if paged else place_columns(*counts[:2], batch, length, *counts[2:])))
            now = replace(step, batch=batch, length=length, positions=positions, columns=columns)
            now = replace(now, spans=spans[0] if spans else None)
            after = list(memory)

            def mix(index: int, projected: mx.array) -> mx.array:
                layer = graph.layers[index]
                known = _MEMORY[layer.kind == ATTENTION](*memory[index])
                out, left = layer.mixer.mix(projected, known, now)
                after[index] = _present(left)
                return out

            if not given:
                x = graph.embed(x)
            # Tokens without their rows: each change of shape would be an operation of its own. For the same reason
            # shapes are spelled out, so that a reshape to what is there is none.
            x = x.reshape(batch * length, x.shape[-1])
            if persistent.takes_layers(now, paged):
                *parts, after = persistent.layers_through(graph.layers, x, memory, now)
            else:
                parts = graph.through(x, mix, now)
            by_rows = lambda part: part.reshape(batch, length, part.shape[-1])
            if length == 1 or logits == "all":  # every column is asked for, so nothing looks for it
                asked = graph.head(*parts, None, logits and "all", hidden, now)
                return tuple(part if part is None else by_rows(part) for part in asked), after
            return tuple(graph.head(*map(by_rows, parts), None, logits, hidden, now)), after

        return compute

    def recordable(self, caches: list[Cache], step: Step, positions: Sequence[int], tokens: int) -> DecodeStep | None:
        """See `recordable.decode_step`. MLX's own product for small matrices gives way to labkit's: see `own`."""
        variants = step.plan.variants
        if variants.decode_rows == "gemv":
            step = replace(step, plan=replace(step.plan, variants=replace(variants, decode_rows="own")))
        compute = self._by_arrays(step, "last", False, False, paged=_in_pages(caches))
        return decode_step(self._graph.layers, compute, caches, step, positions, tokens)

    def _may_compile(self, step: Step) -> bool:
        """Compiled graphs are for GPUs, and for references, whose operations MLX can trace on a CPU."""
        on_graph = device_target() == step.plan.target or step.plan.target == "reference"
        return on_graph and step.plan.variants.compiled and step.spans is None

    def _paged_columns(self, caches: list[Cache], step: Step) -> Columns:
        """Where each row's tokens stand. Every attention layer has taken the same, and keeps as many in its tail."""
        rows = open_together([cache for cache in caches if isinstance(cache, PagedCache)], step.length)
        last = tuple(length + 1 + i for length in rows.lengths for i in range(step.length))
        return Columns(int32s((0,) * len(last)), int32s(last), rows.finished(), int32s(tuple(rows.held()))[:, None])

    def _counts(self, caches: list[Cache], step: Step) -> list[mx.array]:
        """int32 [1] each: the columns before this step, and those of them that are settled; the rows' padding [B] if
        they have some. Every attention layer has taken the same tokens.

        Two arrays of one number: MLX on CUDA makes longer ones in pages that move to the GPU when it first reads them,
        110 us of a step on an H200.
        """
        attending = [cache for cache in caches if cache.kind == "contiguous"]
        filled, settled, padding = 0, 0, []
        if attending:
            found = {cache.open_tail(step.length)[2].settled for cache in attending}
            if len(found) > 1:
                for cache in attending:
                    cache.settle()
                found = {cache.open_tail(step.length)[2].settled for cache in attending}
            filled, (settled,) = attending[0].size(), found
            padding = [attending[0].left_padding] if isinstance(attending[0], BatchedContiguous) else []
        return [*(mx.array([number], dtype=mx.int32) for number in (filled, settled)), *padding]


_COUNTS = 2
"""Arrays that `_counts` gives rows without padding."""


def _in_pages(caches: list[Cache]) -> bool:
    return any(issubclass(kind, PagedCache) for kind in set(map(type, caches)))


def _present(arrays: tuple) -> tuple:
    """A layer's memory without the table that only a paged cache has, its last."""
    return tuple(arrays) if arrays[-1] is not None else arrays[:-1]
