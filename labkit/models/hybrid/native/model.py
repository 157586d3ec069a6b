"""The hybrid on a CPU behind the forward contract: what is read of rows and caches before, and noted after."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, lacking
from labkit.models.contract import LogitsFor, Output
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.hybrid import Hybrid
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Arena, NativeLayer, vector
from labkit.models.hybrid.native.workers import Workers
from labkit.models.hybrid.packing import ModelWeights
from labkit.models.rows import Rows


class NativeHybrid(Hybrid):
    """The specialised graph in compiled loops: float32, computed as it is called, nothing left lazy.

    Args:
        weights: packed (`labkit.models.hybrid.packing.pack`); laid out anew a layer at a time.
        config: the checkpoint's config.json.
        threads: that share a chunk of tokens; by default the processors that this process may use. A few rows of
            decoding are computed by the calling thread alone.
    """

    def __init__(self, weights: ModelWeights, config: dict[str, Any], *, threads: int | None = None):
        self.config, self.dtype = config, mx.float32
        self.sizes = sizes = HybridConfig.read(config)
        self.notes = sizes.notes
        self.vocab_size, self.num_layers = sizes.vocabulary, len(sizes.layer_kinds)
        self.layer_kinds = list(sizes.layer_kinds)
        self.layouts = [self._layout(kind) for kind in sizes.layer_kinds]
        self.limits = lacking(self.make_caches(), self.make_caches(2))
        self._workers = Workers(threads)
        arena = Arena()
        self._embedding = arena.add(weights.embedding.parts[0])
        self._head_matrix = self._embedding if weights.head is weights.embedding else arena.add(weights.head.parts[0])
        arena.close()
        self._arena, self._norm = arena.data, vector(weights.norm)
        self._layers = [NativeLayer.pack(layer) for layer in weights.layers]
        self.weights_bytes = self._arena.nbytes + sum(layer.nbytes for layer in self._layers)

    def __call__(
        self,
        tokens: mx.array,
        caches: list[Cache],
        rows: Rows,
        *,
        logits: LogitsFor = "last",
        hidden: bool = False,
        embeddings: mx.array | None = None,
    ) -> Output:
        """See `labkit.models.contract.Model`. Rows with adapters, block tables or media positions are refused.

        Logits and hidden states of padded columns are those of a zero state.
        """
        from labkit.models.hybrid.native.forward import Forward

        self._check(tokens, caches, rows, embeddings)
        spans = Spans.of(rows, tokens.shape[1])
        columns = spans.asked(logits, rows.lengths)
        chosen = spans.among(columns)
        x = self._embedded(tokens, spans, embeddings)
        self._begin(caches, rows)
        forward = Forward(self.sizes, spans, x, self._workers)
        for layer, cache in zip(self._layers, caches, strict=True):
            forward.layer(layer, cache)
        self._end(caches, rows, spans)
        scores = states = None
        if columns.size:
            scores = forward.head(self._norm, self._arena, self._head_matrix, chosen)[:, : self.vocab_size]
            scores = mx.array(scores.reshape(*columns.shape, -1))
        if hidden:
            every = spans.among(np.tile(np.arange(spans.length), (spans.count, 1)))
            states = mx.array(forward.states(self._norm, every).reshape(*tokens.shape, -1))
        return Output(scores, states)

    def _embedded(self, tokens: mx.array, spans: Spans, embeddings: mx.array | None) -> np.ndarray:
        from labkit.kernels.quantized_matmul.loops import take_rows

        if embeddings is not None:
            return np.array(embeddings.astype(mx.float32))[spans.rows, spans.columns]
        numbers = np.asarray(tokens)[spans.rows, spans.columns].astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            raise ValueError(f"tokens {numbers.min()} to {numbers.max()} of a vocabulary of {self.vocab_size}")
        x = np.empty((numbers.size, self.sizes.hidden), np.float32)
        take_rows(numbers, self._arena, self._embedding, x)
        return x

    def _begin(self, caches: list[Cache], rows: Rows) -> None:
        self._place(caches, rows)
        if rows.left_padding is None:
            return
        for cache in caches:
            if isinstance(cache, BatchedContiguous):
                cache.offset = rows.positions + rows.left_padding
            cache.prepare(left_padding=rows.left_padding)

    def _end(self, caches: list[Cache], rows: Rows, spans: Spans) -> None:
        """What the caches count besides their arrays."""
        moved = spans.length - spans.last
        for cache in caches:
            if cache.kind == "recurrent":
                cache.advance(spans.length)
                if rows.lengths is not None or rows.left_padding is not None:
                    cache.finalize()
            elif isinstance(cache, BatchedContiguous):
                cache.advance_columns(spans.length)
                if moved.any():
                    cache.moved_right(mx.array(moved.astype(np.int32)))
            else:
                cache.advance_columns(int((spans.last - spans.first).max(initial=0)))
