"""Launches whose threadgroups wait for each other: the barrier, what lives at once, the one output, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import Kernel, cuda_build, persistent, simulator
from labkit.kernels.headers import SHARED
from labkit.kernels.persistent import launches
from labkit.kernels.persistent.arguments import SIMDS, Attention, Cached, Delta, Sparse
from labkit.kernels.persistent.gates import EPS, random_sparse
from labkit.kernels.persistent.launches import unroll_for
from labkit.kernels.persistent.prediction import barriers_in, predict
from labkit.kernels.persistent.words import COUNTER, LINE, Words
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.registry import find_entries
from labkit.kernels.resident import H200, always, check_resident
from labkit.kernels.targets import cuda, metal

BF16 = mx.bfloat16

ROUNDS = """
// Three rounds in which each threadgroup adds what its neighbour had.
Grid grid;
grid.open(words, threadgroups_per_grid.x, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
          thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
uint size = grid.groups * 64, i = thread_position_in_grid.x;
device float* values = (device float*)(words + 1024);
values[i] = x[i];
for (int round = 0; round < 3; round++) {
  grid.sync();
  float neighbour = values[(i + 64) % size];
  grid.sync();
  values[i] = values[i] + neighbour;
}
"""


def rounds(groups: int = 4, text: str = ROUNDS, **options) -> simulator.Run:
    kernel = Kernel("rounds", ["x"], ["words"], text, header=SHARED, resident=True)
    return simulator.run(kernel.text, launch_of(kernel, groups), resident=True, **options)


def launch_of(kernel: Kernel, groups: int):
    return kernel.launch(
        inputs=[mx.arange(groups * 64, dtype=mx.float32)],
        grid=(groups * 64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(4096,)],
        output_dtypes=[mx.uint32],
        init_value=0,
    )


@pytest.mark.parametrize("order", ["forward", "reverse", 5])
def test_threadgroups_meet_whatever_the_schedule(order):
    run = rounds(check=True, order=order)
    assert run.clean, str(run)
    want = np.arange(256, dtype=np.float32)
    for _ in range(3):
        want = want + np.roll(want, -64)
    np.testing.assert_array_equal(np.array(run.outputs[0][1024:1280].view(mx.float32)), want)
    assert run.outputs[0][0].item() == 4 * 6  # each threadgroup has arrived at each barrier once


@pytest.mark.parametrize("place", [0, 1])
def test_a_missing_meeting_is_a_race(place):
    parts = re.split(r"( *grid\.sync\(\);\n)", ROUNDS)
    without = "".join(part for index, part in enumerate(parts) if index != 1 + 2 * place)
    kinds = {fault.kind for fault in rounds(text=without, check=True).faults}
    assert "race-between-threadgroups" in kinds


def without_barriers() -> list:
    """(kernel, which of its source's grid-wide barriers): the second of a DeltaNet layer for every day."""
    found = []
    for entry in find_entries(["persistent"]):
        source = entry.kernel.text.source + entry.kernel.text.header
        for place in range(len(list(re.finditer(r"grid\.sync\(\);", source)))):
            marks = [] if entry.name == "linear_layer_tensor" and place == 1 else [pytest.mark.nightly]
            found.append(pytest.param(entry, place, id=f"{entry.name}-{place}", marks=marks))
    return found


@pytest.mark.parametrize(("entry", "place"), without_barriers())
def test_a_grid_barrier_taken_out_of_a_layer_is_found(entry, place):
    text, split = entry.kernel.text, len(entry.kernel.text.source)
    both = text.source + text.header
    begin, end = [match.span() for match in re.finditer(r"grid\.sync\(\);", both)][place]
    both = both[:begin] + " " * (end - begin) + both[end:]
    launch = entry.cases[0].make(entry.dtypes[-1])
    run = simulator.run(replace(text, source=both[:split], header=both[split:]), launch, check=True, resident=True)
    assert any(fault.kind.startswith("race") for fault in run.faults), str(run)


# --- what lives at once -----------------------------------------------------------------------------------------------


def test_two_threadgroups_live_whatever_the_compiler_does():
    assert always(32 * SIMDS) == 2
    assert persistent.groups_for(None) == 2 * H200
    assert persistent.groups_for("simulator") == persistent.SIMULATED


def test_more_threadgroups_than_live_at_once_are_refused(monkeypatch):
    kernel = Kernel("rounds", ["x"], ["words"], ROUNDS, header=SHARED, resident=True)
    most = always(64) * 3
    check_resident("rounds", launch_of(kernel, most), here=3)
    with pytest.raises(ValueError, match=f"its {most + 1} threadgroups .* only {most} .* on 3 multiprocessors"):
        check_resident("rounds", launch_of(kernel, most + 1), here=3)
    # And at the door of the target, before anything is built.
    monkeypatch.setattr(cuda, "multiprocessors", lambda: 3)
    with pytest.raises(ValueError, match="wait for each other"):
        cuda._prepare(kernel, launch_of(kernel, most + 1))
    assert not kernel.device_kernels


def test_metal_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert "Metal does not promise" in metal.unavailable(persistent.SPARSE_HALF["plain"])
    mx.random.seed(0)
    x = mx.zeros((1, 128))
    with pytest.raises(RuntimeError, match=r"sparse_half_plain cannot run on target 'metal': .*use the plain form"):
        persistent.sparse_half(x, x, random_sparse(mx.float32), EPS, target="metal")


needs_nvrtc = pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())


def packed(n: int, k: int, bits: int = 4, experts: int = 0) -> Packed:
    lead = (experts,) if experts else ()
    factors = mx.zeros((*lead, n, k // 64), BF16)
    return Packed(mx.zeros((*lead, n, k * bits // 32), mx.uint32), factors, factors, 64, bits)


def at_full_size(rows: int):
    """The launches of Qwen3.6-35B-A3B's layers."""
    dim, channels = 2048, 8192
    gate, down = packed(512, dim, experts=257), packed(dim, 512, experts=257)
    sparse = Sparse(mx.zeros((dim,), BF16), packed(257, dim, 8), gate, gate, down, 256, 8, 1, True)
    x, norm, numbers = mx.zeros((rows, dim), BF16), mx.zeros((dim,), BF16), mx.zeros((rows,), mx.int32)
    groups = 2 * H200
    yield launches.SPARSE_HALF, launches.sparse_half_call(x, x, sparse, EPS, "tensor", groups=groups)
    delta = Delta(
        norm, packed(channels + 4096 + 64, dim), mx.zeros((channels, 4), BF16), mx.zeros((32,)), mx.zeros((32,)),
        mx.zeros((128,), BF16), packed(dim, 4096), (16, 32), (128, 128),
    )  # fmt: skip
    tail, state = mx.zeros((rows, 3, channels), BF16), mx.zeros((rows, 32, 128, 128))
    call = launches.linear_layer_call(x, x, delta, tail, state, sparse, EPS, "tensor", groups=groups)
    yield launches.LINEAR_LAYER, call
    head, columns, tails = (
        mx.zeros((256,), BF16),
        mx.zeros((rows, 2, 4096, 256), BF16),
        mx.zeros((rows, 2, 256, 256), BF16),
    )
    attention = Attention(norm, packed(2 * 18 * 256, dim), head, head, packed(dim, 4096), (16, 2), 64, 1e7)
    eight = mx.zeros((8,), mx.int32)
    cached = Cached(columns, columns, tails, tails, numbers, numbers, eight, eight, numbers)
    yield launches.FULL_LAYER, launches.full_layer_call(x, x, attention, cached, sparse, EPS, "tensor", groups=groups)


@needs_nvrtc
@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 8])
def test_the_real_layers_fit_their_multiprocessors(rows):
    for kernels, call in at_full_size(rows):
        kernel = kernels["tensor"]
        launch = kernel.launch(**call)
        used = cuda_build.usage(cuda_build.compile_cuda(cuda_build.translation_unit(kernel.text, launch)).log)
        assert used.groups(32 * SIMDS) >= 2, f"{kernel.name}: {used}"
        assert used.shared <= 48 * 1024, f"{kernel.name}: {used}"
        assert used.spill_stores == 0, f"{kernel.name}: {used}"
        check_resident(kernel.name, launch, H200)


def test_steps_in_flight_stay_within_what_a_threadgroup_may_declare():
    for k in range(64, 8192, 64):
        for bits in (4, 8):
            for slots, parts in ((1, 1), (9, 1), (1, 2)):
                steps, unroll = slots * -(-k * bits // 512), unroll_for(k, bits, slots, parts)
                batches = 2 if -(-steps // SIMDS) > unroll else 1
                assert 1 <= unroll * parts * batches <= 4


def test_what_cuda_reads_of_other_threadgroups_is_no_read_only_load():
    """ld.global.nc of what the same launch wrote is undefined."""
    for kernels in (persistent.SPARSE_HALF, persistent.LINEAR_LAYER, persistent.FULL_LAYER):
        for kernel in kernels.values():
            assert kernel.text.header.startswith("#define LABKIT_COHERENT 1")


# --- the one output ---------------------------------------------------------------------------------------------------


def test_parts_lie_on_lines_of_their_own_and_come_back():
    words = Words((("a", (3, 5), mx.float32), ("b", (2, 7), BF16), ("c", (4, 40), mx.float16)))
    begins = [begin for begin, _ in words.places.values()]
    assert begins[0] == COUNTER
    assert all(begin % LINE == 0 for begin in begins)
    assert words.size >= 4096
    values = mx.arange(words.size, dtype=mx.uint32)
    c, a = words.take(values, "c", "a")
    assert (a.shape, a.dtype, c.shape, c.dtype) == ((3, 5), mx.float32, (4, 40), mx.float16)
    np.testing.assert_array_equal(a.view(mx.uint32).reshape(-1), np.arange(begins[0], begins[0] + 15))
    np.testing.assert_array_equal(c.reshape(-1).view(mx.uint32), np.arange(begins[2], begins[2] + 80))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": 9}, "1 to 8 rows, not 9"),
        ({"dim": 48}, "a multiple of 32 values"),
        ({"norm": mx.zeros((64,))}, r"norm needs shape \(128,\)"),
        ({"top_k": 40}, "40 of 7 experts|41 of 7 experts"),
        ({"down": packed(128, 64, experts=7)}, "down needs 7 of"),
        ({"dtype": mx.float16}, "one 16-bit float dtype|norm needs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, says):
    mx.random.seed(0)
    x = mx.zeros((change.pop("rows", 1), change.pop("dim", 128)), change.pop("dtype", mx.float32))
    with pytest.raises(ValueError, match=says):
        persistent.sparse_half(x, x, random_sparse(mx.float32)._replace(**change), EPS, target="reference")


def test_prediction_counts_barriers_and_launches():
    kernels = {"linear_layer_plain": 30, "full_layer_tensor": 10, "few_rows_tensor": 3}
    assert barriers_in(kernels) == 220
    at_4k = predict(94, 1.9e9, 220)
    assert at_4k.host == pytest.approx(94 * 12e-6)
    assert at_4k.device == pytest.approx(880e-6, rel=0.01)
    assert at_4k.seconds == at_4k.host
