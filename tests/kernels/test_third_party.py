"""Kernels of mlx-lm run unmodified in the simulator: right against their references, and clean in check mode."""

from __future__ import annotations

import importlib
import time

import mlx.core as mx
import pytest

from labkit.kernels import simulator

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
MODULES = ["mlx_lm.models.gated_delta", "mlx_lm.kernels"]

# One rounding of the result and a few of the inputs, in units of the largest value.
STEP = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def library():
    """mlx-lm's kernels, made for the simulator in check mode; every launch must be clean."""
    with simulator.intercept(fresh=MODULES, check=True) as session:
        modules = {name.rsplit(".", 1)[1]: importlib.import_module(name) for name in MODULES}
        yield modules["gated_delta"], modules["kernels"], session


@pytest.fixture
def clean(library):
    """Fails the test if one of its launches had a fault, or if nothing ran in the simulator."""
    session = library[2]
    session.runs.clear()
    session.check, session.order = True, "forward"
    yield session
    assert session.runs, "nothing ran in the simulator"
    assert not session.faults, "\n".join(str(fault) for fault in session.faults)


def close(got: mx.array, want: mx.array, dtype: mx.Dtype, steps: float = 1.0) -> None:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    assert got.shape == want.shape
    error, size = mx.abs(got - want).max().item(), mx.abs(want).max().item()
    assert error <= steps * STEP[dtype] * size, f"off by {error:.3g} of {size:.3g}"


# ---------------------------------------------------------------- gated delta


def gated_delta_inputs(dtype, *, B=2, T=5, Hk=2, Hv=4, Dk=128, Dv=16, vector=False, masked=False):
    q, k = (mx.random.normal((B, T, Hk, Dk)) for _ in range(2))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((B, T, Hv, Dv))
    gate = mx.random.uniform(0.8, 1.0, (B, T, Hv, Dk) if vector else (B, T, Hv))
    beta = mx.random.uniform(0, 1, (B, T, Hv))
    state = mx.random.normal((B, Hv, Dv, Dk)) * 0.1
    mask = mx.arange(T)[None] >= mx.array([0, 2])[:, None] if masked else None
    return *(x.astype(dtype) for x in (q, k, v)), gate, beta.astype(dtype), state, mask


def as_float(inputs):
    return [x if x is None or x.dtype == mx.bool_ else x.astype(mx.float32) for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["generic", "mask", "vector", "vector and mask", "packed", "xtree"])
