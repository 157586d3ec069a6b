"""The CUDA text of every kernel compiles, where nvcc is found. No GPU is needed."""

from __future__ import annotations

import shutil
import subprocess

import mlx.core as mx
import pytest

from labkit.kernels.registry import all_entries, dtype_name
from labkit.kernels.signature import template_lines
from labkit.kernels.targets.cuda_text import translate

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
    inputs = [*launch.inputs, *([mx.zeros((3,), mx.uint32)] if cuda.needs_grid else [])]
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
