"""The hybrid on a CPU behind the forward contract: what is read of rows and caches before, and noted after."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from labkit.caches import BatchedContiguous, Cache, lacking
from labkit.kernels.quantized_matmul.panels import OUTPUTS
from labkit.kernels.workers import Workers
from labkit.models.contract import LogitsFor, Output
from labkit.models.hybrid.config import HybridConfig, NotSpecialised
from labkit.models.hybrid.hybrid import Hybrid
from labkit.models.hybrid.native.records import address
from labkit.models.hybrid.native.spans import Spans
from labkit.models.hybrid.native.weights import Arena, NativeLayer, vector
from labkit.models.hybrid.packing import ModelWeights, pack
from labkit.models.placement import place, prepare
from labkit.models.rows import Rows

if TYPE_CHECKING:
    from labkit.models.hybrid.native.forward import Layers
    from labkit.models.hybrid.native.token_step import TokenStep

HEAD_STEP = 8
"""Values of a head that a vector holds."""


class NativeHybrid(Hybrid):
    """The specialised graph in compiled loops: float32, computed as it is called, nothing left lazy.

    Args:
        weights: from `labkit.models.hybrid.packing.pack`, its layers as `NativeLayer`.
        config: the checkpoint's config.json.
        threads: that share the rows of a step, or the stages of a chunk of many tokens; by default the processors that
            this process may use. A row of few tokens is computed by one thread.
    """

    takes_pages = False
    eager = True  # its logits are computed when it returns
    invariant = True  # one chain of operations a sum, whatever stands beside it

    def __init__(self, weights: ModelWeights, config: dict[str, Any], *, threads: int | None = None):
        self.config, self.dtype = config, mx.float32
        self.sizes = sizes = HybridConfig.read(config)
        self.notes = sizes.notes
        self.vocab_size, self.num_layers = sizes.vocabulary, len(sizes.layer_kinds)
        self.layer_kinds = list(sizes.layer_kinds)
        self.layouts = [self._layout(kind) for kind in sizes.layer_kinds]
        self.limits = lacking(self.make_caches(), self.make_caches(2))
        self._workers = Workers(threads)
        self._kept: TokenStep | None = None
        arena = Arena()
        self._embedding = arena.add(weights.embedding.parts[0])
        self._head_matrix = self._embedding if weights.head is weights.embedding else arena.add(weights.head.parts[0])
        arena.close()
        self._arena, self._norm = arena.data, vector(weights.norm)
        self._layers: tuple[NativeLayer, ...] = weights.layers
        self.weights_bytes = self._arena.nbytes + sum(layer.nbytes for layer in self._layers)

    @classmethod
    def from_tensors(
        cls,
        tensors: MutableMapping[str, mx.array],
        config: dict[str, Any],
        dtype: mx.Dtype = mx.float32,
        **options: Any,
    ) -> NativeHybrid:
        """As `Hybrid.from_tensors`, but each layer is laid out anew and let go, and floats stay as wide as they are.

        Raises:
            NotSpecialised: sizes that do not divide into the vectors of the loops, or another `dtype` than float32.
            LoadError: as `pack`.
        """
        sizes = HybridConfig.read(config)
        if dtype != mx.float32:
            raise NotSpecialised(f"the loops of a CPU compute in float32, not {dtype}")
        if any(dim % HEAD_STEP for dim in (sizes.head_dim, sizes.key_dim, sizes.value_dim)):
            raise NotSpecialised(
                f"heads of {sizes.head_dim}, {sizes.key_dim} and {sizes.value_dim} values: the loops take multiples of "
                f"{HEAD_STEP}"
            )
        return cls(pack(tensors, sizes, _stored(tensors), NativeLayer.pack), config, **options)

    @classmethod
    def from_module(
        cls, module: Any, config: dict[str, Any], dtype: mx.Dtype = mx.float32, **options: Any
    ) -> NativeHybrid:
        """From mlx-lm's module, which stays as it is; nothing is shared with it."""
        from mlx.utils import tree_flatten

        return cls.from_tensors(dict(tree_flatten(module.parameters())), config, dtype, **options)

    def temporary_bytes(self, length: int, *, context: int = 0, batch: int = 1, positions: int = 0) -> int:
        """See `labkit.models.hybrid.native.memory`: what a forward of these loops holds besides weights and caches."""
        from labkit.models.hybrid.native.memory import temporary_bytes

        kinds = dict(zip(self.layer_kinds, zip(self._layers, self.layouts, strict=True), strict=True))
        layers, layouts = zip(*kinds.values(), strict=True)  # those of a kind are alike
        return temporary_bytes(
            self.sizes, layers, layouts, int(self._head_matrix[OUTPUTS]), length=length, context=context, batch=batch,
            positions=positions, threads=self._workers.threads,
        )  # fmt: skip

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens [B, L] -> [B, L, D]."""
        numbers = np.asarray(tokens)
        return mx.array(self._rows(numbers.reshape(-1)).reshape(*numbers.shape, -1))

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
        from labkit.models.hybrid.native.cache_records import CacheRecords
        from labkit.models.hybrid.native.forward import forward

        self._check(tokens, caches, rows, embeddings)
        plain = isinstance(logits, str) and logits == "last" and not hidden and embeddings is None
        if plain and tokens.shape[1] == 1 and _plain(caches, rows):
            return Output(self._token_step(tokens, caches, rows), None)
        spans = Spans.of(rows, tokens.shape[1])
        chosen, each = spans.chosen(logits, rows.lengths)
        x = self._embedded(tokens, spans, embeddings)
        self._begin(caches, rows)
        scores = forward(self._records, spans, x, CacheRecords(caches, spans), chosen, self._workers)
        self._end(caches, rows, spans)
        states = None
        if hidden:
            states = mx.array(self._records.scored(x, spans.every()).reshape(*tokens.shape, -1))
        scores = mx.array(scores[:, : self.vocab_size].reshape(spans.count, each, -1)) if chosen.size else None
        return Output(scores, states)

    def _token_step(self, tokens: mx.array, caches: list[Cache], rows: Rows) -> mx.array:
        """Logits [B, 1, V] of rows that feed one token each."""
        from labkit.models.hybrid.native.token_step import TokenStep

        numbers = self._known(tokens)
        self._begin(caches, rows)
        positions = np.array(rows.positions, np.int64)
        step = self._kept  # of other caches it says so itself, whoever steps on them meanwhile
        if step is None or not step.again(caches, rows.count):
            step = TokenStep(self._records, caches, Spans.of(rows, 1))
        self._embed_into(step.x, numbers)
        scores = step.run(positions, self._workers)
        self._kept = step
        for cache in caches:
            cache.advance(1) if cache.kind == "recurrent" else cache.advance_columns(1)
        return mx.array(scores[:, None, : self.vocab_size])

    @cached_property
    def _records(self) -> Layers:
        from labkit.models.hybrid.native.forward import Head, Layers

        return Layers(self.sizes, self._layers, Head(self._norm, self._arena, self._head_matrix))

    def _embedded(self, tokens: mx.array, spans: Spans, embeddings: mx.array | None) -> np.ndarray:
        if embeddings is not None:
            return np.array(embeddings.astype(mx.float32))[spans.rows, spans.columns]
        numbers = np.array(tokens)
        return self._rows(numbers.reshape(-1) if spans.whole else numbers[spans.rows, spans.columns])

    def _rows(self, tokens: np.ndarray) -> np.ndarray:
        numbers = self._known(tokens)
        x = np.empty((numbers.size, self.sizes.hidden), np.float32)
        self._embed_into(x, numbers)
        return x

    def _known(self, tokens: np.ndarray | mx.array) -> np.ndarray:
        """int64, all of them in the vocabulary."""
        numbers = np.array(tokens, np.int64).reshape(-1)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            raise ValueError(f"tokens {numbers.min()} to {numbers.max()} of a vocabulary of {self.vocab_size}")
        return numbers

    def _embed_into(self, x: np.ndarray, numbers: np.ndarray) -> None:
        from labkit.kernels.quantized_matmul.loops import take_rows

        take_rows.call(address(numbers), numbers.size, address(self._arena), address(self._embedding), address(x))

    def _begin(self, caches: list[Cache], rows: Rows) -> None:
        place(caches, rows)
        if rows.left_padding is not None:
            prepare(caches, replace(rows, lengths=None), 0)  # right padding never enters these caches

    def _end(self, caches: list[Cache], rows: Rows, spans: Spans) -> None:
        """What the caches count besides their arrays."""
        moved = not spans.whole and spans.shift.any()
        for cache in caches:
            if cache.kind == "recurrent":
                if cache.recording and rows.lengths is not None:  # a span counts each row's own tokens
                    cache.prepare(lengths=rows.lengths, right_padding=spans.length - rows.lengths)
                cache.advance(spans.length)
                if rows.lengths is not None or rows.left_padding is not None:
                    cache.finalize()
            elif isinstance(cache, BatchedContiguous):
                cache.advance_columns(spans.length)
                if moved:
                    cache.moved_right(mx.array(spans.shift.astype(np.int32)))
            else:
                cache.advance_columns(spans.longest)


def _plain(caches: list[Cache], rows: Rows) -> bool:
    """Whether every row's one column is a token, and nothing is asked for but what comes after it."""
    if rows.lengths is not None or rows.left_padding is not None or min(rows.positions.tolist()) < 0:
        return False
    return not any(cache.kind == "recurrent" and cache.recording for cache in caches)


def _stored(tensors: MutableMapping[str, mx.array]) -> mx.Dtype:
    """The dtype that all floats of a checkpoint have, or float32 where they differ; the gates' A_log may differ."""
    kinds = {array.dtype for name, array in tensors.items() if not name.endswith((".A_log", ".dt_bias"))}
    kinds = {kind for kind in kinds if mx.issubdtype(kind, mx.floating)}
    return kinds.pop() if len(kinds) == 1 else mx.float32