def test_gated_delta(library, clean, form, dtype):
    gated_delta = library[0]
    inputs = gated_delta_inputs(dtype, vector="vector" in form, masked="mask" in form)
    run = {"packed": gated_delta.gated_delta_kernel, "xtree": gated_delta.gated_delta_kernel_xtree}.get(
        form, gated_delta.gated_delta_kernel_unpacked
    )
    y, state = run(*inputs)
    want_y, want_state = gated_delta.gated_delta_ops(*as_float(inputs))
    valid = inputs[-1]
    if valid is not None:
        # Where a step is masked the kernel writes zero and the ops compute a value that nobody uses.
        want_y = mx.where(valid[..., None, None], want_y, 0.0)
    close(y, want_y, dtype)
    close(state, want_state, mx.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_delta_forms_agree_bit_for_bit(library, clean, dtype):
    gated_delta = library[0]
    inputs = gated_delta_inputs(dtype)
    clean.check = False
    first = gated_delta.gated_delta_kernel(*inputs)
    for run in (gated_delta.gated_delta_kernel_unpacked, gated_delta.gated_delta_kernel_xtree):
        for got, want in zip(run(*inputs), first, strict=True):
            assert mx.array_equal(got, want)


def slowness() -> float:
    """How many times slower than on the machine that the bound was set on a loop of Python's runs here and now."""
    taken = []
    for _ in range(3):
        begin = time.process_time()
        sum(number * number for number in range(1_000_000))
        taken.append(time.process_time() - begin)
    return max(1.0, min(taken) / 0.07)


@pytest.mark.parametrize("form", ["generic", "packed"])
def test_gated_delta_scan_of_2048_tokens_is_quick(library, clean, form):
    """The bound is on this process's time, not the clock's: neighbours on the machine do not count."""
    gated_delta = library[0]
    inputs = gated_delta_inputs(mx.float32, B=1, T=2048, Hk=2, Hv=4, Dk=128, Dv=128)
    run = gated_delta.gated_delta_kernel if form == "packed" else gated_delta.gated_delta_kernel_unpacked
    clean.check = False
    run(*gated_delta_inputs(mx.float32, B=1, T=1, Hk=2, Hv=4, Dk=128, Dv=128))
    begin = time.process_time()
    run(*inputs)
    assert time.process_time() - begin < 10 * slowness()


# ---------------------------------------------------------------- mlx_lm.kernels


def rms(x, eps):
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expert_routing(library, clean, dtype):
    logits, bias = mx.random.normal((5, 100)).astype(dtype), mx.random.normal((100,)) * 0.1
    inds, weights = library[1].expert_routing(logits, bias, top_k=4, multiplier=0.5, score_eps=1e-20, route_scale=2.5)
    scores = mx.sigmoid(logits.astype(mx.float32) * 0.5)
    want = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    assert mx.array_equal(inds, want.astype(mx.uint32))
    chosen = mx.take_along_axis(scores, want, axis=-1)
    close(weights, chosen / chosen.sum(-1, keepdims=True) * 2.5, mx.float32)


@pytest.mark.parametrize("next_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_add_norm(library, clean, dtype, next_norm):
    import mlx.nn as nn

    dim = 520
    branch = mx.random.normal((3, dim)).astype(dtype)
    stream, alpha, beta = mx.random.normal((3, dim)), mx.random.normal((dim,)), mx.random.normal((dim,))
    norm = nn.RMSNorm(dim, eps=1e-5) if next_norm else None
    new, normed = library[1].norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=None, post_eps=1e-6, next_norm=norm
    )
    want = alpha * stream + beta * rms(branch.astype(mx.float32), 1e-6)
    close(new, want, dtype)
    if next_norm:
        close(normed, rms(new, 1e-5), dtype)
        assert mx.array_equal(library[1].pre_norm(new, norm, dtype=dtype), normed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_post_expert_norm_combine(library, clean, dtype):
    experts, weight = mx.random.normal((3, 4, 520)).astype(dtype), mx.random.uniform(0.5, 1.5, (520,)).astype(dtype)
    mix = mx.random.uniform(0, 1, (3, 4))
    got = library[1].post_expert_norm_combine(experts, mix, norm_weight=weight, eps=1e-6)
    scaled = experts.astype(mx.float32) * weight.astype(mx.float32)
    close(got, (rms(scaled, 1e-6) * mix[..., None]).sum(1), dtype, steps=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qk_norm(library, clean, dtype):
    heads, kv_heads, dim = 4, 2, 72
    qkvg = mx.random.normal((1, 3, 2 * (heads + kv_heads) * dim)).astype(dtype)
    q, k = library[1].qk_norm(qkvg, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=1e-6, query_scale=0.25)
    both = qkvg[..., : (heads + kv_heads) * dim].reshape(1, 3, heads + kv_heads, dim).astype(mx.float32)
    want = rms(both, 1e-6)
    close(q, want[:, :, :heads] * 0.25, dtype)
    close(k, want[:, :, heads:], dtype)


@pytest.mark.parametrize("offset", ["number", "array"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qk_norm_rope(library, clean, dtype, offset):
    heads, kv_heads, dim = 4, 2, 64
    qkvg = mx.random.normal((2, 3, 2 * (heads + kv_heads) * dim)).astype(dtype)
    at = 7 if offset == "number" else mx.array([7, 11])
    q, k = library[1].qk_norm_rope(
        qkvg, n_heads=heads, n_kv_heads=kv_heads, head_dim=dim, eps=1e-6, query_scale=0.25, rope_base=1e4, offset=at
    )
    both = qkvg[..., : (heads + kv_heads) * dim].reshape(2, 3, heads + kv_heads, dim).astype(mx.float32)
    normed = rms(both, 1e-6).swapaxes(1, 2)
    want = mx.fast.rope(normed, dim, traditional=True, base=1e4, scale=1.0, offset=at).swapaxes(1, 2)
    close(q, want[:, :, :heads] * 0.25, dtype, steps=4 if dtype == mx.float32 else 1)
    close(k, want[:, :, heads:], dtype, steps=4 if dtype == mx.float32 else 1)


@pytest.mark.parametrize("layout", ["rows in order", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_sigmoid_gate(library, clean, dtype, layout):
    """The kernel takes any layout: its inputs are a transposed view here."""
    B, H, L, D = 2, 4, 3, 72
    if layout == "strided":
        x = mx.random.normal((B, L, H, D)).astype(dtype).swapaxes(1, 2)
        gate = mx.random.normal((B, L, 2 * H * D)).astype(dtype)[..., ::2]
    else:
        x, gate = mx.random.normal((B, H, L, D)).astype(dtype), mx.random.normal((B, L, H * D)).astype(dtype)
    got = library[1].rms_norm_sigmoid_gate(x, gate, eps=1e-6)
    want = rms(x.astype(mx.float32), 1e-6).swapaxes(1, 2).reshape(B, L, H * D) * mx.sigmoid(gate.astype(mx.float32))
    close(got, want, dtype)


def test_intercept_leaves_nothing_behind():
    before = mx.fast.metal_kernel, mx.metal.is_available, importlib.import_module("mlx_lm.kernels")
    with simulator.intercept(fresh=["mlx_lm.kernels"]):
        assert importlib.import_module("mlx_lm.kernels") is not before[2]
        assert mx.metal.is_available()
    assert (mx.fast.metal_kernel, mx.metal.is_available, importlib.import_module("mlx_lm.kernels")) == before
