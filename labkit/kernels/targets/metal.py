"""Metal: the text as it is, through `mx.fast.metal_kernel`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.resident import NOT_ON_METAL
from labkit.kernels.signature import Launch


def unavailable(kernel: Kernel) -> str:
    """Why this machine cannot, or ""."""
    if kernel.resident:
        return NOT_ON_METAL
    return "" if mx.metal.is_available() else "MLX has no Metal device here"


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Launch on the GPU; lazily, as MLX does."""
    if "metal" not in kernel.device_kernels:
        kernel.device_kernels["metal"] = mx.fast.metal_kernel(**arguments(kernel))
    return kernel.device_kernels["metal"](
        inputs=list(launch.inputs),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
        verbose=launch.verbose,
        stream=launch.stream,
    )


def arguments(kernel: Kernel) -> dict[str, Any]:
    """Of `mx.fast.metal_kernel` for the kernel."""
    text = kernel.text
    options = {"compile_options": kernel.compile_options} if kernel.compile_options else {}
    return {
        "name": text.name,
        "input_names": list(text.input_names),
        "output_names": list(text.output_names),
        "source": text.source,
        # MLX writes the function behind the header's last character, which may be an `#endif`'s.
        "header": text.header + "\n",
        "ensure_row_contiguous": text.ensure_row_contiguous,
        "atomic_outputs": text.atomic_outputs,
        **options,
    }
