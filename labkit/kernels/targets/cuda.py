"""CUDA: the text behind Metal's vocabulary in CUDA, through `mx.fast.cuda_kernel`; or the kernel's own CUDA text."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch, threadgroup_size
from labkit.kernels.targets.cuda_text import CudaText, is_whole, translate

MOST_BLOCKS = 65535
"""CUDA's limit of a grid's second and third dimension; Metal has none below 2^32."""


def unavailable(kernel: Kernel) -> str:
    """Why this machine cannot, or ""."""
    if mx.default_device().type == mx.gpu and not mx.metal.is_available():
        return ""
    return "MLX has no CUDA device here"


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Launch on the GPU; lazily, as MLX does."""
    translated, built = _built(kernel, launch)
    inputs = list(launch.inputs)
    if translated.needs_grid:
        inputs.append(_grid(launch.grid))
    group = threadgroup_size(launch)
    return built(
        inputs=inputs,
        template=list(launch.template),
        grid=_whole_blocks(kernel.name, launch.grid, group),
        threadgroup=group,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
        verbose=launch.verbose,
        stream=launch.stream,
    )


def _built(kernel: Kernel, launch: Launch) -> tuple[CudaText, object]:
    """The kernel for launches of this form: which inputs are scalars, which types appear, whether the grid is whole."""
    types = frozenset(_dtypes(launch))
    key = ("cuda", tuple([a.ndim == 0 for a in launch.inputs]), types, is_whole(launch))
    if key not in kernel.device_kernels:
        override = kernel.cuda
        body, header = (override.source, override.header) if override else (None, "")
        translated = translate(kernel.text, launch, body, header)
        kernel.device_kernels[key] = (
            translated,
            mx.fast.cuda_kernel(
                # MLX names the function after the kernel: forms of it must not meet under one name.
                name=f"{kernel.name}_{sum(1 for k in kernel.device_kernels if k[0] == 'cuda')}",
                input_names=list(translated.input_names),
                output_names=list(kernel.text.output_names),
                source=translated.source,
                header=translated.header,
                ensure_row_contiguous=kernel.text.ensure_row_contiguous,
                shared_memory=override.shared_memory if override else 0,
            ),
        )
    return kernel.device_kernels[key]


def _dtypes(launch: Launch) -> list[mx.Dtype]:
    template = [value for _, value in launch.template if isinstance(value, mx.Dtype)]
    return [*(array.dtype for array in launch.inputs), *launch.output_dtypes, *template]


@lru_cache(maxsize=4096)
def _whole_blocks(name: str, grid: tuple[int, int, int], group: tuple[int, int, int]) -> tuple[int, int, int]:
    """The grid in threads, rounded up to whole blocks."""
    blocks = [-(-size // part) for size, part in zip(grid, group, strict=True)]
    if max(blocks[1:]) > MOST_BLOCKS:
        raise ValueError(f"kernel {name}: CUDA takes up to {MOST_BLOCKS} threadgroups in y and z, not {blocks}")
    return tuple(count * part for count, part in zip(blocks, group, strict=True))


@lru_cache(maxsize=1024)
def _grid(grid: tuple[int, int, int]) -> mx.array:
    return mx.array(grid, dtype=mx.uint32)
