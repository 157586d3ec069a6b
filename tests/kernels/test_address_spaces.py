"""clang refuses what Metal would refuse about address spaces, and nothing that Metal accepts."""

from __future__ import annotations

import importlib
import shutil

import mlx.core as mx
import pytest

from labkit.kernels import address_spaces, simulator
from labkit.kernels.signature import MetalText, make_launch

HELPER = "inline float first(const device float* p) { return p[0]; }"


def check(source, *, header="", size=64, dtype=mx.float32):
    text = MetalText("spaces", ("x", "k"), ("y",), source, header)
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [dtype]}
    launch = make_launch(text, inputs=[mx.zeros((size,), dtype), 3], **call)
    return address_spaces.check(text, launch)


def test_an_input_of_few_elements_is_constant():
    """MLX passes it in Metal's constant address space, which a `const device` parameter does not take."""
    source = "uint i = thread_position_in_grid.x;\ny[i] = first(x);"
    assert check(source, header=HELPER, size=8) == []
    errors = check(source, header=HELPER, size=7)
    assert any("spaces.metal:2" in error and "first" in error for error in errors), errors
    assert (
        check(
            source,
            header=HELPER.replace("const device", "constant"),
            size=7,
        )
        == []
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("threadgroup float s[4]; y[0] = first(s);", "threadgroup float s[4]; y[0] = s[0];"),
        (
            "threadgroup float s[4]; device float* p = s; y[0] = p[0];",
            "threadgroup float s[4]; threadgroup float* p = s; y[0] = p[0];",
        ),
        ("float a = x[0]; device float* p = &a; y[0] = p[0];", "float a = x[0]; thread float* p = &a; y[0] = p[0];"),
        ("device float* p = x; y[0] = p[0];", "const device float* p = x; y[0] = p[0];"),
        ("k = 4; y[0] = k;", "int m = k; m = 4; y[0] = m;"),
        ("x[0] = 1;", "y[0] = 1;"),
        ("y[0] = nothing_known(x[0]);", "y[0] = metal::precise::exp(x[0]);"),
    ],
)
def test_wrong_spaces_are_refused_and_right_ones_accepted(wrong, right):
    assert check(wrong, header=HELPER)
    assert check(right, header=HELPER) == []


def test_the_vocabulary_covers_what_kernels_use():
    source = """
    threadgroup float s[32];
    threadgroup atomic_uint count;
    uint lane = thread_index_in_simdgroup;
    float4 v = ((const device float4*)x)[lane & 3];
    float a = dot(v, float4(1.0f)) + max(v.x, 0.0f) + clamp(v.y, 0.0f, 1.0f) + simd_sum(v.z) + simd_shuffle_xor(v.w, 1);
    simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(m, s, 8);
    simdgroup_multiply_accumulate(m, m, m, m);
    simdgroup_store(m, y, 8);
    atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    uint votes = uint(simd_vote::vote_t(simd_ballot(a > 0)));
    half h = static_cast<half>(a);
    bfloat16_t b = static_cast<bfloat16_t>(a);
    y[lane] = as_type<float>(as_type<uint>(a)) + float(h) + float(b) + popcount(votes) + (isnan(a) ? INFINITY : M_PI_F);
    """
    assert check(source) == []


def test_mlx_lms_kernels_are_accepted():
    with simulator.intercept(fresh=["mlx_lm.models.gated_delta"]):
        module = importlib.import_module("mlx_lm.models.gated_delta")
        kernels = [module._gated_delta_kernel_vec_masked, module._gated_delta_kernel_packed]
    B, T, Hk, Hv, Dk, Dv = 1, 8, 2, 4, 128, 16
    gate = {0: (B, T, Hv, Dk), 1: (B, T, Hv)}
    for index, kernel in enumerate(kernels):
        shapes = [(B, T, Hk, Dk), (B, T, Hk, Dk), (B, T, Hv, Dv), gate[index], (B, T, Hv), (B, Hv, Dv, Dk)]
        inputs = [mx.zeros(shape) for shape in shapes] + [T] + ([mx.ones((B, T), mx.bool_)] if index == 0 else [])
        template = [("InT", mx.bfloat16), ("StT", mx.float32), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)]
        call = {"grid": (32, Dv, B * Hv), "threadgroup": (32, 4, 1), "template": template}
        call |= {"output_shapes": [(B, T, Hv, Dv), shapes[-1]], "output_dtypes": [mx.bfloat16, mx.float32]}
        assert address_spaces.check(kernel.text, make_launch(kernel.text, inputs=inputs, **call)) == []


def test_no_clang_says_how_to_get_one(monkeypatch):
    address_spaces.find_clang.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    try:
        with pytest.raises(address_spaces.ClangMissing, match="pip install ziglang"):
            address_spaces.find_clang()
    finally:
        monkeypatch.undo()
        address_spaces.find_clang.cache_clear()
