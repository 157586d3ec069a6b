"""The gated attention mixer: q with an output gate beside each head, k, v; norms and partial rotation; attention; gate.

Source: Qwen3-Next's attention (mlx-lm's models/qwen3_next.py); RoFormer, Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from labkit.caches import BatchedContiguous, Contiguous
from labkit.caches.paged import PagedCache
from labkit.kernels.attention import Tail, decode_rows, prefill_attention
from labkit.kernels.fused import append_heads, output_gate, qk_norm_rope
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.packing import AttentionWeights
from labkit.models.hybrid.plan import Step
from labkit.models.hybrid.variants import Variants

FIXED_FROM = 32 * 1024
"""Columns of context from which `columns="by_context"` takes fixed blocks: the published engine's border."""

KeyValueCache = Contiguous | BatchedContiguous | PagedCache


class Memory(NamedTuple):
    """A cache's buffers [B, Hkv, S, D] and its tail [B, Hkv, C, D]; a step changes the tail alone. Of a paged cache the
    pool's blocks [P, Hkv, PAGE, D] and, besides, the rows' table int32 [B, N]."""

    keys: mx.array
    values: mx.array
    tail_keys: mx.array
    tail_values: mx.array
    table: mx.array | None = None


class AttentionLayer:
    """One layer's mixer."""

    def __init__(self, config: HybridConfig, weights: AttentionWeights):
        self.config, self.weights = config, weights
        self.scale = config.head_dim**-0.5

    def __call__(self, projected: mx.array, cache: KeyValueCache, step: Step) -> mx.array:
        """`inputs` of the normalised x, [B, L, N] -> [B, L, hidden]; the new columns are written into the cache's
        buffers."""
        q_gate, k, v = self._split(projected, step)
        q, k = qk_norm_rope(
            q_gate, k, self.weights.q_norm, self.weights.k_norm, step.positions,
            eps=self.config.eps, rotary=self.config.rotary, base=self.config.rope_base,
        )  # fmt: skip
        if isinstance(cache, PagedCache):
            cache.append(k, v.swapaxes(1, 2))
            return step.plan.product(output_gate(cache.attend(q, scale=self.scale), q_gate), self.weights.output)
        before = cache.size()
        keys, values = cache.update_and_fetch(k, v.swapaxes(1, 2))
        if step.plan.kernels:
            start = mx.full((step.batch,), before, dtype=mx.int32)
            attended = prefill_attention(q, cache.keys, cache.values, start, scale=self.scale, first=step.first)
        else:
            attended = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=step.mask)
        return step.plan.product(output_gate(attended, q_gate), self.weights.output)

    def memory(self, cache: KeyValueCache, step: Step) -> Memory:
        """What the cache holds, with room for the step in its tail."""
        if isinstance(cache, PagedCache):
            return Memory(*cache.open_tail(step.length))
        keys, values, tail = cache.open_tail(step.length)
        return Memory(keys, values, tail.keys, tail.values)

    def keep(self, cache: KeyValueCache, memory: Memory, step: Step) -> None:
        """Give the cache what a step left."""
        cache.take_tail(memory.tail_keys, memory.tail_values, step.length)

    def mix(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, Memory]:
        """The layer for a few new tokens, as a function of arrays alone; projected [B * L, N]."""
        columns, variants = step.columns, step.plan.variants
        append = self._append if variants.fuse_queries else self._append_apart
        q, *tail = append(projected, memory, step)
        attended = decode_rows(
            q, memory.keys, memory.values, columns.first, columns.last, scale=self.scale, gates=projected,
            tail=Tail(*tail, columns.settled), table=memory.table, layout=self._layout(memory, variants),
            packed=variants.heads == "packed", wide=variants.loads == "wide",
        )  # fmt: skip
        after = memory._replace(tail_keys=tail[0], tail_values=tail[1])
        return step.plan.product(attended, self.weights.output), after

    def _append(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """q [B * L, Hq, D], and the tail with the new columns."""
        return append_heads(
            projected, self.weights.q_norm, self.weights.k_norm, step.positions, memory.tail_keys, memory.tail_values,
            step.columns.write, eps=self.config.eps, rotary=self.config.rotary, base=self.config.rope_base,
        )  # fmt: skip

    def _append_apart(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """The same in MLX's separate operations."""
        config = self.config
        q_gate, k, v = self._split(projected, step)
        q = mx.fast.rms_norm(q_gate[..., : config.head_dim], self.weights.q_norm, config.eps).swapaxes(1, 2)
        k = mx.fast.rms_norm(k, self.weights.k_norm, config.eps).swapaxes(1, 2)
        q, k = (
            mx.fast.rope(
                part, config.rotary, traditional=False, base=config.rope_base, scale=1.0, offset=step.positions
            )
            for part in (q, k)
        )
        write, v = step.columns.write, v.swapaxes(1, 2)
        if write.ndim == 2:  # each row elsewhere
            place = (write + mx.arange(step.length))[:, None, :, None]
            keys = mx.put_along_axis(memory.tail_keys, mx.broadcast_to(place, k.shape), k, axis=2)
            values = mx.put_along_axis(memory.tail_values, mx.broadcast_to(place, v.shape), v, axis=2)
        else:
            keys = mx.slice_update(memory.tail_keys, k, write[:1], axes=(2,))
            values = mx.slice_update(memory.tail_values, v, write[:1], axes=(2,))
        return q.swapaxes(1, 2).reshape(step.tokens, config.query_heads, -1), keys, values

    def _layout(self, memory: Memory, variants: Variants) -> str:
        if memory.table is not None and variants.columns == "general" and memory.table.shape[0] > 1:
            return "uneven"  # rows in pages are of any length, and a compiled step does not know of which
        if variants.columns == "by_context":
            columns = memory.keys.shape[2] * (1 if memory.table is None else memory.table.shape[1])
            return "fixed" if columns >= FIXED_FROM else "general"
        return variants.columns

    def _split(self, projected: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """[B, L, Hq, 2 D] of queries and gates, [B, L, Hkv, D] of keys and of values."""
        config = self.config
        queries, kv = 2 * config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        q_gate, k, v = mx.split(projected, [queries, queries + kv], axis=-1)
        shape = step.batch, step.length
        return (
            q_gate.reshape(*shape, config.query_heads, -1),
            k.reshape(*shape, config.kv_heads, -1),
            v.reshape(*shape, config.kv_heads, -1),
        )
