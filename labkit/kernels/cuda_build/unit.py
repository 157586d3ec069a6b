"""The translation unit that MLX compiles for a launch."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import CudaOverride
from labkit.kernels.signature import Launch, MetalText, template_lines
from labkit.kernels.targets.cuda_text import CudaText, translate

CUDA_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.bool_: "bool",
}

_INCLUDES = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""


def translation_unit(text: MetalText, launch: Launch, override: CudaOverride | None = None) -> str:
    """All that `mx.fast.cuda_kernel` gives the compiler for launches like this one.

    Args:
        override: the kernel's own CUDA text, if it has one.
    """
    cuda = translate(text, launch, *((override.source, override.header) if override else ()))
    parameters = ",\n".join(_parameters(cuda, text, launch))
    return (
        f"{_INCLUDES}{cuda.header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void {function_name(text)}(\n{parameters}) {{\n"
        f"{template_lines(launch, CUDA_TYPES)}\n{cuda.source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


def function_name(text: MetalText) -> str:
    """The kernel's function, as MLX names it but for the digits of its form and template arguments."""
    return f"custom_kernel_{text.name}"


def _parameters(cuda: CudaText, text: MetalText, launch: Launch) -> list[str]:
    inputs = [launch.inputs[i] for i in cuda.arrays]
    words = mx.zeros((4,), mx.uint32)  # lk_numbers and lk_grid
    inputs += [words] * (len(cuda.input_names) - len(inputs))
    found = []
    for name, array in zip(cuda.input_names, inputs, strict=True):
        found.append(f"    const {CUDA_TYPES[array.dtype]}* {name}")
        if array.ndim:
            for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if f"{name}_{suffix}" in cuda.source:
                    found.append(f"    const __grid_constant__ {kind} {name}_{suffix}")
    outputs = zip(text.output_names, launch.output_dtypes, strict=True)
    return found + [f"    {CUDA_TYPES[dtype]}* {name}" for name, dtype in outputs]
