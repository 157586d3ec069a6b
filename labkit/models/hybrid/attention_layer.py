"""The gated attention mixer: q with an output gate beside each head, k, v; norms and partial rotation; attention; gate.

Source: Qwen3-Next's attention (mlx-lm's models/qwen3_next.py); RoFormer, Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

import mlx.core as mx

from labkit.caches import BatchedContiguous, Contiguous
from labkit.kernels.attention import prefill_attention
from labkit.kernels.fused import output_gate, qk_norm_rope
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.packing import AttentionWeights
from labkit.models.hybrid.plan import Step

KeyValueCache = Contiguous | BatchedContiguous


class AttentionLayer:
    """One layer's mixer."""

    def __init__(self, config: HybridConfig, weights: AttentionWeights):
        self.config, self.weights = config, weights
        self.scale = config.head_dim**-0.5

    def __call__(self, x: mx.array, cache: KeyValueCache, step: Step) -> mx.array:
        """x [B, L, hidden], normalised -> [B, L, hidden]; the new columns are written into the cache's buffers."""
        q_gate, k, v = self._project(x, step)
        q, k = qk_norm_rope(
            q_gate, k, self.weights.q_norm, self.weights.k_norm, step.positions,
            eps=self.config.eps, rotary=self.config.rotary, base=self.config.rope_base,
        )  # fmt: skip
        before = cache.size()
        keys, values = cache.update_and_fetch(k, v.swapaxes(1, 2))
        if step.plan.kernels:
            start = mx.full((step.batch,), before, dtype=mx.int32)
            attended = prefill_attention(q, cache.keys, cache.values, start, scale=self.scale, first=step.first)
        else:
            attended = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.scale, mask=step.mask)
        return step.plan.product(output_gate(attended, q_gate), self.weights.output)

    def _project(self, x: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """[B, L, Hq, 2 D] of queries and gates, [B, L, Hkv, D] of keys and of values."""
        config = self.config
        projected = step.plan.product(x, self.weights.inputs)
        queries, kv = 2 * config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        q_gate, k, v = mx.split(projected, [queries, queries + kv], axis=-1)
        shape = step.batch, step.length
        return (
            q_gate.reshape(*shape, config.query_heads, -1),
            k.reshape(*shape, config.kv_heads, -1),
            v.reshape(*shape, config.kv_heads, -1),
        )
