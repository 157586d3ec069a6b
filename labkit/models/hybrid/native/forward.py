"""One forward: the stages of each layer in order, each shared between threads where that pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from labkit.caches import BatchedContiguous, Cache, Recurrent
from labkit.caches.contiguous import Columns
from labkit.kernels.attention.loops import QUERIES, attention_block, attention_inputs
from labkit.kernels.gated_delta.loops import mixer_heads, tail_after
from labkit.kernels.grouped_matmul.loops import combine, expert_rows
from labkit.kernels.quantized_matmul.panels import OUTPUTS, ROWS, WIDTH
from labkit.kernels.routing.loops import group
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.native.loops import dense, enter, head, leave, route, score
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Attention, Delta, Dense, Experts, NativeLayer
from labkit.models.hybrid.native.workers import Workers

BLOCK = 96
"""Tokens of a task: many enough for each panel of weights to be worth its reading, few enough to share them out."""

TOGETHER = 32
"""Tokens from which threads share the work: waking one costs as much as a layer of fewer."""


class Forward:
    """The residual stream of some tokens on its way through the layers.

    Attributes:
        x: float32 [M, D].
    """

    def __init__(self, sizes: HybridConfig, spans: Spans, x: np.ndarray, workers: Workers):
        self.sizes, self.spans, self.x = sizes, spans, x
        self.eps = np.float32(sizes.eps)
        self._workers = workers if spans.tokens >= TOGETHER else Workers(1)
        self._normed = np.empty_like(x)
        angles = spans.positions[:, None].astype(np.float32) * _frequencies(sizes)
        self._cosines, self._sines = np.cos(angles), np.sin(angles)

    def layer(self, weights: NativeLayer, cache: Cache) -> None:
        """x through one block; its cache is updated."""
        mix = self._delta if isinstance(weights.mixer, Delta) else self._attention
        mixed = mix(weights, weights.mixer, cache)
        self._tokens(
            partial(
                leave, mixed, weights.arena, weights.mixer.output, self.x, weights.post_norm, self.eps, self._normed
            )
        )
        if isinstance(weights.mlp, Dense):
            self._dense(weights, weights.mlp, np.empty((0, 0), np.float32), -1)
        else:
            self._experts(weights, weights.mlp)

    def head(self, norm: np.ndarray, arena: np.ndarray, matrix: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Logits [n, V padded] of these tokens."""
        states = self.states(norm, chosen)
        logits = np.empty((chosen.size, matrix[OUTPUTS]), np.float32)
        panels = matrix[OUTPUTS] // WIDTH
        parts = 8 * self._workers.threads if chosen.size * panels > 4096 else 1
        edges = np.linspace(0, panels, parts + 1).astype(np.int64)
        self._workers.run(lambda i: head(states, arena, matrix, edges[i], edges[i + 1], logits), parts)
        return logits

    def states(self, norm: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """What enters the head [n, D], zeros for padding."""
        states = np.empty((chosen.size, self.x.shape[1]), np.float32)
        score(self.x, norm, self.eps, chosen, states, 0, chosen.size)
        return states

    # -- stages --------------------------------------------------------------------------------------------------------

    def _tokens(self, stage: Callable[[int, int], None]) -> None:
        """stage(begin, end) over blocks of all tokens."""
        count = self.spans.tokens
        self._workers.run(lambda i: stage(i * BLOCK, min(count, (i + 1) * BLOCK)), -(-count // BLOCK))

    def _projected(self, weights: NativeLayer) -> np.ndarray:
        matrices = weights.mixer.inputs
        columns = int(matrices[:, ROWS].sum()) + WIDTH
        inputs = np.empty((self.spans.tokens, columns), np.float32)
        self._tokens(partial(enter, self.x, weights.input_norm, self.eps, weights.arena, matrices, inputs))
        return inputs

    def _delta(self, weights: NativeLayer, mixer: Delta, cache: Recurrent) -> np.ndarray:
        sizes, spans = self.sizes, self.spans
        inputs = self._projected(weights)
        tail, state = cache.host_states(spans.count)
        mixed = np.empty((spans.tokens, sizes.delta_width), np.float32)
        recorded = spans.length if cache.recording and spans.tokens == spans.count * spans.length else 0
        states = np.empty((spans.count, recorded, *state.shape[1:]), np.float32)
        heads = (sizes.key_heads, sizes.value_heads)

        def task(number: int) -> None:
            row, key_head = divmod(number, sizes.key_heads)
            mixer_heads(
                inputs, tail, state, mixer.conv, mixer.a_log, mixer.dt_bias, mixer.norm, self.eps, heads,
                spans.starts[row], spans.starts[row + 1], row, key_head, recorded > 0, states, mixed,
            )  # fmt: skip

        self._workers.run(task, spans.count * sizes.key_heads)
        if recorded:
            _record(cache, inputs, tail, states, spans)
        after = np.empty_like(tail)
        for row in range(spans.count):
            tail_after(inputs, tail, spans.starts[row], spans.starts[row + 1], row, after[row])
        tail[:] = after
        return mixed

    def _attention(self, weights: NativeLayer, mixer: Attention, cache: Columns) -> np.ndarray:
        sizes, spans = self.sizes, self.spans
        inputs = self._projected(weights)
        keys, values, first, column = _room(cache, spans)
        heads = (sizes.query_heads, sizes.kv_heads)
        columns = column[spans.rows] + spans.columns - spans.first[spans.rows]
        self._tokens(
            partial(
                attention_inputs,
                inputs,
                mixer.q_norm,
                mixer.k_norm,
                self.eps,
                self._cosines,
                self._sines,
                heads,
                spans.rows,
                columns,
                keys,
                values,
            )
        )
        mixed = np.empty((spans.tokens, sizes.query_heads * sizes.head_dim), np.float32)
        scale = np.float32(sizes.head_dim**-0.5)
        blocks = [
            (row, head, begin)
            for row in range(spans.count)
            for begin in range(int(spans.starts[row]), int(spans.starts[row + 1]), QUERIES)
            for head in range(sizes.kv_heads)
        ]

        def task(number: int) -> None:
            # The last blocks see the most keys: they go first.
            row, head, begin = blocks[len(blocks) - 1 - number]
            count = min(QUERIES, spans.starts[row + 1] - begin)
            at = column[row] + begin - spans.starts[row]
            attention_block(inputs, keys, values, heads, scale, row, head, first[row], at, begin, count, mixed)

        self._workers.run(task, len(blocks))
        return mixed

    def _dense(self, weights: NativeLayer, mlp: Dense, factors: np.ndarray, column: int) -> None:
        self._tokens(partial(dense, self._normed, weights.arena, mlp.gate, mlp.up, mlp.down, factors, column, self.x))

    def _experts(self, weights: NativeLayer, mlp: Experts) -> None:
        sizes, tokens = self.sizes, self.spans.tokens
        taken = sizes.top_k + mlp.slots
        chosen = np.empty((tokens, taken), np.int32)
        factors = np.empty((tokens, taken + (mlp.shared is not None)), np.float32)
        self._tokens(
            partial(
                route,
                self._normed,
                weights.arena,
                mlp.router,
                sizes.experts,
                sizes.top_k,
                sizes.renormalise,
                chosen,
                factors,
            )
        )
        offsets = np.empty(sizes.experts + mlp.slots + 1, np.int64)
        order, places = np.empty(chosen.size, np.int32), np.empty_like(chosen)
        group(chosen, offsets, order, places)
        products = np.empty((chosen.size, mlp.routed.down[OUTPUTS]), np.float32)
        busy = [
            (expert, int(begin))
            for expert in np.flatnonzero(np.diff(offsets))
            for begin in range(int(offsets[expert]), int(offsets[expert + 1]), BLOCK)
        ]

        def task(number: int) -> None:
            expert, begin = busy[number]
            end = min(begin + BLOCK, offsets[expert + 1])
            routed = mlp.routed
            expert_rows(
                self._normed, weights.arena, routed.gate, routed.up, routed.down, expert, order, begin, end, products
            )

        self._workers.run(task, len(busy))
        self._tokens(partial(combine, products, places, factors, self.x))
        if mlp.shared is not None:
            self._dense(weights, mlp.shared, factors, taken)


def _frequencies(sizes: HybridConfig) -> np.ndarray:
    """Radians a position, float32 [rotary / 2]."""
    return (sizes.rope_base ** (-np.arange(0, sizes.rotary, 2) / sizes.rotary)).astype(np.float32)


def _record(cache: Recurrent, inputs: np.ndarray, tail: np.ndarray, states: np.ndarray, spans: Spans) -> None:
    """Hand the states after each token to the cache, which may be asked to keep some of the tokens only."""
    import mlx.core as mx

    tails = np.empty((spans.count, spans.length, *tail.shape[1:]), np.float32)
    for row in range(spans.count):
        start = spans.starts[row]
        for t in range(spans.length):
            tail_after(inputs, tail, start, start + t + 1, row, tails[row, t])
    cache.record(0, mx.array(tails))
    cache.record(1, mx.array(states))


def _room(cache: Columns, spans: Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Buffers with room for the tokens; for each row its first column in use, and that of its first new token.

    Rows stay right-justified: those that take fewer tokens than the longest move to the right first.
    """
    batched = isinstance(cache, BatchedContiguous)
    filled = cache.size()
    if not batched:
        keys, values = cache.host_columns(int((spans.last - spans.first).max()), spans.count)
        return keys, values, np.zeros(spans.count, np.int64), np.full(spans.count, filled)
    padding = np.asarray(cache.left_padding).astype(np.int64)
    shift = spans.length - spans.last
    start = int((padding[shift > 0]).min()) if shift.any() else filled
    keys, values = cache.host_columns(spans.length, spans.count, start=min(start, filled))
    for row in np.flatnonzero(shift):
        begin, by = int(padding[row]), int(shift[row])
        if begin < filled:
            for buffer in (keys, values):
                buffer[row, :, begin + by : filled + by] = buffer[row, :, begin:filled].copy()
    return keys, values, padding + shift, filled + shift + spans.first
