"""One forward: records of everything that native code reads, then the stages: few tokens in one call, many in tasks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, Recurrent
from labkit.caches.contiguous import Columns
from labkit.kernels.attention.loops import QUERIES
from labkit.kernels.quantized_matmul.loops import ready
from labkit.kernels.quantized_matmul.panels import FORM, OUTPUTS, WIDTH
from labkit.kernels.workers import Workers
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.native import stages
from labkit.models.hybrid.native.records import CACHE, CALL, LAYER, address, carved, filled
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Experts, NativeLayer

BLOCK = 96
"""Tokens of a task: many enough for each panel of weights to be worth its reading, few enough to share them out."""

TOGETHER = 32
"""Tokens from which threads share the work: to wake one costs as much as a layer of a few."""


class Layers:
    """All layers as native code reads them, whatever it needs for them compiled.

    Attributes:
        records: LAYER [layers].
        inputs, mixed: floats of a token's row in the widest layer.
        routed: experts of a token, experts of a layer, floats of a row of their outputs; zeros in a dense model.
    """

    def __init__(self, sizes: HybridConfig, layers: Sequence[NativeLayer]):
        self.sizes, self.layers = sizes, layers
        self.eps = np.array([sizes.eps], np.float32)
        self._scale = np.array([sizes.head_dim**-0.5], np.float32)
        self.records = np.empty(len(layers), LAYER)
        for number, layer in enumerate(layers):
            self.records[number] = layer.record(sizes, self._scale)[0]
        self.inputs, self.mixed = (int(self.records[name].max()) for name in ("columns", "mixed"))
        mlp, self.routed = layers[0].mlp, (0, 0, 0)
        if isinstance(mlp, Experts):
            self.routed = sizes.top_k + mlp.slots, sizes.experts + mlp.slots, int(mlp.routed.down[OUTPUTS])
        for layer in layers:
            prepare(*layer.matrices)


def prepare(*matrices: np.ndarray) -> None:
    """Compile the products that these descriptions [.., FIELDS] ask for, where that was not done yet."""
    for form in {int(form) for matrix in matrices for form in matrix.reshape(-1, matrix.shape[-1])[:, FORM]}:
        ready(form)


class Forward:
    """The residual stream of some tokens on its way through the layers.

    Attributes:
        x: float32 [M, D].
    """

    def __init__(self, layers: Layers, spans: Spans, x: np.ndarray, caches: Sequence[Cache], workers: Workers):
        self.spans, self.x, self._layers, self._workers = spans, x, layers, workers
        self._shared = spans.tokens >= TOGETHER and workers.threads > 1
        self._recorded: list[tuple[Recurrent, np.ndarray, np.ndarray]] = []
        self._held: list[np.ndarray] = []
        self._caches = np.array([self._cache(cache) for cache in caches], CACHE)
        self._call = self._room()

    def through(self) -> None:
        """x through all blocks; what a checkpoint wants is recorded in the caches."""
        count, call = len(self._caches), address(self._call)
        if not self._shared:
            stages.through.call(address(self._layers.records), address(self._caches), call, 0, count)
        else:
            for number in range(count):
                self._layer(number, call)
        for recorder, tails, states in self._recorded:
            recorder.record(0, mx.array(tails))
            recorder.record(1, mx.array(states))

    def head(self, norm: np.ndarray, arena: np.ndarray, matrix: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Logits [n, V padded] of these tokens, numbered among all; -1 is padding."""
        prepare(matrix)
        states, outputs = self.states(norm, chosen), int(matrix[OUTPUTS])
        logits = np.empty((chosen.size, outputs), np.float32)
        rows, at = (address(states), chosen.size), (address(arena), address(matrix), address(logits), outputs)
        self._share(partial(stages.head.call, *rows, *at), outputs // WIDTH, 64)
        return logits

    def states(self, norm: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """What enters the head [n, D], zeros for padding."""
        states, width = np.empty((chosen.size, self.x.shape[1]), np.float32), self.x.shape[1]
        arrays = address(self.x), address(norm), address(self._layers.eps), width, address(chosen), address(states)
        stages.score.call(*arrays, 0, chosen.size)
        return states

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
        if self._shared:
            self._workers.share(stage, count, size)
        else:
            stage(0, count)

    # -- records -------------------------------------------------------------------------------------------------------

    def _hold(self, array: np.ndarray) -> int:
        """The address of an array that lives as long as this forward."""
        self._held.append(array)
        return address(array)

    def _room(self) -> np.ndarray:
        layers, sizes, spans = self._layers, self._layers.sizes, self.spans
        tokens, each = spans.tokens, BLOCK if self._shared else max(spans.tokens, 1)
        angles = spans.positions[:, None].astype(np.float32) * _frequencies(sizes)
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

    def _cache(self, cache: Cache) -> tuple[int, ...]:
        """The fields of CACHE."""
        spans = self.spans
        if isinstance(cache, Columns):
            keys, values, first, column = _columns(cache, spans)
            return self._hold(keys), self._hold(values), keys.shape[2], self._hold(first), self._hold(column), *[0] * 5
        tail, state = cache.host_states(spans.count)
        recorded, at = 0, (0, 0)
        if cache.recording and spans.tokens == spans.count * spans.length:
            # The cache may be asked to keep some of the tokens only.
            recorded = spans.length
            tails, states = (np.empty((spans.count, recorded, *x.shape[1:]), np.float32) for x in (tail, state))
            self._recorded.append((cache, tails, states))
            at = address(states), address(tails)
        return *[0] * 5, self._hold(tail), self._hold(state), recorded, *at


@cache
def _frequencies(sizes: HybridConfig) -> np.ndarray:
    """Radians a position, float32 [rotary / 2]."""
    return (sizes.rope_base ** (-np.arange(0, sizes.rotary, 2) / sizes.rotary)).astype(np.float32)


def _columns(cache: Columns, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buffers with room for the tokens; for each row its first column in use, and that of its first new token.

    Rows stay right-justified: those that take fewer tokens than the longest move to the right first.
    """
    filled = cache.size()
    if not isinstance(cache, BatchedContiguous):
        keys, values = cache.host_columns(spans.longest, spans.count)
        return keys, values, np.zeros(spans.count, np.int64), np.full(spans.count, filled)
    padding = np.asarray(cache.left_padding).astype(np.int64)
    shift = spans.length - spans.last
    start = min(filled, *padding[shift > 0]) if shift.any() else filled
    keys, values = cache.host_columns(spans.length, spans.count, start=int(start))
    for row in np.flatnonzero(shift):
        begin, by = int(padding[row]), int(shift[row])
        if begin < filled:
            for buffer in (keys, values):
                buffer[row, :, begin + by : filled + by] = buffer[row, :, begin:filled].copy()
    return keys, values, padding + shift, filled + shift + spans.first


def _query_blocks(starts: list[int], kv_heads: int) -> np.ndarray:
    """int64 [n, BLOCK_FIELDS], the last first: they see the most keys."""
    blocks = [
        (row, head, begin, min(QUERIES, end - begin))
        for row, (start, end) in enumerate(pairwise(starts))
        for begin in range(start, end, QUERIES)
        for head in range(kv_heads)
    ]
    return np.array(blocks[::-1], np.int64).reshape(-1, 4)
