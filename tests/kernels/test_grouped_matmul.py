"""What the gates do not show of the experts' products: whole blocks against mlx-lm's, what tiles and loads change."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import simulator
from labkit.kernels.grouped_matmul import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    choose_tile,
    decode_experts,
    form_for,
    grouped_experts,
)
from labkit.kernels.grouped_matmul.gates import block_map_of, grouped, packed_experts
from labkit.kernels.grouped_matmul.launches import combine_experts_call, expert_down_call, expert_gate_up_call

EXPERTS, TOPK, WIDTH, INNER = 6, 3, 128, 64


@pytest.fixture(scope="module")
def experts():
    mx.random.seed(3)
    gate, up = (packed_experts(EXPERTS, INNER, WIDTH, mx.bfloat16) for _ in range(2))
    return gate, up, packed_experts(EXPERTS, WIDTH, INNER, mx.bfloat16)


def problem(tokens, seed=0, busy=EXPERTS):
    rng = np.random.default_rng(seed)
    indices = np.stack([rng.permutation(busy)[:TOPK] for _ in range(tokens)]).astype(np.int32)
    x = mx.array(rng.standard_normal((tokens, WIDTH)), mx.bfloat16)
    weights = mx.array(rng.dirichlet(np.ones(TOPK), tokens), mx.float32)
    shared = mx.array(rng.standard_normal((tokens, WIDTH)), mx.bfloat16)
    return x, indices, weights, shared, mx.array(rng.uniform(size=tokens), mx.bfloat16)


def sparse_block(x, experts, indices, weights, shared, factor):
    """mlx-lm's Qwen3NextSparseMoeBlock from the choice of experts on, in fp32."""
    from mlx_lm.models.switch_layers import SwitchGLU

    gate, up, down = experts
    block = SwitchGLU(WIDTH, INNER, EXPERTS)
    for name, packed in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        getattr(block, name).weight = packed.dequantize()
    y = block(x.astype(mx.float32), mx.array(indices))
    return (y * weights[..., None]).sum(axis=-2) + factor.astype(mx.float32)[:, None] * shared.astype(mx.float32)


@pytest.mark.parametrize("tokens", [1, 7])
def test_both_forms_are_mlx_lms_block(tokens, experts):
    x, indices, weights, shared, factor = problem(tokens)
    want = sparse_block(x, experts, indices, weights, shared, factor)
    options = {"shared": shared, "shared_factor": factor, "target": "simulator"}
    order, blocks = grouped(indices, EXPERTS, 16)
    tiled = grouped_experts(x, *experts, weights, order, blocks, 16, **options)
    decoded = decode_experts(x, *experts, mx.array(indices), weights, **options)
    for got in (tiled, decoded):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.array(want), atol=3e-2, rtol=2e-2)


def run(kernels, form, call, check=False):
    return simulator.run(kernels[form].text, kernels[form].launch(**call), check=check).raise_for_faults()


@pytest.mark.parametrize("form", ["plain", "tensor"])
def test_the_tile_changes_no_bit(form, experts):
    x, indices, weights, *_ = problem(23)
    gate, up, down = experts
    results = []
    for tile in (16, 64):
        order, blocks = grouped(indices, EXPERTS, tile)
        call = expert_gate_up_call(x, gate, up, order, blocks, TOPK, form, tile=tile)
        (hidden,) = run(EXPERT_GATE_UP, form, call).outputs
        call = expert_down_call(hidden, down, order, blocks, weights, form, tile=tile)
        results.append(run(EXPERT_DOWN, form, call).outputs[0])
    assert mx.array_equal(*results).item()


def test_experts_without_rows_and_unused_blocks_move_nothing(experts):
    gate, up, _ = experts
    x, indices, *_ = problem(4, busy=3)  # half of the experts are idle
    order, blocks = grouped(indices, EXPERTS, 16)
    used = int((blocks[:, 2] > 0).sum())
    assert used == 3 < blocks.shape[0]

    def traffic(block_map):
        call = expert_gate_up_call(x, gate, up, order, block_map, TOPK, "tensor", tile=16)
        return run(EXPERT_GATE_UP, "tensor", call, check=True).traffic.summary()

    tight, padded = traffic(blocks[:used]), traffic(blocks)
    entries = 16 * (blocks.shape[0] - used)  # bytes of the unused entries themselves
    assert padded["footprint"] - tight["footprint"] <= entries + 128
    assert padded["barriers"] == tight["barriers"]


def test_one_expert_with_all_rows(experts):
    gate, up, _ = experts
    mx.random.seed(1)
    x = mx.random.normal((40, WIDTH)).astype(mx.bfloat16)
    order, blocks = mx.arange(40, dtype=mx.int32), block_map_of([0, 0, 0, 0, 40, 0], 16)
    call = expert_gate_up_call(x, gate, up, order, blocks, 1, "tensor", tile=16)
    (hidden,) = run(EXPERT_GATE_UP, "tensor", call).outputs
    g, u = (x.astype(mx.float32) @ p.dequantize()[4].T for p in (gate, up))
    want = g * mx.sigmoid(g) * u
    np.testing.assert_allclose(np.array(hidden.astype(mx.float32)), np.array(want), atol=3e-2, rtol=2e-2)


def test_the_tile_follows_the_load():
    assert [choose_tile(tokens * 8, 256) for tokens in (64, 256, 512, 1024, 2048, 4096)] == [16, 16, 32, 64, 64, 64]


def test_the_tensor_form_needs_cuda_and_sixteen_bits(experts):
    x = mx.zeros((1, WIDTH), mx.bfloat16)
    assert form_for(x, *experts, target="cuda") == "tensor"
    assert form_for(x.astype(mx.float32), *experts, target="cuda") == "plain"
    assert form_for(x, *experts, target="simulator") == "plain"


def test_block_maps_cut_experts_into_tiles():
    blocks = block_map_of([5, 0, 33], 16).tolist()
    assert blocks[:4] == [[0, 0, 5, 0], [2, 5, 16, 0], [2, 21, 16, 0], [2, 37, 1, 0]]
    assert blocks[4:] == [[0, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": mx.zeros((4, 100), mx.bfloat16)}, "128 columns"),
        ({"order": mx.zeros((7,), mx.int32)}, r"order is \[12\]"),
        ({"block_map": mx.zeros((9, 3), mx.int32)}, "block map"),
        ({"tile": 48}, "48"),
        ({"tile": 128}, "no tile of 128"),
    ],
)
def test_bad_input_is_named(change, message, experts):
    gate, up, _ = experts
    x, indices, *_ = problem(4)
    order, blocks = grouped(indices, EXPERTS, 16)
    call = {"x": x, "gate": gate, "up": up, "order": order, "block_map": blocks, "k": TOPK, "tile": 16} | change
    with pytest.raises(ValueError, match=message):
        expert_gate_up_call(**call)


def test_a_shared_expert_needs_its_factor():
    with pytest.raises(ValueError, match="factor"):
        combine_experts_call(mx.zeros((2, 3, 8)), mx.zeros((2, 8)))
