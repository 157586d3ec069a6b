"""clang refuses what Metal would refuse about address spaces, and nothing that Metal accepts."""

from __future__ import annotations

import importlib
import shutil

import mlx.core as mx
import pytest

from labkit.kernels import address_spaces, metal_rules, simulator
from labkit.kernels.signature import MetalText, make_launch

HELPER = "inline float first(const device float* p) { return p[0]; }"


def prepare(source, *, header="", size=64, dtype=mx.float32, template=()):
    text = MetalText("spaces", ("x", "k"), ("y",), source, header)
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [dtype]}
    return text, make_launch(text, inputs=[mx.zeros((size,), dtype), 3], template=list(template), **call)


def check(source, **how):
    return address_spaces.check(*prepare(source, **how))


def everything(source, **how):
    """What clang and the rules say together."""
    text, launch = prepare(source, **how)
    return address_spaces.check(text, launch) + metal_rules.broken(text, launch)


def test_an_input_of_few_elements_is_constant():
    """MLX passes it in Metal's constant address space, which a `const device` parameter does not take."""
    source = "uint i = thread_position_in_grid.x;\ny[i] = first(x);"
    assert check(source, header=HELPER, size=8) == []
    errors = check(source, header=HELPER, size=7)
    assert any("spaces.metal:2" in error and "first" in error for error in errors), errors
    assert (
        check(
            source,
            header=HELPER.replace("const device", "const constant"),
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


T_AND_N = (("T", mx.bfloat16), ("N", 4))
HALF_BF16 = {"dtype": mx.bfloat16, "template": T_AND_N}


@pytest.mark.parametrize(
    ("wrong", "right", "how"),
    [  # numbers of two types: Metal's functions have one form for each type, and none is the better
        ("y[0] = min(thread_position_in_grid.x, 3);", "y[0] = min(thread_position_in_grid.x, 3u);", {}),
        ("y[0] = max(x[0], 1);", "y[0] = max(x[0], 1.0f);", {}),
        ("y[0] = clamp(k, 0, 3u);", "y[0] = clamp(k, 0, 3);", {}),
        ("y[0] = exp(k);", "y[0] = exp(float(k));", {}),
        # floats that do not become one another by themselves
        ("float f = k; y[0] = f;", "float f = k; y[0] = static_cast<T>(f);", HALF_BF16),
        ("half h = x[0]; y[0] = static_cast<T>(h);", "float h = x[0]; y[0] = static_cast<T>(h);", HALF_BF16),
        ("double d = x[0]; y[0] = d;", "float d = x[0]; y[0] = d;", {}),
        ("y[0] = x[0] * 1e-6;", "y[0] = x[0] * 1e-6f;", {}),
        # what lanes hand each other, what matrices and atomics hold
        ("bool b = simd_shuffle(x[0] > 0, 1);", "bool b = simd_shuffle(uint(x[0] > 0), 1) != 0;", {}),
        ("ulong s = simd_sum(ulong(k));", "uint s = simd_sum(uint(k));", {}),
        ("simdgroup_matrix<int, 8, 8> m;", "simdgroup_matrix<T, 8, 8> m;", HALF_BF16),
        ("simdgroup_matrix<float, 16, 8> m;", "simdgroup_matrix<float, 8, 8> m;", {}),
        ("threadgroup atomic<short> a[1];\natomic<short> b;", "threadgroup atomic<int> a[1];\natomic<int> b;", {}),
        ("uint u = as_type<uint>(x[0]);", "ushort u = as_type<ushort>(x[0]);", HALF_BF16),
        # a name that MLX's template has already: a redeclaration even in an inner block
        ("for (int i = 0; i < 2; i++) { int N = i; y[i] = N; }", "for (int i = 0; i < 2; i++) y[i] = N;",
         {"template": T_AND_N}),
        ("static constexpr int A = 3; y[0] = A;", "constexpr int A = 3; y[0] = A;", {}),
    ],
)  # fmt: skip
def test_types_that_metal_does_not_take(wrong, right, how):
    assert check(wrong, **how)
    assert everything(right, **how) == []


STRUCT = "template <class T> struct Box {{ {} }};"
BOX = {"template": T_AND_N, "dtype": mx.float32}


@pytest.mark.parametrize(
    ("wrong", "right", "source"),
    [
        ("static constexpr int A = 4;", "static constexpr constant int A = 4;", "y[0] = Box<float>::A;"),
        ("static float of(float* p) { return p[0]; }", "static float of(thread float* p) { return p[0]; }",
         "float a[1] = {1.0f}; y[0] = Box<float>::of(a);"),
        ("static float of(float& p) { return p; }", "static float of(thread float& p) { return p; }",
         "float a = 1.0f; y[0] = Box<float>::of(a);"),
        ("static float of(thread const device T* const* p) { return p[0][0]; }",
         "static float of(const device T* const thread* p) { return p[0][0]; }",
         "const device float* a[1] = {x}; y[0] = Box<float>::of(a);"),
        ("static float of(const device T* const* p) { return p[0][0]; }",
         "static float of(const device T* const thread* p) { return p[0][0]; }",
         "const device float* a[1] = {x}; y[0] = Box<float>::of(a);"),
        ("static float of(float (*p)[2]) { return p[0][0]; }",
         "static float of(thread float (*p)[2]) { return p[0][0]; }",
         "float a[1][2] = {{1.0f, 1.0f}}; y[0] = Box<float>::of(a);"),
        ("static float of() { threadgroup float s[4]; return s[0]; }", "static float of() { float s[4]; return s[0]; }",
         "y[0] = Box<float>::of();"),
        ("static uint of() { return thread_position_in_grid.x; }", "static uint of(uint i) { return i; }",
         "y[0] = thread_position_in_grid.x;"),
        ("}; struct Other : Box<T> {", "T value; };\nstruct Other { float value;", "y[0] = 0;"),
        ("union { T a; uint b; };", "T a; uint b;", "y[0] = 0;"),
    ],
)  # fmt: skip
def test_what_a_header_must_not_say(wrong, right, source):
    assert everything(source, header=STRUCT.format(wrong), **BOX)
    assert everything(source, header=STRUCT.format(right), **BOX) == []


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ("threadgroup alignas(16) float s[4];", "alignas(16) threadgroup float s[4];", "before `threadgroup`"),
        ("if (k > 0) { threadgroup float s[4]; }", "threadgroup float s[4];", "inner block"),
        ("threadgroup float s[8]; float4 v = *(threadgroup float4*)(s + 4);",
         "alignas(16) threadgroup float s[8]; float4 v = *(threadgroup float4*)(s + 4);", "alignas"),
        ("auto add = [&](float a) { return a; };", "float add = 1.0f;", "lambda"),
        ("bool visible = k > 0;", "bool seen = k > 0;", "Metal's own"),
        ("goto end; end: y[0] = 0;", "y[0] = 0;", "goto"),
        ("float* p = nullptr;", "thread float* p = nullptr;", "no address space"),
    ],
)  # fmt: skip
def test_what_clang_takes_and_metal_does_not(wrong, right, said):
    assert any(said in found for found in metal_rules.broken(*prepare(wrong)))
    assert everything(right) == []


def test_products_are_no_pointers_and_cudas_branch_is_none_of_metals():
    source = "uint a = N * k; float b = x[0]; y[0] = (a & 1) ? sizeof(T) * a : b * (uint(a) * N);"
    header = '#if defined(__CUDACC__)\nint* pointer(int* p) { asm("nop;"); return p; }\n#else\n#endif'
    assert everything(source, header=header, **BOX) == []


def test_no_more_buffers_than_metal_has():
    names = tuple(f"a{i}" for i in range(16))
    for source, wrong in (("out[0] = a0[0];", False), (" ".join(f"{n}_shape;" for n in names), True)):
        text = MetalText("many", names, ("out",), source)
        launch = make_launch(
            text, inputs=[mx.zeros((8,))] * 16, output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )  # fmt: skip
        assert any("33 buffers" in found for found in metal_rules.broken(text, launch)) == wrong


def test_a_template_argument_is_part_of_a_name():
    assert any("minus" in found for found in metal_rules.broken(*prepare("y[0] = N;", template=[("N", -1)])))


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
