"""Native: the Python or numba function registered beside a kernel, for machines whose device is the CPU."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch, check_input_dtypes


def unavailable(kernel: Kernel) -> str:
    """Why this kernel cannot, or ""."""
    return "" if kernel.native is not None else "no native function is registered for it"


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Call it."""
    check_input_dtypes(kernel.text, launch)  # as every target that compiles the text
    return list(kernel.native(launch))
