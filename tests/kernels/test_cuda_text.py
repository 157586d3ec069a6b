"""Metal text as CUDA: what is written for which launch. That it compiles is a gate (test_gates)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels.registry import all_entries
from labkit.kernels.targets.cuda_text import number_words, translate


def test_numbers_travel_as_words_of_one_array():
    from labkit.kernels import Kernel

    body = "y[thread_position_in_grid.x] = flag ? x[0] * scale + shift : count;"
    kernel = Kernel("numbers", ["x", "count", "scale", "flag", "shift"], ["y"], body)
    x = mx.zeros((8,))
    launch = kernel.launch(
        inputs=[x, -3, 0.5, True, mx.array(2.0)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )
    cuda = translate(kernel.text, launch)
    assert cuda.input_names == ("x", "lk_shift", "lk_numbers")
    assert cuda.arrays == (0, 4)
    for line in ("count=int(lk_numbers[0])", "scale=__uint_as_float(lk_numbers[1])", "flag=lk_numbers[2]!= 0u"):
        assert line.replace(" ", "") in cuda.source.replace(" ", "")
    assert number_words(launch.numbers) == (0xFFFFFFFD, 0x3F000000, 1, 0)


def test_the_vocabulary_of_vectors_comes_only_where_they_are_used():
    from labkit.kernels import Kernel

    def header(body: str) -> str:
        kernel = Kernel("positions", ["x"], ["y"], body)
        launch = kernel.launch(
            inputs=[mx.zeros((64,))],
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[mx.float32],
        )
        return translate(kernel.text, launch).header

    assert "struct vec" not in header("y[thread_position_in_grid.x] = x[thread_position_in_grid . x];")
    assert "struct vec" in header("auto p = thread_position_in_grid; y[p.x] = x[p.x];")
    assert "struct vec" in header("float4 v = 0; y[thread_position_in_grid.x] = v.x;")


@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.name)
def test_a_launch_passes_an_array_for_each_name(entry, monkeypatch):
    """The CUDA target with MLX's side replaced: what is prepared once must fit every later launch of the form."""
    from labkit.kernels import Kernel
    from labkit.kernels.targets import cuda

    made, passed = [], []
    monkeypatch.setattr(
        mx.fast, "cuda_kernel", lambda **given: made.append(given) or (lambda **call: passed.append(call))
    )
    text = entry.kernel.text
    kernel = Kernel(text.name, text.input_names, text.output_names, text.source, text.header)
    launch = entry.cases[0].make(entry.dtypes[-1])
    cuda.run(kernel, launch)
    cuda.run(kernel, launch)
    assert len(made) == 1
    for call in passed:
        assert len(call["inputs"]) == len(made[0]["input_names"])
        assert all(
            array.nbytes > 8
            for name, array in zip(made[0]["input_names"], call["inputs"], strict=True)
            if name in ("lk_numbers", "lk_grid")
        )
        assert all(size % part == 0 for size, part in zip(call["grid"], call["threadgroup"], strict=True))
    arrays = [a for a, n in zip(launch.inputs, launch.numbers, strict=True) if n is None]
    assert all(a is b for a, b in zip(passed[1]["inputs"], arrays, strict=False))
