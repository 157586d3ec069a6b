"""The simulator: the text compiled for this machine's CPU, each thread a fiber. Values only; `simulator.run` checks."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch


def unavailable(kernel: Kernel) -> str:
    """Why this machine cannot, or ""."""
    from labkit.kernels.simulator import CompilerMissing, find_compiler

    try:
        find_compiler()
    except CompilerMissing as error:
        return str(error)
    return ""


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Launch in the simulator, at once. Raises KernelFault if it had to be stopped."""
    from labkit.kernels import simulator

    return simulator.run(kernel.text, launch, resident=kernel.resident).raise_for_faults().outputs
