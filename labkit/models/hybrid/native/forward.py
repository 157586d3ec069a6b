"""One forward: records of everything that native code reads; then rows in one call each, or stages in tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from labkit.kernels.quantized_matmul.loops import ready
from labkit.kernels.quantized_matmul.panels import FORM, OUTPUTS, WIDTH
from labkit.kernels.workers import Workers
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.native import stages
from labkit.models.hybrid.native.cache_records import CacheRecords
from labkit.models.hybrid.native.records import CALL, FORWARD, LAYER, MODEL, address, filled
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Experts, NativeLayer

BLOCK = 96
"""Tokens of a task: many enough for each panel of weights to be worth its reading, few enough to share them out."""

TOGETHER = 32
"""Tokens a row from which threads share each stage: to wake one costs as much as a layer of a few."""


class Head(NamedTuple):
    """The last norm, the matrix of the vocabulary, int64 [FIELDS], and where it lies."""

    norm: np.ndarray
    arena: np.ndarray
    matrix: np.ndarray


class Layers:
    """All layers and the head as native code reads them, whatever it needs for them compiled.

    Attributes:
        records: LAYER [layers]. model: MODEL [1]. outputs: V, padded.
        frequencies: radians a position, float32 [rotary / 2].
    """

    def __init__(self, sizes: HybridConfig, layers: Sequence[NativeLayer], head: Head):
        self._held = layers, head, np.array([sizes.head_dim**-0.5], np.float32), np.array([sizes.eps], np.float32)
        self.records = np.empty(len(layers), LAYER)
        for number, layer in enumerate(layers):
            self.records[number] = layer.record(sizes, self._held[2])[0]
        values = {"layers": self.records, "count": len(layers), "width": sizes.hidden, "half": sizes.rotary // 2}
        values |= {"inputs": int(self.records["columns"].max()), "mixed": int(self.records["mixed"].max())}
        if isinstance(mlp := layers[0].mlp, Experts):
            values |= {"taken": sizes.top_k + mlp.slots, "experts": sizes.experts + mlp.slots}
            values |= {"product": int(mlp.routed.down[OUTPUTS])}
        self.outputs = int(head.matrix[OUTPUTS])
        values |= {"kv_heads": sizes.kv_heads, "eps": self._held[3], "outputs": self.outputs, **head._asdict()}
        self.model = filled(MODEL, **values)
        self.frequencies = (sizes.rope_base ** (-np.arange(0, sizes.rotary, 2) / sizes.rotary)).astype(np.float32)
        for layer in layers:
            _prepare(*layer.matrices)
        _prepare(head.matrix)

    def scored(self, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """What enters the head [n, D] of the stream x [M, D], for the tokens `chosen`, int64 [n]; -1: zeros."""
        states, model = np.empty((chosen.size, x.shape[1]), np.float32), self.model[0]
        norm = int(model["norm"]), int(model["eps"]), x.shape[1]
        stages.score.call(address(x), *norm, address(chosen), address(states), 0, chosen.size)
        return states


def _prepare(*matrices: np.ndarray) -> None:
    """Compile the products that these descriptions [.., FIELDS] ask for, where that was not done yet."""
    for form in {int(form) for matrix in matrices for form in matrix.reshape(-1, matrix.shape[-1])[:, FORM]}:
        ready(form)


class Arguments:
    """What native code reads of a forward besides the layers.

    Args:
        x: float32 [M, D], the residual stream, in place.
        chosen: int64 [B n], tokens among all, row after row, whose logits are wanted; -1 is padding.

    Attributes:
        record: FORWARD [1].
    """

    def __init__(self, layers: Layers, spans: Spans, x: np.ndarray, caches: CacheRecords, chosen: np.ndarray):
        self._layers, self._held = layers, (spans.starts, x, chosen, caches.first, caches.row)
        self._cosines, self._sines = np.empty((2, spans.tokens, layers.frequencies.size), np.float32)
        self.record = filled(
            FORWARD, x=x, starts=spans.starts, cosines=self._cosines, sines=self._sines, caches=caches.first,
            cache_rows=caches.row, chosen=chosen, each=chosen.size // spans.count,
        )  # fmt: skip
        self._call = partial(stages.rows.call, address(layers.model), address(self.record))
        self._logits = chosen.size, layers.outputs

    def stand_at(self, positions: np.ndarray) -> None:
        """Write the angles of these positions, int64 [M]."""
        angles = positions[:, None].astype(np.float32) * self._layers.frequencies
        np.cos(angles, out=self._cosines)
        np.sin(angles, out=self._sines)

    def new_logits(self) -> np.ndarray:
        """Where logits [B n, V padded] are to be written next."""
        logits = np.empty(self._logits, np.float32)
        self.record["logits"] = address(logits)
        return logits

    def rows(self, count: int, workers: Workers) -> None:
        """Each thread takes rows of its own from the first layer to the last, as nothing waits for them."""
        workers.share(self._call, count, -(-count // workers.threads))


def forward(
    layers: Layers, spans: Spans, x: np.ndarray, caches: CacheRecords, chosen: np.ndarray, workers: Workers
) -> np.ndarray:
    """Tokens through all layers and the head; arguments as for `Arguments`.

    Threads take rows of few tokens, and share each stage of many.

    Returns:
        logits [B n, V padded].
    """
    arguments = Arguments(layers, spans, x, caches, chosen)
    arguments.stand_at(spans.positions)
    logits = arguments.new_logits()
    if spans.tokens >= TOGETHER * spans.count and workers.threads > 1:
        shared = SharedForward(layers, spans, arguments.record, caches, workers)
        shared.through()
        shared.head(layers.scored(x, chosen), logits)
    else:
        arguments.rows(spans.count, workers)
    caches.record()
    return logits


class SharedForward:
    """Many tokens on their way through the layers, threads sharing each stage.

    Args:
        record: FORWARD [1], of these tokens.
    """

    def __init__(self, layers: Layers, spans: Spans, record: np.ndarray, caches: CacheRecords, workers: Workers):
        self._layers, self._spans, self._caches, self._workers = layers, spans, caches, workers
        self._call, sizes = np.zeros(1, CALL), np.empty(2, np.int64)
        everything = address(layers.model), address(record), 0, spans.count, BLOCK
        stages.room_for.call(*everything, address(sizes))
        self._room = np.empty(sizes[0], np.float32), np.empty(sizes[1], np.int64)
        stages.lay_out.call(*everything, *map(address, self._room), address(self._call))

    def through(self) -> None:
        """The stages of `stages.through`."""
        for number in range(len(self._layers.records)):
            self._layer(number)

    def head(self, states: np.ndarray, logits: np.ndarray) -> None:
        """Logits [n, V padded] of what enters the head [n, D]."""
        if not len(states):
            return
        model = self._layers.model[0]
        matrix = int(model["arena"]), int(model["matrix"])
        stage = partial(stages.head.call, address(states), len(states), *matrix, address(logits), self._layers.outputs)
        self._workers.share(stage, self._layers.outputs // WIDTH, 64)

    def _layer(self, number: int) -> None:
        layer, w = self._layers.records[number : number + 1], self._layers.records[number]
        records = address(layer), address(self._caches.first[number : number + 1]), address(self._call)
        tokens, rows = self._spans.tokens, self._spans.count

        def share(stage, count: int, size: int = 1) -> None:
            self._workers.share(partial(stage.call, *records), count, size)

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
