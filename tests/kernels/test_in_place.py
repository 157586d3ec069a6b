"""The in-place rule: what an append may move, and that nobody writes an input."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels import Kernel, simulator
from labkit.kernels.in_place import Segments
from labkit.kernels.registry import all_entries


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_rows_come_back_in_order(counts, segment_length):
    buffer, parts = Segments(segment_length), []
    for count in counts:
        parts.append(mx.random.normal((2, count, 3)))
        buffer.append(parts[-1])
    assert len(buffer) == sum(counts)
    assert mx.array_equal(buffer.rows(), mx.concatenate(parts, axis=1))
    assert all(segment.shape == (2, segment_length, 3) for segment in buffer.full)
    assert buffer.tail_length < segment_length


def test_an_append_moves_no_more_than_the_tail():
    """Bytes per append are bounded by the tail, however long the buffer: memory that MLX takes shows the same."""
    buffer = Segments(64)
    row = mx.ones((4, 1, 32))
    tail_bytes = 4 * 64 * 32 * 4
    for _ in range(1000):
        before = buffer.copied_bytes
        buffer.append(row)
        mx.eval(buffer.tail)
        assert buffer.copied_bytes - before <= tail_bytes + row.nbytes
    full = list(buffer.full)
    mx.synchronize()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    buffer.append(row)
    mx.eval(buffer.tail)
    assert mx.get_peak_memory() - held <= 3 * tail_bytes, "an append took memory for more than its tail"
    assert all(a is b for a, b in zip(full, buffer.full, strict=True)), "a full segment was made anew"


def test_bad_rows_are_refused_and_change_nothing():
    buffer = Segments(4)
    with pytest.raises(ValueError, match="nothing was appended"):
        buffer.rows()
    buffer.append(mx.zeros((2, 1, 3)))
    for rows in (mx.zeros((2, 1, 4)), mx.zeros((1, 1, 3)), mx.zeros((2, 1, 3), mx.float16), mx.zeros((3,))):
        with pytest.raises(ValueError, match="rows need shape"):
            buffer.append(rows)
    assert len(buffer) == 1
    with pytest.raises(ValueError, match="segment_length must be at least 1"):
        Segments(0)


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
