"""The simulator beyond faults: Metal's vocabulary by value, schedules, grid-wide barriers, guards."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import simulator
from labkit.kernels.signature import MetalText, make_launch
from tests.kernels.bodies import HEAD, launch, value

LANES = np.arange(64).reshape(2, 32)
SIMD = {
    "simd_sum(x[i])": lambda x: np.repeat(x.sum(1, keepdims=True), 32, 1),
    "simd_product(1.0f + 0.01f * x[i])": lambda x: np.repeat((1 + 0.01 * x).prod(1, keepdims=True), 32, 1),
    "simd_max(x[i])": lambda x: np.repeat(x.max(1, keepdims=True), 32, 1),
    "simd_min(x[i])": lambda x: np.repeat(x.min(1, keepdims=True), 32, 1),
    "simd_shuffle(x[i], 5)": lambda x: np.repeat(x[:, 5:6], 32, 1),
    "simd_shuffle(x[i], 31 - lane)": lambda x: x[:, ::-1],
    "simd_broadcast(x[i], 9)": lambda x: np.repeat(x[:, 9:10], 32, 1),
    "simd_broadcast_first(x[i])": lambda x: np.repeat(x[:, :1], 32, 1),
    "simd_shuffle_xor(x[i], 3)": lambda x: x[:, np.arange(32) ^ 3],
    "simd_shuffle_down(x[i], 4)": lambda x: np.concatenate([x[:, 4:], x[:, -4:]], 1),
    "simd_shuffle_up(x[i], 4)": lambda x: np.concatenate([x[:, :4], x[:, :-4]], 1),
    "simd_shuffle_rotate_down(x[i], 4)": lambda x: np.roll(x, -4, 1),
    "simd_shuffle_rotate_up(x[i], 4)": lambda x: np.roll(x, 4, 1),
    "simd_shuffle_and_fill_up(x[i], -1.0f, 2)": lambda x: np.concatenate([np.full((2, 2), -1.0), x[:, :-2]], 1),
    "simd_shuffle_and_fill_down(x[i], -1.0f, 2)": lambda x: np.concatenate([x[:, 2:], np.full((2, 2), -1.0)], 1),
    "simd_prefix_inclusive_sum(x[i])": lambda x: x.cumsum(1),
    "simd_prefix_exclusive_sum(x[i])": lambda x: x.cumsum(1) - x,
    "popcount(uint(simd_vote::vote_t(simd_ballot(x[i] > 0))))": lambda x: np.repeat(
        (x > 0).sum(1, keepdims=True), 32, 1
    ),
    "simd_any(x[i] > 2.9f)": lambda x: np.repeat((x > 2.9).any(1, keepdims=True), 32, 1),
    "simd_all(x[i] > -9)": lambda x: np.ones_like(x),
    "simd_is_first()": lambda x: LANES % 32 == 0,
    "simd_max(int(lane) ^ 21)": lambda x: np.full_like(x, 31),
    "quad_sum(x[i])": lambda x: np.repeat(x.reshape(2, 8, 4).sum(2), 4, 1),
    "quad_broadcast(x[i], 2)": lambda x: np.repeat(x.reshape(2, 8, 4)[:, :, 2], 4, 1),
    "simd_shuffle_xor(float4(x[i], 0, 0, x[i]), 1).w": lambda x: x[:, np.arange(32) ^ 1],
}


def test_simdgroup_functions():
    """All in one kernel: row k of y is the k-th function."""
    x = np.random.default_rng(random.getrandbits(32)).normal(size=(2, 32)).astype(np.float32)
    body = "\n".join(f"y[{k} * 64 + i] = {call};" for k, call in enumerate(SIMD))
    got = value(body, [mx.array(x.reshape(-1))], (len(SIMD), 2, 32))
    for k, (call, want) in enumerate(SIMD.items()):
        np.testing.assert_allclose(got[k], want(x).astype(np.float32), rtol=2e-5, atol=1e-5, err_msg=call)


MATH = {
    "exp(x[i])": np.exp,
    "metal::precise::exp2(x[i])": np.exp2,
    "fast::log(abs(x[i]) + 1)": lambda x: np.log(np.abs(x) + 1),
    "rsqrt(x[i] * x[i] + 1)": lambda x: 1 / np.sqrt(x * x + 1),
    "metal::tanh(x[i])": np.tanh,
    "clamp(x[i], -0.5f, 0.5f)": lambda x: np.clip(x, -0.5, 0.5),
    "max(x[i], 0.0f) + min(x[i], 1.0f)": lambda x: np.maximum(x, 0) + np.minimum(x, 1),
    "fma(x[i], 2.0f, 1.0f)": lambda x: 2 * x + 1,
    "select(x[i], 7.0f, x[i] > 0)": lambda x: np.where(x > 0, 7, x),
    "floor(x[i]) + ceil(x[i]) + rint(x[i]) + trunc(x[i])": lambda x: (
        np.floor(x) + np.ceil(x) + np.rint(x) + np.trunc(x)
    ),
    "as_type<float>(as_type<uint>(x[i]) ^ 0x80000000u)": lambda x: -x,
    "float(half(x[i]) * half(2.0f))": lambda x: (x.astype(np.float16) * np.float16(2)).astype(np.float32),
    "dot(float4(x[i]), float4(1, 2, 3, 4))": lambda x: 10 * x,
    "(float4(x[i], 1, 2, 3) * 2.0f).x + float2(float4(1, 2, 3, 4).zw).y": lambda x: 2 * x + 4,
    "float3(1, 2, x[i]).z + float2(float2(x[i], 1).yx).y": lambda x: 2 * x,
    "float(extract_bits(0xABCDu, 4, 8)) + float(popcount(7u)) + float(clz(1u))": lambda x: np.full_like(
        x, 0xBC + 3 + 31
    ),
    "float(uchar4(1, 2, 3, 4)[lane & 3])": lambda x: (np.arange(64) & 3) + 1.0,
    "isnan(x[i] / 0.0f * 0.0f) ? 1.0f : 0.0f": np.ones_like,
    "INFINITY > FLT_MAX ? M_PI_F : 0.0f": lambda x: np.full_like(x, math.pi),
    "pow(abs(x[i]), 1.5f) + sign(x[i])": lambda x: np.abs(x) ** 1.5 + np.sign(x),
}


def test_math():
    x = np.random.default_rng(random.getrandbits(32)).normal(size=64).astype(np.float32)
    body = "\n".join(f"y[{k} * 64 + i] = {call};" for k, call in enumerate(MATH))
    got = value(body, [mx.array(x)], (len(MATH), 64))
    for k, (call, want) in enumerate(MATH.items()):
        np.testing.assert_allclose(got[k], np.asarray(want(x), np.float32), rtol=2e-5, atol=1e-5, err_msg=call)


# Statements that leave a number in r; v is (x, 2, 3, 4), h is (5, x).
VECTORS = {
    "r = (v.zx * 2.0f).y;": lambda x: 2 * x,
    "r = (2.0f * v.xyz + v.zyx).x;": lambda x: 2 * x + 3,
    "r = dot(v.xy, h.yx);": lambda x: x * x + 10,
    "r = (v.zw - 1).x + (v.xy / h).y;": lambda x: 2 + 2 / x,
    "r = (-v.xw).x + float((v.yz < 2.5f).x);": lambda x: 1 - x,
    "v.xy = h; r = v.x + v.y + v.z;": lambda x: 5 + x + 3,
    "float4 u = v; u.xy = h; v.zw = u.xy; r = v.x + 10 * v.z + 100 * v.w;": lambda x: 101 * x + 50,
    "float4 u(7); u.xy = v.xy; r = u.x + u.y + u.z + u.w;": lambda x: x + 2 + 14,
    "v.yz *= 3.0f; r = v.x + v.y + v.z + v.w;": lambda x: x + 6 + 9 + 4,
    "v += h.y; r = v.w; v -= v; r += v.x;": lambda x: 4 + x,
    "float3 u(h, 9); r = u.y + u.z;": lambda x: x + 9,
    "float4 u(1, v.yz, h.x); r = u.y + 10 * u.z + 100 * u.w;": lambda x: 0 * x + 532,
    "packed_float3 p = v.xyz; r = p[0] + (p * 2.0f).z;": lambda x: x + 6,
    "int4 u(v * 0 + 6.5f); r = float((u << 1).x + (u % 4).y + (~u).z);": lambda x: 0 * x + 7,
    "r = float(any(v.zw == v.zw)) + float(all(v.yz != v.yz));": np.ones_like,
    "r = max(v, 2.5f).y + min(v.zw, h.xx).y + clamp(v.w, 0, 3);": lambda x: 0 * x + 9.5,
    "r = length(v.zw) + abs(-v).w + floor(v * 0 + 1.5f).x + pow(v.zw, 2.0f).x;": lambda x: np.full_like(
        x, 5 + 4 + 1 + 9
    ),
    "r = select(v, v * 2.0f, v > 2.5f).z + fma(v, 2.0f, h.x).w;": lambda x: 0 * x + 19,
    "half4 u(v); r = float((u.yz * half(2)).y) + float(bfloat(1.0f) * 2 + 0.5f);": lambda x: 0 * x + 8.5,
}


def test_vectors_and_what_is_picked_out_of_them():
    x = np.random.default_rng(random.getrandbits(32)).uniform(0.5, 2, size=64).astype(np.float32)
    head = "float r; float4 v(x[i], 2, 3, 4); float2 h(5, x[i]);"
    body = "\n".join(f"{{ {head} {code} y[{k} * 64 + i] = r; }}" for k, code in enumerate(VECTORS))
    got = value(body, [mx.array(x)], (len(VECTORS), 64))
    for k, (code, want) in enumerate(VECTORS.items()):
        np.testing.assert_allclose(got[k], np.asarray(want(x), np.float32), rtol=1e-5, err_msg=code)


NUMBERS = {  # what stands for any uint x
    "float(reverse_bits(x[i]) == (x[i] % 2u << 31 | reverse_bits(x[i] >> 1) >> 1))": 1,
    "float(rotate(x[i], 12u) == (x[i] << 12 | x[i] >> 20)) + float(rotate(x[i], 32u) == x[i])": 2,
    "float(mulhi(x[i], 1u << 20) == x[i] >> 12)": 1,
    "float(insert_bits(x[i], 5u, 3, 4) == ((x[i] & ~0x78u) | 0x28u)) + float(insert_bits(0u, x[i], 0, 32) == x[i])": 2,
    "float(extract_bits(int(0xF70u), 4, 8)) + float(extract_bits(x[i], 0, 32) == x[i])": -8,
    "float(ctz(x[i] | 256u) <= 8) + float(clz(0u)) + float(clz(1ul)) + float(popcount(ushort(7)))": 99,
    "float(numeric_limits<half>::max()) + float(numeric_limits<half>::epsilon()) * 1024": 65505,
    "float(numeric_limits<bfloat>::lowest() < -3.3e38f) + float(numeric_limits<bfloat>::epsilon())": 1.0078125,
    "float(isnan(numeric_limits<bfloat>::quiet_NaN())) + float(isinf(-numeric_limits<half>::infinity()))": 2,
    "float(bfloat(256) + 1) + float(bfloat(1.0f) + 0.001f > 1.0f) + sizeof(bfloat(1) * bfloat(1))": 259,
    "float(max(2, 3u)) + max(half(1), 2.5f) + min3(4.0f, 3.0f, 5.0f) + max3(1, 2, 3) + max(1.5, 2)": 13.5,
    "saturate(1.5f) + mix(2.0f, 4.0f, 0.25f) + step(1.0f, 0.5f) + fract(2.75f) + sign(-3)": 3.25,
    "float(signbit(-0.0f)) + float(isfinite(1.0f)) - float(isfinite(INFINITY)) + fast::divide(3.0f, 2.0f)": 3.5,
    "float(fma(half(1), half(2), half(3))) + float(sqrt(bfloat(4))) + exp(0)": 8,
}


def test_numbers_their_bits_and_limits():
    x = np.random.default_rng(random.getrandbits(32)).integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
    body = "\n".join(f"y[{k} * 64 + i] = {call};" for k, call in enumerate(NUMBERS))
    got = value(body, [mx.array(x)], (len(NUMBERS), 64))
    for k, (call, want) in enumerate(NUMBERS.items()):
        np.testing.assert_allclose(got[k], np.full(64, want, np.float32), rtol=1e-6, err_msg=call)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_each_small_float_operation_is_rounded(dtype):
    """bfloat16 and half as MLX rounds them, one operation at a time."""
    x, z = (mx.random.normal((256,)).astype(dtype) for _ in range(2))
    run = launch(
        "T a = x[i] * z[i]; y[i] = a + x[i] / z[i] - T(2);", [x, z], (256,), dtype, grid=256, template=[("T", dtype)]
    )
    assert mx.array_equal(run.outputs[0], x * z + x / z - mx.array(2, dtype))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_simdgroup_matrices(dtype):
    """A 16x24 by 24x8 product out of 8x8 tiles, one simdgroup for each 8 rows."""
    body = """
    threadgroup T stage[2][64];
    uint g = simdgroup_index_in_threadgroup;
    simdgroup_matrix<float, 8, 8> acc = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int k = 0; k < 24; k += 8) {
      for (uint e = lane; e < 64; e += 32) stage[g][e] = x[(g * 8 + e / 8) * 24 + k + e % 8];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<T, 8, 8> a, b;
      simdgroup_load(a, stage[g], 8);
      simdgroup_load(b, z + k, 24, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(acc, a, b, acc);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    simdgroup_store(acc, y + g * 64, 8);
    """
    x, z = mx.random.normal((16, 24)).astype(dtype), mx.random.normal((8, 24)).astype(dtype)
    got = value(body, [x, z], (16, 8), template=[("T", dtype)])
    want = np.array(x.astype(mx.float32)) @ np.array(z.astype(mx.float32)).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_atomics_and_a_histogram():
    x = mx.random.randint(0, 16, (1024,))
    body = "atomic_fetch_add_explicit(&y[x[i]], 1u, memory_order_relaxed);"
    run = launch(body, [x], (16,), mx.uint32, grid=1024, init_value=0, atomic_outputs=True, check=True)
    assert run.clean, str(run)
    assert run.traffic.atomics == 1024
    np.testing.assert_array_equal(np.array(run.outputs[0]), np.bincount(np.array(x), minlength=16))


GRID_BARRIER = """
y[i] = x[i];
for (uint round = 1; round <= 3; round++) {
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) {
    device atomic<uint>* arrived = (device atomic<uint>*)&count[0];
    atomic_fetch_add_explicit(arrived, 1u, memory_order_relaxed);
    while (atomic_load_explicit(arrived, memory_order_relaxed) < round * groups) {}
  }
  threadgroup_barrier(mem_flags::mem_device);
  float neighbour = y[(i + 64) % size];
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) {
    device atomic<uint>* left = (device atomic<uint>*)&count[1024];
    atomic_fetch_add_explicit(left, 1u, memory_order_relaxed);
    while (atomic_load_explicit(left, memory_order_relaxed) < round * groups) {}
  }
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = y[i] + neighbour;
}
"""


def grid_barrier(body, **options):
    text = MetalText("grid_barrier", ("x", "groups", "size"), ("y", "count"), HEAD + body)
    x = mx.arange(512, dtype=mx.float32)
    call = {"inputs": [x, 8, 512], "grid": (512, 1, 1), "threadgroup": (64, 1, 1), "init_value": 0}
    call |= {"output_shapes": [(512,), (2048,)], "output_dtypes": [mx.float32, mx.uint32]}
    return simulator.run(text, make_launch(text, **call), **options)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("order", ["forward", "reverse", 7])
def test_grid_wide_barriers_with_all_threadgroups_alive(check, order):
    run = grid_barrier(GRID_BARRIER, resident=True, check=check, order=order)
    assert run.clean, str(run)
    want = np.arange(512, dtype=np.float32)
    for _ in range(3):
        want = want + np.roll(want, -64)
    np.testing.assert_array_equal(np.array(run.outputs[0]), want)


def test_a_grid_barrier_without_its_fence_is_a_race():
    """The last barrier before the signal lets go of mem_device: the other threadgroups may not see the values."""
    weak = GRID_BARRIER.replace(
        "threadgroup_barrier(mem_flags::mem_device);", "threadgroup_barrier(mem_flags::mem_none);", 1
    )
    kinds = {fault.kind for fault in grid_barrier(weak, resident=True, check=True).faults}
    assert kinds & {"race-between-threadgroups", "race-between-simdgroups"}


def test_resident_mode_says_what_is_too_much():
    with pytest.raises(ValueError, match="resident mode keeps 1000000 threads alive"):
        launch("y[i] = x[0];", [mx.zeros((1,))], (1000000,), grid=1000000, resident=True)


def test_the_last_threadgroup_may_read_what_the_others_published():
    """Ordered by an atomic between fences, though the threadgroups run one after the other."""
    body = """
    threadgroup bool last;
    y[i] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    if (t == 0) {
      device atomic<uint>* arrived = (device atomic<uint>*)&y[256];
      last = atomic_fetch_add_explicit(arrived, 1u, memory_order_relaxed) == 3;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    if (last && t == 0) { float sum = 0; for (int k = 0; k < 256; k++) sum += y[k]; y[300] = sum; }
    """
    for order in ("forward", "reverse", 3):
        x = mx.random.normal((256,))
        run = launch(body, [x], (512,), grid=256, init_value=0, check=True, order=order)
        assert run.clean, str(run)
        assert abs(run.outputs[0][300].item() - x.sum().item()) < 1e-3


@pytest.mark.parametrize("silent", [99, 17])
def test_what_many_atomics_publish_is_told_apart(silent):
    """Forty threadgroups, an atomic of its own for each; the last one reads all, also what the silent one left."""
    body = """
    uint g = threadgroup_position_in_grid.x;
    y[i] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    device atomic<uint>* done = (device atomic<uint>*)&y[1280];
    if (t == 0 && g != silent) atomic_store_explicit(done + g, 1u, memory_order_relaxed);
    if (g < 39) return;
    uint seen = atomic_load_explicit(done + t, memory_order_relaxed);
    if (t < 7) seen += atomic_load_explicit(done + 32 + t, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_device);
    float sum = seen;
    for (uint k = t; k < 1248; k += 32) sum += y[k];
    y[1344 + t] = sum;
    """
    call = {"grid": 1280, "threadgroup": 32, "init_value": 0, "names": ("x", "silent")}
    run = launch(body, [mx.ones((1280,)), silent], (1376,), check=True, **call)
    assert {fault.kind for fault in run.faults} == ({"race-between-threadgroups"} if silent < 40 else set())
    assert {fault.element // 32 for fault in run.faults} <= {silent}
    assert run.outputs[0][1344:].sum().item() == 1248 + 39 - (silent < 40)


def test_schedules_change_a_racy_result_and_leave_a_right_one():
    racy = "threadgroup float s[64]; s[t] = x[i]; y[i] = s[63 - t];"
    right = racy.replace("y[i]", "threadgroup_barrier(mem_flags::mem_threadgroup); y[i]")
    x = mx.random.normal((256,))
    for body, same in ((racy, False), (right, True)):
        bits = {
            launch(body, [x], (256,), grid=256, order=o).outputs[0].tolist().__repr__()
            for o in ("forward", "reverse", 1)
        }
        assert (len(bits) == 1) == same


# ---------------------------------------------------------------- guards


@pytest.mark.parametrize(
    "body",
    [
        "y[i] = x[1u << 28];",
        "y[i + (1u << 28)] = 1;",
        "((device float*)x)[i] = 1; y[i] = 0;",
        "y[i] = 100 / (int(i) - 3);",
        "volatile float deep[100000]; deep[t] = 1; y[i] = deep[t * 7 % 64];",
    ],
    ids=["read far away", "write far away", "write an input", "divide by zero", "overflow the stack"],
)
def test_a_crash_in_a_plain_run_is_a_report(body):
    run = launch(body, [mx.zeros((64,))], (64,))
    assert [fault.kind for fault in run.faults] == ["crash"]
    assert run.outputs == []
    assert launch("y[i] = x[i];", [mx.ones((64,))], (64,)).outputs[0][3].item() == 1, "and the next launch runs"


@pytest.mark.parametrize("check", [False, True])
def test_a_kernel_without_end_meets_the_time_limit(check):
    begin = time.perf_counter()
    run = launch(
        "volatile float a = 1; while (a > 0) { a = x[i]; } y[i] = a;",
        [mx.ones((64,))],
        (64,),
        check=check,
        time_limit=0.5,
    )
    assert [fault.kind for fault in run.faults] == ["stopped"]
    assert time.perf_counter() - begin < 60


def test_launches_from_several_threads_take_turns():
    results = [None] * 4

    def work(k):
        results[k] = launch("y[i] = simd_sum(x[i]);", [mx.full((64,), float(k))], (64,)).outputs[0][0].item()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0, 32, 64, 96]


# ---------------------------------------------------------------- mutations


def test_a_crash_leaves_the_process_able_to_crash_otherwise():
    """Signal handlers are put back: Python's own fault handler still works after a guarded crash."""
    code = (
        "import faulthandler, mlx.core as mx; faulthandler.enable()\n"
        "from labkit.kernels import simulator\n"
        "k = simulator.metal_kernel('k', ['x'], ['y'], 'y[0] = x[1u << 28];')\n"
        "r = k.run(inputs=[mx.zeros((8,))], grid=(1, 1, 1), threadgroup=(1, 1, 1),\n"
        "          output_shapes=[(1,)], output_dtypes=[mx.float32])\n"
        "print(r.faults[0].kind, flush=True)\n"
        "faulthandler._sigsegv()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "crash"
    assert "Fatal Python error: Segmentation fault" in done.stderr
