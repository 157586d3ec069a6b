"""One row of x by the tensor core: shapes that fill no task, what is chosen for it, what it takes of a chip."""

from __future__ import annotations

from math import prod

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import cuda_build, routing
from labkit.kernels.grouped_matmul.gates import packed_experts
from labkit.kernels.grouped_matmul.launches import (
    CHOOSE_GATE_UP,
    DECODE_DOWN,
    DECODE_GATE_UP,
    choose_gate_up_call,
    decode_down_call,
    decode_gate_up_call,
)

FORMS = ("plain", "tensor")
H200 = 132  # multiprocessors


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize(
    ("k", "n", "bits", "group", "simds", "unroll"),
    [
        (640, 20, 4, 128, None, None),  # five steps, a group a step: the second task is a quarter full
        (96, 9, 8, 32, None, None),  # the last step is half full
        (256, 8, 8, 64, 2, 4),  # a group a step, and steps for two simdgroups
        (128, 16, 8, 128, None, 2),  # half a group a step
        (192, 7, 4, 32, None, None),  # four groups a step
        (2048, 8, 4, 64, 2, 4),  # two tasks a simdgroup
        (512, 8, 4, 64, 3, 1),  # four tasks for three simdgroups
    ],
)
def test_a_row_that_tasks_do_not_divide(k, n, bits, group, simds, unroll):
    mx.random.seed(5)
    x, indices = mx.random.normal((2, k)).astype(mx.bfloat16), mx.array([[2, 0], [1, 2]], mx.int32)
    gate, up = (packed_experts(3, n, k, mx.bfloat16, bits, group) for _ in range(2))
    call = decode_gate_up_call(x, gate, up, indices, "tensor", simds=simds, unroll=unroll)
    (hidden,) = DECODE_GATE_UP["tensor"](**call, target="simulator")
    rows = [floats(x[t]) for t in (0, 0, 1, 1)]
    products = [
        [floats(part.dequantize()[e]) @ row for e, row in zip([2, 0, 1, 2], rows, strict=True)] for part in (gate, up)
    ]
    want = [g / (1 + np.exp(-g)) * u for g, u in zip(*products, strict=True)]
    np.testing.assert_allclose(floats(hidden), want, atol=1.2e-2, rtol=1e-2)

    down, weights = packed_experts(3, n, k, mx.bfloat16, bits, group), mx.random.uniform(shape=(2, 2))
    inner = mx.random.normal((4, k)).astype(mx.bfloat16)
    call = decode_down_call(inner, down, indices, weights, form="tensor", simds=simds, unroll=unroll)
    (y,) = DECODE_DOWN["tensor"](**call, target="simulator")
    parts = [floats(down.dequantize()[e]) @ floats(inner[i]) for i, e in enumerate([2, 0, 1, 2])]
    want = np.einsum("ts,tsn->tn", floats(weights), np.reshape(parts, (2, 2, n)))
    np.testing.assert_allclose(floats(y), want, atol=1.2e-2, rtol=1e-2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("scores", ["even", "no numbers", "one column"])
def test_each_slot_chooses_as_the_whole_choice_does(form, shared, scores):
    experts, k, n = 40, 5, 1 if scores == "one column" else 24
    mx.random.seed(6)
    logits = np.random.default_rng(6).standard_normal((3, experts + 1)).astype(np.float32)
    if scores == "even":
        logits[:] = 0.5  # every choice is between equals
    if scores == "no numbers":
        logits[:, ::3], logits[1, 1::3] = np.nan, np.inf
    logits = mx.array(logits)
    x = mx.random.normal((3, 64)).astype(mx.bfloat16)
    gate, up = (packed_experts(experts + shared, n, 64, mx.bfloat16) for _ in range(2))
    call = choose_gate_up_call(x, gate, up, logits, k, form, experts=experts, shared=shared)
    hidden, indices, weights = CHOOSE_GATE_UP[form](**call, target="simulator")
    wanted = routing.choose_experts(logits, k, experts=experts, shared=shared, target="simulator")
    assert mx.array_equal(indices, wanted[0])
    assert mx.array_equal(weights, wanted[1], equal_nan=True)
    call = decode_gate_up_call(x, gate, up, wanted[0], form)
    assert mx.array_equal(hidden, DECODE_GATE_UP[form](**call, target="simulator")[0])


def of_one_token(name: str):
    """Its kernel and launch at Qwen3.6-35B-A3B's sizes, with a few experts less."""
    x = mx.zeros((1, 2048), mx.bfloat16)
    if name == "gate and up":
        gate, up = (packed_experts(17, 512, 2048, mx.bfloat16) for _ in range(2))
        call = choose_gate_up_call(x, gate, up, mx.zeros((1, 17)), 8, "tensor", experts=16, shared=1)
        return CHOOSE_GATE_UP["tensor"], CHOOSE_GATE_UP["tensor"].launch(**call)
    indices, weights = mx.zeros((1, 9), mx.int32), mx.zeros((1, 9))
    down = packed_experts(17, 2048, 512, mx.bfloat16)
    call = decode_down_call(mx.zeros((9, 512), mx.bfloat16), down, indices, weights, form="tensor")
    return DECODE_DOWN["tensor"], DECODE_DOWN["tensor"].launch(**call)


@pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())
@pytest.mark.parametrize("name", ["gate and up", "down"])
def test_all_of_a_tokens_threadgroups_live_at_once_on_an_h200(name):
    # What waits for a multiprocessor requests nothing meanwhile; and no read may wait in a thread's own memory.
    kernel, launch = of_one_token(name)
    used = cuda_build.usage(cuda_build.compile_cuda(cuda_build.translation_unit(kernel.text, launch)).log)
    assert used.stack == 0
    threadgroups = prod(-(-size // part) for size, part in zip(launch.grid, launch.threadgroup, strict=True))
    assert used.groups(prod(launch.threadgroup)) * H200 >= threadgroups
