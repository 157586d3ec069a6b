"""CUDA: the text behind Metal's vocabulary in CUDA, through `mx.fast.cuda_kernel`; or the kernel's own CUDA text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.placement import on_device
from labkit.kernels.resident import check_resident, multiprocessors
from labkit.kernels.signature import Launch, threadgroup_size
from labkit.kernels.targets.cuda_files import in_files
from labkit.kernels.targets.cuda_text import CudaText, is_whole, number_words, translate

MOST_BLOCKS = 65535
"""CUDA's limit of a grid's second and third dimension; Metal has none below 2^32."""

MOST_FORMS = 4096
"""Launch forms that a kernel remembers."""


def unavailable(kernel: Kernel) -> str:
    """Why this machine cannot, or ""."""
    if mx.default_device().type == mx.gpu and not mx.metal.is_available():
        return ""
    return "MLX has no CUDA device here"


def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
    """Launch on the GPU; lazily, as MLX does.

    Raises:
        ValueError: more threadgroups than CUDA takes, or than live at once where they wait for each other.
    """
    # Once a token and layer: what follows from dtypes and sizes is found once.
    inputs = tuple([(array.dtype, array.ndim == 0) for array in launch.inputs])
    numbers = tuple([type(number) for number in launch.numbers])
    form = (inputs, numbers, launch.output_dtypes, launch.template, launch.grid, launch.threadgroup)
    prepared = kernel.device_launches.get(form)
    if prepared is None:
        if len(kernel.device_launches) >= MOST_FORMS:
            kernel.device_launches.clear()
        prepared = kernel.device_launches[form] = _prepare(kernel, launch)
    return prepared.built(
        inputs=[*[launch.inputs[i] for i in prepared.arrays], *_numbers(launch), *prepared.more_inputs],
        template=prepared.template,
        grid=prepared.grid,
        threadgroup=prepared.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
        verbose=launch.verbose,
        stream=launch.stream,
    )


@dataclass(frozen=True)
class _Prepared:
    """All that a launch passes to MLX besides its arrays."""

    built: Callable[..., list[mx.array]]
    arrays: tuple[int, ...]
    template: list
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    more_inputs: list[mx.array]


def _prepare(kernel: Kernel, launch: Launch) -> _Prepared:
    group = threadgroup_size(launch)
    blocks = [-(-size // part) for size, part in zip(launch.grid, group, strict=True)]
    if max(blocks[1:]) > MOST_BLOCKS:
        raise ValueError(f"kernel {kernel.name}: CUDA takes up to {MOST_BLOCKS} threadgroups in y and z, not {blocks}")
    if kernel.resident:
        check_resident(kernel.name, launch, multiprocessors())
    translated, built = _built(kernel, launch)
    return _Prepared(
        built,
        translated.arrays,
        list(launch.template),
        tuple(count * part for count, part in zip(blocks, group, strict=True)),
        group,
        _grid(launch, translated),
    )


def constants(launch: Launch, text: CudaText) -> tuple[mx.array, ...]:
    """What is passed behind a launch's arrays: the words of its numbers, its grid."""
    return (*_numbers(launch), *_grid(launch, text))


def _grid(launch: Launch, text: CudaText) -> list[mx.array]:
    return [mx.array(launch.grid, dtype=mx.uint32)] if text.needs_grid else []


def _built(kernel: Kernel, launch: Launch) -> tuple[CudaText, Callable]:
    """The kernel for launches of this form: which inputs are scalars, which types appear, whether the grid is whole."""
    scalars, numbers = tuple(a.ndim == 0 for a in launch.inputs), tuple(map(type, launch.numbers))
    key = ("cuda", scalars, numbers, frozenset(_dtypes(launch)), is_whole(launch))
    if key not in kernel.device_kernels:
        override = kernel.cuda
        body, header = (override.source, override.header) if override else (None, "")
        translated = in_files(translate(kernel.text, launch, body, header))
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


def _numbers(launch: Launch) -> list[mx.array]:
    words = number_words(launch.numbers)
    return [_on_device(words)] if any(number is not None for number in launch.numbers) else []


@lru_cache(maxsize=4096)
def _on_device(words: tuple[int, ...]) -> mx.array:
    return on_device(mx.array(words, dtype=mx.uint32))


def _dtypes(launch: Launch) -> list[mx.Dtype]:
    template = [value for _, value in launch.template if isinstance(value, mx.Dtype)]
    return [*(array.dtype for array in launch.inputs), *launch.output_dtypes, *template]
