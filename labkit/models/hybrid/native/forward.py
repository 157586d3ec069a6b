"""One forward: the stages of each layer in order, each shared between threads where that pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, Recurrent
from labkit.caches.contiguous import Columns
from labkit.kernels.attention.loops import QUERIES, attention_blocks, attention_inputs
from labkit.kernels.gated_delta.loops import mixer_heads, tails_after
from labkit.kernels.grouped_matmul.loops import combine, experts
from labkit.kernels.quantized_matmul.panels import OUTPUTS, WIDTH
from labkit.kernels.routing.loops import group
from labkit.kernels.workers import Workers
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.native.loops import dense, enter, head, leave, route, score, sparse
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Attention, Delta, Dense, Experts, NativeLayer

BLOCK = 96
"""Tokens of a task: many enough for each panel of weights to be worth its reading, few enough to share them out."""

TOGETHER = 32
"""Tokens from which threads share the work: to wake one costs as much as a layer of a few."""

Stage = Callable[[int, int], None]
"""Works on the items `begin` to `end`: tokens, heads, blocks of queries or of an expert's rows."""


class Forward:
    """The residual stream of some tokens on its way through the layers.

    Attributes:
        x: float32 [M, D].
    """

    def __init__(self, sizes: HybridConfig, spans: Spans, x: np.ndarray, workers: Workers):
        self.sizes, self.spans, self.x = sizes, spans, x
        self.eps = np.float32(sizes.eps)
        self._workers, self._shared = workers, spans.tokens >= TOGETHER and workers.threads > 1
        self._normed = np.empty_like(x)
        angles = spans.positions[:, None].astype(np.float32) * _frequencies(sizes)
        self._cosines, self._sines = np.cos(angles), np.sin(angles)

    def layer(self, weights: NativeLayer, cache: Cache) -> None:
        """x through one block; its cache is updated."""
        mixer = weights.mixer
        inputs = np.empty((self.spans.tokens, mixer.columns), np.float32)
        self._tokens(partial(enter, self.x, weights.input_norm, self.eps, weights.arena, mixer.inputs, inputs))
        mixed = (self._delta if isinstance(mixer, Delta) else self._attention)(mixer, inputs, cache)
        output = weights.arena, mixer.output, self.x, weights.post_norm, self.eps, self._normed
        self._tokens(partial(leave, mixed, *output))
        (self._dense if isinstance(weights.mlp, Dense) else self._sparse)(weights.arena, weights.mlp)

    def head(self, norm: np.ndarray, arena: np.ndarray, matrix: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Logits [n, V padded] of these tokens, numbered among all; -1 is padding."""
        states = self.states(norm, chosen)
        logits = np.empty((chosen.size, matrix[OUTPUTS]), np.float32)
        self._share(partial(head, states, arena, matrix, logits), int(matrix[OUTPUTS]) // WIDTH, size=64)
        return logits

    def states(self, norm: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """What enters the head [n, D], zeros for padding."""
        states = np.empty((chosen.size, self.x.shape[1]), np.float32)
        score(self.x, norm, self.eps, chosen, states, 0, chosen.size)
        return states

    # -- stages --------------------------------------------------------------------------------------------------------

    def _tokens(self, stage: Stage) -> None:
        self._share(stage, self.spans.tokens, size=BLOCK)

    def _share(self, stage: Stage, count: int, *, size: int = 1) -> None:
        """A stage over all its items, `size` of them a task."""
        if not self._shared:
            stage(0, count)
            return
        self._workers.share(stage, count, size)

    def _delta(self, mixer: Delta, inputs: np.ndarray, cache: Recurrent) -> np.ndarray:
        sizes, spans = self.sizes, self.spans
        tail, state = cache.host_states(spans.count)
        mixed = np.empty((spans.tokens, sizes.delta_width), np.float32)
        recorded = spans.length if cache.recording and spans.tokens == spans.count * spans.length else 0
        states = np.empty((spans.count, recorded, *state.shape[1:]), np.float32)
        weights = mixer.conv, mixer.a_log, mixer.dt_bias, mixer.norm, self.eps
        heads = (sizes.key_heads, sizes.value_heads)
        stage = partial(
            mixer_heads, inputs, tail, state, *weights, heads, spans.starts, recorded > 0, states, mixed
        )  # fmt: skip
        self._share(stage, spans.count * sizes.key_heads)
        after = np.empty((max(recorded, 1), *tail.shape), np.float32)
        for t in range(recorded):
            tails_after(inputs, tail, spans.starts, t + 1, after[t])
        if recorded:
            # The cache may be asked to keep some of the tokens only.
            cache.record(0, mx.array(after.swapaxes(0, 1)))
            cache.record(1, mx.array(states))
        else:
            tails_after(inputs, tail, spans.starts, spans.length, after[0])
        tail[:] = after[-1]
        return mixed

    def _attention(self, mixer: Attention, inputs: np.ndarray, cache: Columns) -> np.ndarray:
        sizes, spans = self.sizes, self.spans
        keys, values, first, column = _room(cache, spans)
        heads = (sizes.query_heads, sizes.kv_heads)
        columns = column[spans.rows] + spans.columns - spans.first[spans.rows]
        norms = mixer.q_norm, mixer.k_norm, self.eps, self._cosines, self._sines
        self._tokens(partial(attention_inputs, inputs, *norms, heads, spans.rows, columns, keys, values))
        mixed = np.empty((spans.tokens, sizes.query_heads * sizes.head_dim), np.float32)
        scale, blocks = np.float32(sizes.head_dim**-0.5), _query_blocks(spans, sizes.kv_heads, first, column)
        self._share(partial(attention_blocks, inputs, keys, values, heads, scale, blocks, mixed), len(blocks))
        return mixed

    def _dense(self, arena: np.ndarray, mlp: Dense, factors: np.ndarray | None = None, column: int = -1) -> None:
        factors = np.empty((0, 0), np.float32) if factors is None else factors
        self._tokens(partial(dense, self._normed, arena, mlp.gate, mlp.up, mlp.down, factors, column, self.x))

    def _sparse(self, arena: np.ndarray, mlp: Experts) -> None:
        sizes, tokens, routed = self.sizes, self.spans.tokens, mlp.routed
        number, taken = sizes.experts + mlp.slots, sizes.top_k + mlp.slots
        factors = np.empty((tokens, taken + (mlp.shared is not None)), np.float32)
        routing = sizes.experts, sizes.top_k, sizes.renormalise
        if not self._shared:
            matrices = mlp.router, routed.gate, routed.up, routed.down
            sparse(self._normed, arena, *matrices, mlp.slots, *routing, factors, self.x)
        else:
            chosen = np.empty((tokens, taken), np.int32)
            self._tokens(partial(route, self._normed, arena, mlp.router, *routing, chosen, factors))
            order, places = np.empty(chosen.size, np.int32), np.empty_like(chosen)
            blocks = np.empty((number + chosen.size // BLOCK, 3), np.int64)
            count = group(chosen, number, order, places, BLOCK, blocks)
            products = np.empty((chosen.size, routed.down[OUTPUTS]), np.float32)
            matrices = routed.gate, routed.up, routed.down
            self._share(partial(experts, self._normed, arena, *matrices, blocks, order, products), count)
            self._tokens(partial(combine, products, places, factors, self.x))
        if mlp.shared is not None:
            self._dense(arena, mlp.shared, factors, taken)


@cache
def _frequencies(sizes: HybridConfig) -> np.ndarray:
    """Radians a position, float32 [rotary / 2]."""
    return (sizes.rope_base ** (-np.arange(0, sizes.rotary, 2) / sizes.rotary)).astype(np.float32)


def _room(cache: Columns, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buffers with room for the tokens; for each row its first column in use, and that of its first new token.

    Rows stay right-justified: those that take fewer tokens than the longest move to the right first.
    """
    filled = cache.size()
    if not isinstance(cache, BatchedContiguous):
        new = int((spans.last - spans.first).max())
        keys, values = cache.host_columns(new, spans.count)
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


def _query_blocks(spans: Spans, kv_heads: int, first: np.ndarray, column: np.ndarray) -> np.ndarray:
    """int64 [n, BLOCK_FIELDS], the last first: they see the most keys."""
    blocks = [
        (row, head, first[row], column[row] + begin - start, begin, min(QUERIES, end - begin))
        for row, (start, end) in enumerate(zip(spans.starts[:-1], spans.starts[1:], strict=True))
        for begin in range(int(start), int(end), QUERIES)
        for head in range(kv_heads)
    ]
    return np.array(blocks[::-1], np.int64).reshape(-1, 6)
