"""Reference: MLX's own operations, fp32 throughout, rounded at the end. Every other target is held to it."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch, check_input_dtypes


def unavailable(kernel: Kernel) -> str:
    """Why this kernel cannot, or ""."""
    return "" if kernel.reference is not None else "no reference is registered for it"


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Call it, and round its fp32 results to the launch's output dtypes."""
    check_input_dtypes(kernel.text, launch)  # as every target that compiles the text
    outputs = kernel.reference(launch)
    return [output.astype(dtype) for output, dtype in zip(outputs, launch.output_dtypes, strict=True)]
