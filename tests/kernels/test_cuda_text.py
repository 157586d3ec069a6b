"""The CUDA text of every kernel compiles, where nvcc is found. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess

import mlx.core as mx
import pytest

from labkit.kernels.registry import all_entries, dtype_name
from labkit.kernels.signature import template_lines
from labkit.kernels.targets.cuda_text import number_words, translate

CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
    mx.int16: "int16_t",
    mx.uint16: "uint16_t",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.bool_: "bool",
}

# What MLX puts before a kernel, as far as a kernel can see it; the C++ library's own traits, which compile in a third
# of the time of CUDA's.
MLX_HEADER = """
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
namespace cuda { namespace std { using namespace ::std; } }
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""


def unit(text, launch, override=None) -> str:
    """The translation unit that MLX would compile."""
    cuda = translate(text, launch, *((override.source, override.header) if override else ()))
    inputs = [launch.inputs[i] for i in cuda.arrays]
    inputs += [mx.zeros((4,), mx.uint32)] * (len(cuda.input_names) - len(inputs))  # lk_numbers, lk_grid
    signature = []
    for name, array in zip(cuda.input_names, inputs, strict=True):
        signature.append(f"const {CUDA_TYPES[array.dtype]}* {name}")
        if array.ndim:
            for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if f"{name}_{suffix}" in cuda.source:
                    signature.append(f"const __grid_constant__ {kind} {name}_{suffix}")
    signature += [f"{CUDA_TYPES[d]}* {n}" for n, d in zip(text.output_names, launch.output_dtypes, strict=True)]
    # NVRTC takes functions without a mark as device functions; nvcc must be told.
    marked = cuda.header.replace(
        "using namespace metal;", "using namespace metal;\n#define inline __device__ __inline__\n", 1
    )
    return "\n".join(
        [
            MLX_HEADER,
            marked,
            "#undef inline",
            "namespace mlx::core::cu {",
            f"__global__ void custom_kernel_{text.name}({', '.join(signature)}) {{",
            template_lines(launch, CUDA_TYPES),
            cuda.source,
            "}",
            "}",
        ]
    )


def compile_with_nvcc(source: str, folder) -> str:
    """nvcc's errors, or ""."""
    path = folder / "kernel.cu"
    path.write_text(source)
    done = subprocess.run(
        [
            *("nvcc", "-std=c++20", "-arch=sm_90a", "-ptx", "-w", "--expt-relaxed-constexpr", "--extended-lambda"),
            *(str(path), "-o", str(folder / "kernel.ptx")),
        ],
        capture_output=True,
        text=True,
    )
    return done.stderr + done.stdout if done.returncode else ""


needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


@needs_nvcc
@pytest.mark.parametrize("entry", all_entries(), ids=lambda entry: entry.name)
def test_registered_kernels_compile(entry, tmp_path):
    # The small floats bring the most of the vocabulary, bfloat16 is what runs on a GPU.
    dtype = entry.dtypes[-1]
    launch = entry.cases[0].make(dtype)
    assert compile_with_nvcc(unit(entry.kernel.text, launch, entry.kernel.cuda), tmp_path) == "", dtype_name(dtype)


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
