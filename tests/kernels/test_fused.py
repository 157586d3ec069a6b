"""Fused chains beyond their gates: mlx-lm's own blocks, positions, views, what they save, errors."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import fused, simulator
from labkit.kernels.fused import (
    EMBEDDING_ROWS,
    NORM_PROJECT,
    RESIDUAL_RMS_NORM,
    SWIGLU,
    embedding_rows_call,
    norm_project_call,
    norm_project_form,
    residual_rms_norm_call,
    savings,
    swiglu_call,
)
from labkit.kernels.fused.launches import (
    GATED_RMS_NORM,
    MAX_ROUTED_ROWS,
    NORM_ROUTER,
    OUTPUT_GATE,
    QK_NORM_ROPE,
    gated_rms_norm_call,
    norm_router_call,
    output_gate_call,
    qk_norm_rope_call,
)
from labkit.kernels.quantized_matmul import FEW_ROWS, Packed, few_rows_call

TARGETS = ("simulator", "reference")


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def quantised(experts: int, dim: int, group_size: int = 64, bits: int = 8) -> tuple[mx.array, mx.array, mx.array]:
    return tuple(mx.quantize(normal(experts, dim) * dim**-0.5, group_size=group_size, bits=bits))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("length", [1, 3])
def test_qk_norm_rope_is_mlx_lms(target, length):
    """Qwen3.5's chain by its own calls: split, norm, transpose, rope at per-row offsets."""
    heads, key_heads, dim, rotary, offsets = 3, 1, 64, 16, mx.array([5, 130])
    projected, keys = normal(2, length, heads, 2 * dim), normal(2, length, key_heads, dim)
    weights = mx.random.uniform(0.5, 1.5, (2, dim))
    queries, _ = mx.split(projected, 2, axis=-1)
    rotate = lambda x: mx.fast.rope(x, rotary, traditional=False, base=1e5, scale=1.0, offset=offsets)
    want_q = rotate(mx.fast.rms_norm(queries, weights[0], 1e-6).transpose(0, 2, 1, 3))
    want_k = rotate(mx.fast.rms_norm(keys, weights[1], 1e-6).transpose(0, 2, 1, 3))
    q, k = fused.qk_norm_rope(projected, keys, *weights, offsets, eps=1e-6, rotary=rotary, base=1e5, target=target)
    np.testing.assert_allclose(q, want_q, atol=3e-5)
    np.testing.assert_allclose(k, want_k, atol=3e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_chain_around_attention_is_mlx_lms(target):
    """Qwen3.5's whole attention block, with our chains before and after MLX's attention."""
    from mlx_lm.models.qwen3_next import Qwen3NextAttention

    sizes = SimpleNamespace(
        hidden_size=48,
        num_key_value_heads=1,
        num_attention_heads=3,
        head_dim=32,
        attention_bias=False,
        rms_norm_eps=1e-6,
        partial_rotary_factor=0.25,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=512,
    )
    block = Qwen3NextAttention(sizes)
    block.q_norm.weight, block.k_norm.weight = mx.random.uniform(0.5, 1.5, (2, 32))
    x = normal(2, 5, 48)
    projected = block.q_proj(x).reshape(2, 5, 3, 64)
    keys, values = (project(x).reshape(2, 5, 1, 32) for project in (block.k_proj, block.v_proj))
    q, k = fused.qk_norm_rope(
        projected, keys, block.q_norm.weight, block.k_norm.weight, mx.array([0, 0]), eps=1e-6, rotary=8, target=target
    )
    v = values.transpose(0, 2, 1, 3)
    attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=block.scale, mask="causal")
    got = block.o_proj(fused.output_gate(attended, projected, target=target))
    np.testing.assert_allclose(got, block(x, mask="causal"), atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_positions_by_row_and_by_token_agree(target):
    q, k = normal(2, 4, 2, 32), normal(2, 4, 1, 32)
    weights = mx.ones((2, 32))
    by_row = fused.qk_norm_rope(q, k, *weights, mx.array([7, -2]), eps=1e-6, rotary=8, target=target)
    positions = mx.array([7, -2])[:, None] + mx.arange(4)
    by_token = fused.qk_norm_rope(q, k, *weights, positions, eps=1e-6, rotary=8, target=target)
    for one, other in zip(by_row, by_token, strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize(
    ("form", "dtype", "rows", "dim", "simds", "adds", "tiles"),
    [
        ("plain", mx.float32, 1, 2048, 4, True, None),
        ("tensor", mx.bfloat16, 3, 1024, 2, True, None),
        ("plain", mx.bfloat16, 2, 96, 4, False, None),
        ("row", mx.bfloat16, 1, 1024, None, True, None),
        ("row", mx.bfloat16, 1, 1024, None, True, 2),
        ("row", mx.float16, 1, 160, None, False, 3),
    ],
)
def test_norm_project_is_its_two_launches_bit_for_bit(form, dtype, rows, dim, simds, adds, tiles):
    """Other threads norm the rows, in the order of the norm's own."""
    x, residual = normal(rows, dim).astype(dtype) if adds else None, normal(rows, dim).astype(dtype)
    weight, weights = mx.random.uniform(0.5, 1.5, (dim,)), Packed.quantize(normal(57, dim).astype(dtype), 32)
    run = lambda kernel, call: simulator.run(kernel.text, kernel.launch(**call)).outputs
    got = run(NORM_PROJECT[form], norm_project_call(x, residual, weight, 1e-6, weights, form, simds=simds, tiles=tiles))
    hidden, normed = run(RESIDUAL_RMS_NORM, residual_rms_norm_call(x, residual, weight, 1e-6))
    (y,) = run(FEW_ROWS[form], few_rows_call(normed, weights, form, simds=simds))
    assert mx.array_equal(got[0], hidden)
    assert mx.array_equal(got[0], residual) != adds
    assert mx.array_equal(got[1], y)


def test_a_lone_row_on_cuda_takes_its_own_form_while_a_threadgroup_has_a_simdgroup_for_each_task():
    x, wide = (mx.zeros((1, dim), mx.bfloat16) for dim in (2048, 8192))
    one, large = (Packed.quantize(mx.zeros((16, row.shape[1]), mx.bfloat16)) for row in (x, wide))
    forms = [norm_project_form(rows, x, one, target) for rows, target in ((1, "cuda"), (2, "cuda"), (1, "metal"))]
    assert forms == ["row", "tensor", "plain"]
    assert norm_project_form(1, x.astype(mx.float32), one, "cuda") == "plain"
    assert norm_project_form(1, wide, large, "cuda") == "tensor"
    with pytest.raises(ValueError, match="a simdgroup for each task of a tile, 12 at most: take 'tensor'"):
        norm_project_call(wide, wide, wide[0], 1e-6, large, "row")


@pytest.mark.parametrize(("outputs", "tiles"), [(12352, 6), (9216, 5), (2048, 1), (16384, 6)])
def test_tiles_of_a_lone_row_give_each_multiprocessor_of_an_h200_a_threadgroup(outputs, tiles):
    x = mx.zeros((1, 2048), mx.bfloat16)
    call = norm_project_call(x, x, x[0], 1e-6, Packed.quantize(mx.zeros((outputs, 2048), mx.bfloat16)), "row")
    assert dict(call["template"])["TILES"] == tiles
    threads = call["threadgroup"][0]
    assert call["grid"][0] % threads == 0
    assert (call["grid"][0] // threads - 1) * 16 * tiles < outputs <= call["grid"][0] // threads * 16 * tiles


def test_norm_project_refuses_what_does_not_fit_beside_the_product():
    weights = Packed.quantize(normal(32, 2048))
    with pytest.raises(ValueError, match=r"at most 16384 bytes in all.*\(3, 2048\).*take residual_rms_norm"):
        fused.norm_project(normal(3, 2048), normal(3, 2048), normal(2048), 1e-6, weights)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [mx.int32, mx.uint8])
def test_embedding_rows_are_the_rows_dequantised(kind, target):
    weights = Packed.quantize(normal(17, 64), 32, 8)
    tokens = mx.array([[16, 0, 3], [3, 9, 1]], dtype=kind)
    got = fused.embedding_rows(tokens, weights, mx.float32, target=target)
    want = mx.dequantize(*(array[tokens] for array in weights.arrays), 32, 8)
    assert got.shape == (2, 3, 64)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-7)  # a unit in the last place of the largest product


@pytest.mark.parametrize("target", TARGETS)
def test_tokens_that_an_embedding_does_not_have_read_nothing(target):
    weights = Packed.quantize(normal(9, 64), 32)
    rows = lambda tokens: fused.embedding_rows(tokens, weights, mx.float32, target=target)
    assert mx.array_equal(rows(mx.array([-1, -9])), rows(mx.array([8, 0]))), "negative numbers count from the end"
    assert mx.all(mx.isnan(rows(mx.array([9, -10, 1 << 30, -(1 << 31)])))).item()
    assert mx.all(mx.isnan(rows(mx.array([9, 0xFFFFFFFF], dtype=mx.uint32)))).item()


def test_appended_tokens_may_lie_flat():
    tails = [normal(2, 1, 8, 64) for _ in range(2)]
    norms = {"q_weight": normal(64), "k_weight": normal(64), "positions": mx.array([3, 7])}
    given = {**norms, "tail_keys": tails[0], "tail_values": tails[1], "write": mx.array([[1], [4]])}
    projected, options = normal(2, 3, 6 * 64), {"eps": 1e-6, "rotary": 16, "target": "reference"}
    want = fused.append_heads(projected, **given, **options)
    got = fused.append_heads(projected.reshape(6, -1), **given, **options)
    assert all(mx.array_equal(one, other) for one, other in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=r"projected \(5, 384\)"):
        fused.append_heads(projected.reshape(6, -1)[:5], **given, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_rotation_is_relative(target):
    """The product of a rotated q and k depends on the distance alone, near position 0 and near 100,000."""
    q, k = normal(1, 1, 1, 32), normal(1, 1, 1, 32)

    def product(at: int) -> float:
        turn = lambda position: fused.qk_norm_rope(
            q, k, mx.ones((32,)), mx.ones((32,)), mx.array([position]), eps=1e-6, rotary=32, base=1e6, target=target
        )
        return (turn(at + 3)[0] * turn(at)[1]).sum().item()

    assert abs(product(0) - product(100_000)) < 0.05
    assert abs(product(0) - product(50)) < 1e-4


@pytest.mark.parametrize("target", TARGETS)
def test_given_frequencies_and_no_rotation(target):
    q, k, weights = normal(1, 2, 1, 16), normal(1, 2, 1, 16), mx.ones((2, 16))
    at = mx.array([9])
    frequency = 1e4 ** (-mx.arange(0, 8, 2) / 8)
    given = fused.qk_norm_rope(q, k, *weights, at, eps=0.0, rotary=8, inverse_frequency=frequency, target=target)
    based = fused.qk_norm_rope(q, k, *weights, at, eps=0.0, rotary=8, base=1e4, target=target)
    np.testing.assert_allclose(given[0], based[0], atol=1e-5)
    still = fused.qk_norm_rope(q, k, *weights, at, eps=0.0, rotary=0, target=target)[0]
    np.testing.assert_allclose(still, mx.fast.rms_norm(q, None, 0.0).transpose(0, 2, 1, 3), atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_output_gate_is_mlx_lms(target):
    attended, projected = normal(2, 3, 5, 16), normal(2, 5, 3, 32)
    _, gate = mx.split(projected, 2, axis=-1)
    want = attended.transpose(0, 2, 1, 3).reshape(2, 5, -1) * mx.sigmoid(gate.reshape(2, 5, -1))
    np.testing.assert_allclose(fused.output_gate(attended, projected, target=target), want, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_gated_rms_norm_is_mlx_lms(target):
    from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

    norm = Qwen3NextRMSNormGated(24)
    norm.weight = mx.random.uniform(0.5, 1.5, (24,))
    x, z = normal(2, 3, 4, 24), normal(2, 3, 4, 24)
    got = fused.gated_rms_norm(x, z, norm.weight, norm.eps, target=target)
    np.testing.assert_allclose(got, norm(x, z), atol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start", [0, 8, 13])
def test_gates_may_lie_inside_wider_rows(target, start):
    x, wide, weight = normal(3, 2, 16), normal(3, 48), normal(16)
    z = wide[:, start : start + 32].reshape(3, 2, 16)
    inside = fused.gated_rms_norm(x, wide, weight, 1e-6, start=start, target=target)
    # Rows that begin off a multiple of four are read one by one, and summed in another order.
    np.testing.assert_allclose(inside, fused.gated_rms_norm(x, z, weight, 1e-6, target=target), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, MAX_ROUTED_ROWS, MAX_ROUTED_ROWS + 1])
@pytest.mark.parametrize(("group_size", "bits"), [(64, 8), (32, 4)])
def test_norm_router_is_mlxs_operations(target, rows, group_size, bits):
    """On both sides of the switch to a matmul."""
    x, residual, weight = normal(rows, 128), normal(rows, 128), normal(128)
    router = quantised(19, 128, group_size, bits)
    hidden, normed, logits = fused.norm_router(
        x, residual, weight, router, 1e-6, group_size=group_size, bits=bits, target=target
    )
    np.testing.assert_allclose(hidden, x + residual, atol=1e-6)
    np.testing.assert_allclose(normed, mx.fast.rms_norm(x + residual, weight, 1e-6), atol=1e-5)
    want = mx.quantized_matmul(normed, *router, transpose=True, group_size=group_size, bits=bits)
    np.testing.assert_allclose(logits, want, atol=1e-5)


def test_chains_can_be_compiled():
    """Nothing in the operations reads an array on the host."""
    weights = mx.ones((32,))

    def chain(projected, keys, positions):
        q, _ = fused.qk_norm_rope(projected, keys, weights, weights, positions, eps=1e-6, rotary=8)
        joined = fused.output_gate(q, projected).reshape(6, 4, 32)
        return fused.gated_rms_norm(joined, joined, weights, 1e-6)

    # Traced alone: evaluating it compiles C++.
    out = mx.compile(chain)(normal(2, 3, 4, 64), normal(2, 3, 2, 32), mx.array([1, 2]))
    assert out.shape == (6, 4, 32)


def test_infinite_gates_saturate():
    """A gate of -inf closes and one of +inf opens, without NaN."""
    gates = mx.array([-np.inf, -1e4, 1e4, np.inf] * 2)
    projected = mx.concatenate([mx.zeros((8,)), gates]).reshape(1, 1, 1, 16)
    for target in TARGETS:
        out = fused.output_gate(mx.ones((1, 1, 1, 8)), projected, target=target)
        assert out.reshape(-1).tolist() == [0, 0, 1, 1] * 2


def test_rotation_needs_its_barrier():
    """Without the simdgroup's barrier a lane may read its partner's value before it is there: a race is found."""
    call = qk_norm_rope_call(
        normal(1, 1, 2, 64), normal(1, 1, 1, 32), mx.ones((32,)), mx.ones((32,)), mx.array([1]), 1e-6, 16
    )
    header = QK_NORM_ROPE.text.header
    mutant = replace(QK_NORM_ROPE.text, header=header.replace("simdgroup_barrier(mem_flags::mem_threadgroup);", ""))
    assert mutant.header != header
    faults = simulator.run(mutant, QK_NORM_ROPE.launch(**call), check=True).faults
    assert any("race" in fault.kind for fault in faults)


def footprint(kernel, call) -> int:
    """Bytes that a simulated launch touches, each once."""
    return simulator.run(kernel.text, kernel.launch(**call), check=True).traffic.summary()["footprint"]


def test_fused_bytes_are_what_the_kernels_touch():
    """The claims of `savings` against the simulator's count, in fp32; small inputs (positions, eps) come on top."""
    q, k, weights = normal(2, 3, 4, 64), normal(2, 3, 2, 32), mx.ones((2, 32))
    claims = [
        (
            QK_NORM_ROPE,
            qk_norm_rope_call(q, k, *weights, mx.array([1, 2]), 1e-6, 8),
            savings.qk_norm_rope(6, 4, 2, 32, 4),
        ),
        (OUTPUT_GATE, output_gate_call(normal(2, 4, 3, 32), q), savings.output_gate(6, 4, 32, 4, length=3)),
        (
            GATED_RMS_NORM,
            gated_rms_norm_call(normal(6, 4, 32), normal(6, 4, 32), weights[0], 1e-6),
            savings.gated_rms_norm(6, 4, 32, 4),
        ),
        (
            NORM_ROUTER,
            norm_router_call(normal(2, 128), normal(2, 128), mx.ones((128,)), quantised(24, 128), 1e-6, 64, 8),
            savings.norm_router(2, 128, 24, itemsize=4),
        ),
        (
            NORM_PROJECT["plain"],
            norm_project_call(normal(2, 128), normal(2, 128), mx.ones((128,)), 1e-6, Packed.quantize(normal(160, 128))),
            savings.norm_project(2, 128, 160, itemsize=4),
        ),
        (
            EMBEDDING_ROWS,
            embedding_rows_call(mx.array([5, 2]), Packed.quantize(normal(9, 512)), mx.float32),
            savings.embedding_rows(2, 512, itemsize=4),
        ),
        (SWIGLU, swiglu_call(normal(3, 500), normal(3, 500)), savings.swiglu(3, 500, itemsize=4)),
    ]
    for kernel, call, saving in claims:
        touched = footprint(kernel, call)
        assert saving.fused.bytes <= touched <= saving.fused.bytes * 1.05 + 2048, kernel.name
        assert saving.launches > 0
        assert saving.bytes > 0 or kernel is NORM_ROUTER


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fused.qk_norm_rope(
                normal(1, 1, 2, 24), normal(1, 1, 1, 16), mx.ones(16), mx.ones(16), mx.array([0]), eps=0.0, rotary=8
            ),
            "16 or 32 wide for keys 16 wide, not 24",
        ),
        (
            lambda: fused.qk_norm_rope(
                normal(1, 1, 2, 16), normal(1, 1, 1, 16), mx.ones(16), mx.ones(16), mx.array([0]), eps=0.0, rotary=7
            ),
            "rotary must be even and at most 16, not 7",
        ),
        (
            lambda: fused.qk_norm_rope(
                normal(2, 3, 2, 16), normal(2, 3, 1, 16), mx.ones(16), mx.ones(16), mx.array([0]), eps=0.0, rotary=8
            ),
            r"positions need shape \(2,\) or \(2, 3\), not \(1,\)",
        ),
        (lambda: fused.output_gate(normal(1, 2, 3, 4), normal(1, 2, 3, 8)), r"q_gate needs shape \(1, 3, 2, 8\)"),
        (lambda: fused.gated_rms_norm(normal(2, 2, 4), normal(2, 9), mx.ones(4), 0.0, start=2), "8 columns from 2 on"),
        (
            lambda: fused.norm_router(normal(1, 96), normal(1, 96), mx.ones(96), quantised(4, 128), 0.0),
            "divide D = 96, not 8 and 64",
        ),
        (
            lambda: fused.norm_router(normal(1, 64), normal(1, 64), mx.ones(64), quantised(4, 128), 0.0),
            "does not fit D = 64",
        ),
        (
            lambda: fused.embedding_rows(normal(2), Packed.quantize(normal(32, 64)), mx.float32),
            r"tokens are whole numbers, at least one, not \(2,\) mlx.core.float32",
        ),
        (
            lambda: fused.embedding_rows(mx.array([1]), Packed.quantize(normal(32, 64)), mx.int32),
            "rows are float32, float16 or bfloat16, not mlx.core.int32",
        ),
        (
            lambda: fused.place_columns(mx.array([1]), mx.array([1, 2]), 1, 1),
            r"settled is one number, int32 \[1\], not \(2,\)",
        ),
        (
            lambda: fused.place_columns(mx.array([1]), mx.array([1]), 2, 1, mx.array([0])),
            r"padding is int32 \[2\], a number for each row, not \(1,\)",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
