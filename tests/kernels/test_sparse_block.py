"""A whole sparse block by our kernels, norm to combine, against mlx-lm's, with one weight set."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from labkit.kernels import fused, grouped_matmul, routing
from labkit.kernels.quantized_matmul import Packed

HIDDEN, INNER, EXPERTS, K = 128, 64, 12, 3


@pytest.fixture(scope="module")
def block():
    """mlx-lm's block, its router and shared gate in 8 bits, the rest in 4, as it quantises them."""
    from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

    mx.random.seed(4)
    sizes = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        norm_topk_prob=True,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
    )
    block = Qwen3NextSparseMoeBlock(sizes)
    eight = {"group_size": 64, "bits": 8}
    nn.quantize(
        block,
        group_size=64,
        bits=4,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and (eight if path in ("gate", "shared_expert_gate") else True)
        ),
    )
    return block


@pytest.mark.parametrize("target", ["reference", "simulator"])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_block_is_mlx_lms(block, tokens, target):
    x, residual = mx.random.normal((tokens, HIDDEN)), mx.random.normal((tokens, HIDDEN))
    weight = mx.random.uniform(0.5, 1.5, (HIDDEN,))
    normed = mx.fast.rms_norm(x + residual, weight, 1e-6)
    want = block(normed[None])[0]

    # The shared expert's gate is one more row of the router.
    router = tuple(
        mx.concatenate([block.gate[name], block.shared_expert_gate[name]]) for name in ("weight", "scales", "biases")
    )
    experts = [
        Packed(p.weight, p.scales, p.biases, 64, 4)
        for p in (block.switch_mlp.gate_proj, block.switch_mlp.up_proj, block.switch_mlp.down_proj)
    ]
    _, rows, logits = fused.norm_router(x, residual, weight, router, 1e-6, target=target)
    shared = {"shared": block.shared_expert(rows), "shared_factor": mx.sigmoid(logits[:, EXPERTS])}
    if tokens <= grouped_matmul.DECODE_TOKENS:
        indices, weights = routing.choose_experts(logits, K, experts=EXPERTS, target=target)
        got = grouped_matmul.decode_experts(rows, *experts, indices, weights, **shared, target=target)
        choosing = grouped_matmul.choose_decode_experts(rows, *experts, logits, K, experts=EXPERTS, target=target)
        apart = grouped_matmul.decode_experts(rows, *experts, indices, weights, target=target)
        assert mx.array_equal(choosing, apart)
    else:
        routed = routing.route(logits, K, 16, experts=EXPERTS, target=target)
        groups = routed.groups
        got = grouped_matmul.grouped_experts(
            rows, *experts, routed.weights, groups.order, groups.block_map, groups.tile, **shared, target=target
        )
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)
