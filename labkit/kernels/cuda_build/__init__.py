"""CUDA texts compiled without a GPU: NVIDIA's run-time compiler is a wheel, and needs no chip to compile for one.

What MLX would give the compiler for a launch, compiled with MLX's options; errors, registers, spills, machine code.
"""

from labkit.kernels.cuda_build.compiler import CompiledCuda, CudaError, CudaMissing, compile_cuda, unavailable, version
from labkit.kernels.cuda_build.unit import translation_unit
from labkit.kernels.cuda_build.usage import Usage, usage

__all__ = [
    "CompiledCuda",
    "CudaError",
    "CudaMissing",
    "Usage",
    "compile_cuda",
    "translation_unit",
    "unavailable",
    "usage",
    "version",
]
