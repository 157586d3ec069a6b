"""The in-place rule where kernels keep it: nobody writes an input. What an append may move: tests/contracts."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import Kernel, simulator
from labkit.kernels.check import check_on_cpu
from labkit.kernels.cuda_build.unit import translation_unit
from labkit.kernels.launch import CudaOverride
from labkit.kernels.registry import Case, Entry, all_entries


def test_writing_an_input_is_a_fault_even_in_a_plain_run():
    writer = Kernel("writer", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = 1; ((device float*)x)[i] = 2;")
    x = mx.zeros((64,))
    shape = {"output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1), "threadgroup": (32, 1, 1)}
    with pytest.raises(simulator.KernelFault, match="crash"):
        writer(inputs=[x], target="simulator", **shape)
    assert mx.array_equal(x, mx.zeros((64,)))


@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.name)
def test_outputs_do_not_alias_inputs_by_name(entry):
    assert not set(entry.kernel.text.input_names) & set(entry.kernel.text.output_names)


def rewriting(name: str, source: str) -> Entry:
    """A kernel of x and y [64] that says that it may write y where x lies."""

    def reference(launch):
        return [launch.inputs[0][_AS[name]] + 1]

    kernel = Kernel(name, ["x"], ["y"], source, reference=reference, in_place={"x": "y"})
    call = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    make = lambda dtype: kernel.launch(inputs=[mx.random.normal((64,)).astype(dtype)], **call)
    return Entry(kernel, (Case("64", make),), "adds one", dtypes=(mx.float32,))


_AS = {
    "own": mx.arange(64),
    "beside": mx.arange(64) ^ 1,
    "far": mx.arange(64)[::-1],
    "late": mx.arange(64),
}
REWRITING = {
    "own": ("uint i = thread_position_in_grid.x; y[i] = x[i] + 1;", ""),
    "beside": ("uint i = thread_position_in_grid.x; y[i] = x[i ^ 1] + 1;", "race"),
    "far": ("uint i = thread_position_in_grid.x; y[i] = x[63 - i] + 1;", "race"),
    "late": ("uint i = thread_position_in_grid.x; y[i] = 5; simdgroup_barrier(mem_flags::mem_none); y[i] = x[i] + 1;",
             "gives other bits in y"),
}  # fmt: skip


@pytest.mark.parametrize("name", REWRITING)
def test_a_kernel_that_may_not_rewrite_its_input_does_not_pass(name):
    """It reads what another thread writes, of its simdgroup or of another one; or again, behind its own write."""
    source, wrong = REWRITING[name]
    results = check_on_cpu(rewriting(name, source), mx.float32, seed=3)
    found = {result.gate: result for result in results if not result.passed and result.gate != "traffic budget"}
    assert set(found) == ({"in place"} if wrong else set()), found
    assert "in place" in {result.gate for result in results}
    if wrong:
        assert wrong in found["in place"].detail


def test_what_may_be_rewritten_is_named_where_it_exists_and_is_not_hand_written():
    for wrong in ({"z": "y"}, {"x": "z"}):
        with pytest.raises(ValueError, match=r"in_place .* is for inputs and outputs"):
            Kernel("some", ["x"], ["y"], "y[0] = x[0];", in_place=wrong)
    with pytest.raises(ValueError, match="of a Metal text alone"):
        Kernel("some", ["x"], ["y"], "y[0] = x[0];", in_place={"x": "y"}, cuda=CudaOverride("y[0] = x[0];"))


IN_PLACE = [entry for entry in all_entries() if entry.kernel.in_place]


def test_what_a_decode_step_carries_is_rewritten():
    named = {entry.name: set(entry.kernel.in_place) for entry in IN_PLACE}
    assert named == {
        "append_heads": {"tail_keys", "tail_values"},
        "count_on": {"counters"},
        "gated_delta_step": {"state"},
    }


@pytest.mark.parametrize("entry", IN_PLACE, ids=lambda entry: entry.name)
def test_some_case_rewrites_each_of_them(entry):
    """Where input and output have other shapes, the gate proves nothing."""
    launches = [case.make(entry.dtypes[0]) for case in entry.cases]
    assert any(entry.kernel.rewritten(launch) == entry.kernel.in_place for launch in launches)


@pytest.mark.parametrize("entry", IN_PLACE, ids=lambda entry: entry.name)
def test_on_cuda_they_read_no_memory_that_is_promised_to_stay(entry):
    launch = entry.cases[0].make(entry.dtypes[-1])
    unit = translation_unit(entry.kernel.text, launch)
    assert not [word for word in ("__restrict__", "__ldg", ".nc") if word in unit]


def test_inputs_in_place_have_their_outputs_size():
    kernel = Kernel("some", ["x"], ["y"], "y[0] = x[0];")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(2,)], "output_dtypes": [mx.float32]}
    with pytest.raises(ValueError, match="input x and output y are not of one size"):
        simulator.run(kernel.text, kernel.launch(inputs=[mx.zeros((1,))], **call), in_place={"x": "y"})
