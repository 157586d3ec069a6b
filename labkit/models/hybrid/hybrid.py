"""Qwen3.5/3.6 specialised: layers of Gated DeltaNet and gated attention, sparse or dense MLPs, our kernels in each."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import BatchedContiguous, BatchedRecurrent, Cache, Contiguous, Layout, Recurrent, lacking
from labkit.caches.layout import ArraySpec, dtype_name
from labkit.caches.paged import PagedCache
from labkit.kernels.gated_delta import row_spans
from labkit.kernels.targets import device_target, target_in_use
from labkit.models.contract import LayerKind, LogitsFor, Output
from labkit.models.decode_step import DecodeStep
from labkit.models.hybrid.config import LINEAR, HybridConfig
from labkit.models.hybrid.decode import FEW, FewTokens
from labkit.models.hybrid.graph import Graph
from labkit.models.hybrid.memory import chunk_memory
from labkit.models.hybrid.packing import ModelWeights, pack
from labkit.models.hybrid.persistent import check_weights
from labkit.models.hybrid.plan import Plan, Step
from labkit.models.hybrid.variants import Variants
from labkit.models.placement import check_rows, place, prepare
from labkit.models.rows import Rows

_WITH_TAIL = {Contiguous, BatchedContiguous, Recurrent, BatchedRecurrent}


class Hybrid:
    """The specialised graph as a `labkit.models.Model`.

    Args:
        weights: packed (`labkit.models.hybrid.packing.pack`).
        config: the checkpoint's config.json.
        dtype: of activations.
        variants: the switches of ablations. NotSpecialised if the weights do not fit one that was set.
        invariant: no bit of a row depends on its neighbours, on padding or on how its tokens are cut into calls: fixed
            tiles and orders of sums, at a price.

    Attributes:
        sizes: the config as read. notes: what the checkpoint holds and this text model leaves out.
        graph: embedding, layers and head over the weights.
        weights_bytes: of all weights.
    """

    splits_head = accepts_embeddings = batches = takes_pages = True

    def __init__(
        self,
        weights: ModelWeights,
        config: dict[str, Any],
        dtype: mx.Dtype,
        *,
        variants: Variants | None = None,
        invariant: bool = False,
    ):
        self.config, self.dtype = config, dtype
        self.sizes = sizes = HybridConfig.read(config)
        self.notes = sizes.notes
        self.variants, self.invariant = variants or Variants(), invariant
        if self.variants.persistent != "off":
            check_weights(sizes, weights)
        self.weights = weights
        self.weights_bytes = weights.nbytes
        self.vocab_size, self.num_layers = sizes.vocabulary, len(sizes.layer_kinds)
        self.layer_kinds: list[LayerKind] = list(sizes.layer_kinds)
        self.layouts = [self._layout(kind) for kind in sizes.layer_kinds]
        self.graph = Graph(sizes, weights, mx.float32 if self.variants.stream == "float32" else dtype)
        self._few = FewTokens(self.graph)
        self.limits = lacking(self.make_caches(), self.make_caches(2))

    @classmethod
    def from_tensors(
        cls, tensors: MutableMapping[str, mx.array], config: dict[str, Any], dtype: mx.Dtype, **options: Any
    ) -> Hybrid:
        """From a checkpoint's tensors under mlx-lm's names, which are taken out of the mapping as they are packed.

        Raises:
            NotSpecialised, LoadError: as `HybridConfig.read` and `pack`.
        """
        return cls(pack(tensors, HybridConfig.read(config), dtype), config, dtype, **options)

    @classmethod
    def from_module(cls, module: Any, config: dict[str, Any], dtype: mx.Dtype | None = None, **options: Any) -> Hybrid:
        """From mlx-lm's module, which stays as it is; what is not joined with a neighbour is shared with it."""
        from mlx.utils import tree_flatten

        from labkit.models.adapter import activation_dtype

        tensors = dict(tree_flatten(module.parameters()))
        return cls.from_tensors(tensors, config, dtype or activation_dtype(tensors.values()), **options)

    # -- caches --------------------------------------------------------------------------------------------------------

    def make_caches(self, batch: int = 1) -> list[Cache]:
        """Empty caches: serial classes for one row, batched classes for more."""
        rows = [[self._cache(layout) for layout in self.layouts] for _ in range(batch)]
        if batch == 1:
            return rows[0]
        return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]

    def _cache(self, layout: Layout) -> Cache:
        return Contiguous(layout) if layout.kind == "contiguous" else Recurrent(len(layout.arrays), layout)

    def _layout(self, kind: str) -> Layout:
        sizes, dtype = self.sizes, dtype_name(self.dtype)
        if kind == LINEAR:
            state = (sizes.value_heads, sizes.value_dim, sizes.key_dim)
            tail = ArraySpec("state0", (3, sizes.conv_channels), dtype, per_token=False)
            return Layout("recurrent", (tail, ArraySpec("state1", state, "float32", per_token=False)))
        shape = sizes.kv_heads, sizes.head_dim
        return Layout("contiguous", tuple(ArraySpec(name, shape, dtype, per_token=True) for name in ("keys", "values")))

    def temporary_bytes(self, length: int, *, context: int = 0, batch: int = 1, positions: int = 0) -> int:
        """What a chunk of `length` tokens after `context` others needs besides weights and caches (`chunk_memory`)."""
        return chunk_memory(self.sizes, length, context=context, batch=batch, positions=positions, **self._sizes()).peak

    def _sizes(self) -> dict[str, int]:
        slots = next((w.mlp.shared_slots for w in self.weights.layers if self.sizes.sparse), 0)
        on_cuda, sends = target_in_use() == "cuda", device_target() is not None
        itemsizes = {"itemsize": self.dtype.size, "stream_itemsize": self.graph.stream.size}
        return itemsizes | {"shared_slots": slots, "on_cuda": on_cuda, "sends": sends}

    # -- forward -------------------------------------------------------------------------------------------------------

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
        """See `labkit.models.contract.Model`. Rows with adapters, block tables or media positions are refused."""
        self._check(tokens, caches, rows, embeddings)
        place(caches, rows)
        padded = prepare(caches, rows, tokens.shape[1])
        step = self._step(caches, rows, tokens.shape[1])
        few = self._takes_few(step, caches) and not (rows.lengths is not None or isinstance(logits, mx.array))
        if few:
            given = embeddings is not None
            x = embeddings.astype(self.graph.stream) if given else tokens
            output = self._few(x, caches, step, logits=logits, hidden=hidden, given=given)
        else:
            graph = self.graph
            x = graph.embed(tokens) if embeddings is None else embeddings.astype(graph.stream)
            mix = lambda index, projected: graph.layers[index].mixer(projected, caches[index], step)
            output = graph.head(*graph.through(x, mix, step), rows.lengths, logits, hidden, step)
        if padded:
            for cache in caches:
                cache.finalize()
        return output

    def _takes_few(self, step: Step, caches: list[Cache]) -> bool:
        """Whether the step can be one function of arrays (`decode.FewTokens`)."""
        plan = step.plan
        if step.length > FEW or not plan.kernels or plan.invariant or plan.variants.kv != "tail":
            return False
        # By their types: this is asked at every token.
        plain = {type(cache) for cache in caches} <= _WITH_TAIL
        paged = plain or all(
            cache.has_tail_for(FEW) if isinstance(cache, PagedCache) else isinstance(cache, tuple(_WITH_TAIL))
            for cache in caches
        )
        return paged and self.sizes.attention_fits_kernels

    def decode_step(self, caches: list[Cache], rows: Rows, positions: Sequence[int], tokens: int) -> DecodeStep | None:
        """One token a row as a function of arrays, for a recording; None where steps differ from token to token.

        Args:
            caches: of `rows`, between two steps; their buffers get room for some of the tokens to come.
            positions: of each row's next token. tokens: that a row may still want at most.
        """
        self._check(mx.zeros((rows.count, 1), mx.int32), caches, rows, None)
        step = self._step(caches, rows, 1)
        if not self._takes_few(step, caches) or rows.lengths is not None:
            return None
        return self._few.recordable(caches, step, positions, tokens)

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens [B, L] -> [B, L, D]."""
        return self.graph.embed(tokens)

    def _step(self, caches: list[Cache], rows: Rows, length: int) -> Step:
        """What the layers need of the rows, read before any cache moves."""
        batch = rows.count
        recurrent = next((cache for cache in caches if cache.kind == "recurrent"), None)
        attending = next((cache for cache in caches if cache.kind == "contiguous"), None)
        spans = None
        if recurrent is not None and (recurrent.lengths is not None or recurrent.left_padding is not None):
            spans = row_spans(batch, length, recurrent.lengths, recurrent.left_padding)
        plan = Plan.here(self.variants, self.invariant)
        return Step(
            plan,
            batch,
            length,
            rows.positions,
            spans,
            mask=None if attending is None or plan.kernels else attending.make_mask(length),
            first=attending.left_padding if isinstance(attending, BatchedContiguous) else None,
            recording=recurrent is not None and recurrent.recording and spans is None and length <= FEW,
        )

    # -- rows and caches -----------------------------------------------------------------------------------------------

    def _check(self, tokens: mx.array, caches: list[Cache], rows: Rows, embeddings: mx.array | None) -> None:
        check_rows(tokens, rows)
        if [cache.kind for cache in caches] != [layout.kind for layout in self.layouts]:
            raise ValueError(
                f"caches of {[cache.kind for cache in caches]}, but the model keeps "
                f"{[layout.kind for layout in self.layouts]}"
            )
        if embeddings is not None and embeddings.shape != (*tokens.shape, self.sizes.hidden):
            raise ValueError(
                f"embeddings stand in for tokens {list(tokens.shape)}: expected "
                f"{[*tokens.shape, self.sizes.hidden]}, not {list(embeddings.shape)}"
            )
