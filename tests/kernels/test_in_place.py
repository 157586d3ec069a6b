"""The in-place rule where kernels keep it: nobody writes an input. What an append may move: tests/contracts."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import Kernel, simulator
from labkit.kernels.registry import all_entries


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
