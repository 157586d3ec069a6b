"""A simulator for Metal kernels: any `mx.fast.metal_kernel` text, on any CPU, checked.

Plain runs give values. Checked runs find races, out-of-bounds accesses, reads of what was never written, outputs left
unwritten, writes to inputs, divergent barriers and simdgroup operations; and count bytes, cache lines per request,
barriers and simdgroup operations. Each finding names the line of the Metal text.

    from labkit.kernels import simulator

    kernel = simulator.metal_kernel("scale", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
    call = {"inputs": [x], "grid": (x.size, 1, 1), "threadgroup": (64, 1, 1)}
    call |= {"output_shapes": [x.shape], "output_dtypes": [x.dtype]}
    (y,) = kernel(**call)
    print(kernel.run(check=True, **call))  # faults and traffic

    with simulator.intercept(check=True) as session:  # kernels of a library that knows nothing of this
        ...

What it cannot tell: times (it counts), address-space errors (`labkit.kernels.address_spaces` finds those), and what
Metal's own compiler refuses beyond that. Numbers differ from a GPU's in the last bits of exp, sin and the like; nothing
is contracted to FMA.
"""

from labkit.kernels.simulator.compiler import CompileError, CompilerMissing, find_compiler
from labkit.kernels.simulator.faults import Fault, KernelFault
from labkit.kernels.simulator.run import Order, Run, run
from labkit.kernels.simulator.third_party import Session, SimulatedKernel, intercept, metal_kernel
from labkit.kernels.simulator.traffic import Flow, Traffic

__all__ = [
    "CompileError",
    "CompilerMissing",
    "Fault",
    "Flow",
    "KernelFault",
    "Order",
    "Run",
    "Session",
    "SimulatedKernel",
    "Traffic",
    "find_compiler",
    "intercept",
    "metal_kernel",
    "run",
]
