"""One forward: records of everything that native code reads, then the stages: few tokens in one call, many in tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from labkit.kernels.attention.loops import QUERIES
from labkit.kernels.quantized_matmul.loops import ready
from labkit.kernels.quantized_matmul.panels import FORM, OUTPUTS, WIDTH
from labkit.kernels.workers import Workers
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.native import stages
from labkit.models.hybrid.native.cache_records import CacheRecords
from labkit.models.hybrid.native.records import CALL, LAYER, address, carved, filled
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Experts, NativeLayer

BLOCK = 96
"""Tokens of a task: many enough for each panel of weights to be worth its reading, few enough to share them out."""

TOGETHER = 32
"""Tokens a row from which threads share each stage: to wake one costs as much as a layer of a few."""


class Head(NamedTuple):
    """The matrix of the vocabulary, int64 [FIELDS], and where it lies."""

    arena: np.ndarray
    matrix: np.ndarray


class Layers:
    """All layers and the head as native code reads them, whatever it needs for them compiled.

    Attributes:
        records: LAYER [layers]. frequencies: radians a position, float32 [rotary / 2].
        head: addresses of the head's arena and matrix. outputs: V, padded.
        inputs, mixed: floats of a token's row in the widest layer.
        routed: experts of a token, experts of a layer, floats of a row of their outputs; zeros in a dense model.
    """

    def __init__(self, sizes: HybridConfig, layers: Sequence[NativeLayer], norm: np.ndarray, head: Head):
        self.sizes, self.layers, self._last = sizes, layers, (norm, *head)
        self.head, self.outputs = (address(head.arena), address(head.matrix)), int(head.matrix[OUTPUTS])
        self._eps = np.array([sizes.eps], np.float32)
        self._normed = address(norm), address(self._eps), sizes.hidden
        self.frequencies = (sizes.rope_base ** (-np.arange(0, sizes.rotary, 2) / sizes.rotary)).astype(np.float32)
        self._scale = np.array([sizes.head_dim**-0.5], np.float32)
        self.records = np.empty(len(layers), LAYER)
        for number, layer in enumerate(layers):
            self.records[number] = layer.record(sizes, self._scale)[0]
        self.inputs, self.mixed = (int(self.records[name].max()) for name in ("columns", "mixed"))
        mlp, self.routed = layers[0].mlp, (0, 0, 0)
        if isinstance(mlp, Experts):
            self.routed = sizes.top_k + mlp.slots, sizes.experts + mlp.slots, int(mlp.routed.down[OUTPUTS])
        for layer in layers:
            _prepare(*layer.matrices)
        _prepare(head.matrix)

    def scored(self, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """What enters the head [n, D] of the stream x [M, D], for the tokens `chosen`, int64 [n]; -1: zeros."""
        states = np.empty((chosen.size, x.shape[1]), np.float32)
        stages.score.call(address(x), *self._normed, address(chosen), address(states), 0, chosen.size)
        return states


def _prepare(*matrices: np.ndarray) -> None:
    """Compile the products that these descriptions [.., FIELDS] ask for, where that was not done yet."""
    for form in {int(form) for matrix in matrices for form in matrix.reshape(-1, matrix.shape[-1])[:, FORM]}:
        ready(form)


def forward(
    layers: Layers, spans: Spans, x: np.ndarray, caches: CacheRecords, chosen: np.ndarray, workers: Workers
) -> np.ndarray:
    """Tokens through all layers and the head.

    Few tokens a row: each thread takes rows of its own from the first layer to the last, as nothing waits for them.
    Many tokens: threads share each stage.

    Args:
        x: float32 [M, D], the residual stream, in place.
        chosen: int64 [B n], tokens among all, row after row, whose logits are wanted; -1 is padding.

    Returns:
        logits [B n, V padded].
    """
    logits = np.empty((chosen.size, layers.outputs), np.float32)
    each = chosen.size // spans.count
    together = spans.tokens >= TOGETHER * spans.count and workers.threads > 1

    def some(begin: int, end: int) -> None:
        part, first, last = spans.some(begin, end), spans.starts[begin], spans.starts[end]
        asked = slice(begin * each, end * each)
        stream = Forward(layers, part, x[first:last], caches.from_row(begin), workers if together else None)
        stream.through()
        stream.head(np.maximum(chosen[asked] - first, -1), logits[asked])

    if together:
        some(0, spans.count)
    else:
        workers.share(some, spans.count, -(-spans.count // workers.threads))
    caches.record()
    return logits


class Forward:
    """The residual stream of some rows' tokens on its way through the layers.

    Args:
        x: float32 [M, D], the stream, in place. caches: CACHE [layers], of these rows.
        workers: who share each stage; None: the calling thread alone computes all of them.
    """

    def __init__(self, layers: Layers, spans: Spans, x: np.ndarray, caches: np.ndarray, workers: Workers | None = None):
        self.spans, self.x, self._layers, self._caches, self._workers = spans, x, layers, caches, workers
        self._held: list[np.ndarray] = []
        self._call = self._room()

    def through(self) -> None:
        """x through all blocks."""
        count, call = len(self._caches), address(self._call)
        if self._workers is None:
            stages.through.call(address(self._layers.records), address(self._caches), call, 0, count)
        else:
            for number in range(count):
                self._layer(number, call)

    def head(self, chosen: np.ndarray, logits: np.ndarray) -> None:
        """Logits [n, V padded] of these tokens; -1 is padding."""
        if not chosen.size:
            return
        layers, states = self._layers, self._layers.scored(self.x, chosen)
        arrays = address(states), chosen.size, *layers.head, address(logits), layers.outputs
        self._share(partial(stages.head.call, *arrays), layers.outputs // WIDTH, 64)

    # -- stages --------------------------------------------------------------------------------------------------------

    def _layer(self, number: int, call: int) -> None:
        """The stages of `stages.through`, each shared between threads."""
        layer, w = self._layers.records[number : number + 1], self._layers.records[number]
        records = address(layer), address(self._caches[number : number + 1]), call
        tokens, rows = self.spans.tokens, self.spans.count

        def share(stage, count: int, size: int = 1) -> None:
            self._share(partial(stage.call, *records), count, size)

        share(stages.enter, tokens, BLOCK)
        if w["attends"]:
            share(stages.store, tokens, BLOCK)
            share(stages.attend, int(self._call["block_count"][0]))
        else:
            share(stages.delta, rows * int(w["key_heads"]))
            stages.remember.call(*records, 0, rows)
        share(stages.leave, tokens, BLOCK)
        if w["experts"]:
            share(stages.route, tokens, BLOCK)
            stages.assign.call(*records, 0, 1)
            share(stages.experts, int(self._call["expert_count"][0]))
            share(stages.combine, tokens, BLOCK)
        if w["gate"]:
            share(stages.dense, tokens, BLOCK)

    def _share(self, stage, count: int, size: int = 1) -> None:
        """stage(begin, end) over all its items, `size` of them a task."""
        if self._workers is None:
            stage(0, count)
        else:
            self._workers.share(stage, count, size)

    # -- records -------------------------------------------------------------------------------------------------------

    def _room(self) -> np.ndarray:
        layers, sizes, spans = self._layers, self._layers.sizes, self.spans
        tokens = spans.tokens
        each = max(tokens, 1) if self._workers is None else BLOCK
        angles = spans.positions[:, None].astype(np.float32) * layers.frequencies
        blocks = _query_blocks(spans.starts.tolist(), sizes.kv_heads)
        arrays = {
            "x": self.x, "starts": spans.starts, "row_of": spans.rows, "blocks": blocks, "cosines": np.cos(angles),
            "sines": np.sin(angles),
        }  # fmt: skip
        taken, number, row = layers.routed
        floats = {"normed": self.x.size, "inputs": tokens * layers.inputs, "mixed": tokens * layers.mixed}
        floats |= {"factors": tokens * (taken + 1), "products": tokens * taken * row}
        whole = dict.fromkeys(("chosen", "order", "places"), tokens * taken)
        whole["expert_blocks"] = 3 * (number + tokens * taken // each)
        (first, floats), (second, whole) = carved(np.float32, **floats), carved(np.int64, **whole)
        self._held += [first, second, *arrays.values()]
        counts = {"tokens": tokens, "rows": spans.count, "block_count": len(blocks), "expert_rows": each}
        return filled(CALL, **arrays, **floats, **whole, **counts)


def _query_blocks(starts: list[int], kv_heads: int) -> np.ndarray:
    """int64 [n, BLOCK_FIELDS], the last first: they see the most keys."""
    blocks = [
        (row, head, begin, min(QUERIES, end - begin))
        for row, (start, end) in enumerate(pairwise(starts))
        for begin in range(start, end, QUERIES)
        for head in range(kv_heads)
    ]
    return np.array(blocks[::-1], np.int64).reshape(-1, 4)
