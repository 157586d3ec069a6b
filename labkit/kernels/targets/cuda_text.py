"""Metal text to the header and body that `mx.fast.cuda_kernel` takes."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.kernels.header import Header
from labkit.kernels.metal_text import compact, keep_branches, remove_words, replace_storage, strip_comments
from labkit.kernels.signature import Launch, MetalText, Scalar, parameters, template_lines, threadgroup_size

GRID = "lk_grid"
"""An extra input, the grid's size in threads: CUDA knows only whole blocks."""

NUMBERS = "lk_numbers"
"""An extra input, the words of all inputs given as numbers. MLX keeps arrays of up to 8 bytes in the host's memory,
where each simdgroup's read of each of them would cross the bus; and each input costs the host time at a launch."""

VOCABULARY = ("scalars", "vectors", "simdgroups", "math", "atomics", "matrices")
"""The files of Metal's vocabulary, each after those that it stands on."""

_NUMBER = {bool: "{word} != 0u", int: "int({word})", float: "__uint_as_float({word})"}

_ATTRIBUTES = {
    "thread_position_in_grid": "uint3({b}.x * {d}.x + {t}.x, {b}.y * {d}.y + {t}.y, {b}.z * {d}.z + {t}.z)",
    "thread_position_in_threadgroup": "uint3({t}.x, {t}.y, {t}.z)",
    "threadgroup_position_in_grid": "uint3({b}.x, {b}.y, {b}.z)",
    "threads_per_threadgroup": "uint3({d}.x, {d}.y, {d}.z)",
    "dispatch_threads_per_threadgroup": "uint3({d}.x, {d}.y, {d}.z)",
    "threadgroups_per_grid": "uint3({g}.x, {g}.y, {g}.z)",
    "grid_origin": "uint3(0u, 0u, 0u)",
    "threads_per_grid": f"uint3({GRID}[0], {GRID}[1], {GRID}[2])",
    "grid_size": f"uint3({GRID}[0], {GRID}[1], {GRID}[2])",
    "thread_index_in_threadgroup": "LK_THREAD",
    "thread_index_in_simdgroup": "LK_LANE",
    "simdgroup_index_in_threadgroup": "LK_THREAD / 32u",
    "simdgroups_per_threadgroup": "({d}.x * {d}.y * {d}.z + 31u) / 32u",
    "dispatch_simdgroups_per_threadgroup": "({d}.x * {d}.y * {d}.z + 31u) / 32u",
    "thread_execution_width": "32u",
    "threads_per_simdgroup": "32u",
    "thread_index_in_quadgroup": "LK_THREAD & 3u",
    "quadgroup_index_in_threadgroup": "LK_THREAD / 4u",
    "quadgroups_per_threadgroup": "({d}.x * {d}.y * {d}.z + 3u) / 4u",
    "dispatch_quadgroups_per_threadgroup": "({d}.x * {d}.y * {d}.z + 3u) / 4u",
}


@dataclass(frozen=True)
class CudaText:
    """What `mx.fast.cuda_kernel` needs.

    Attributes:
        input_names: scalar inputs are renamed, since CUDA gets a pointer where Metal gets a value; those given as
            numbers go together as `lk_numbers`, behind the arrays; `lk_grid` may follow.
        arrays: which of the launch's inputs are passed as arrays.
        needs_grid: whether the extra input `lk_grid` (three uint32) must be passed.
    """

    input_names: tuple[str, ...]
    header: str
    source: str
    arrays: tuple[int, ...]
    needs_grid: bool


@cache
def vocabulary() -> Header:
    """Metal's vocabulary on CUDA."""
    return Header.from_file(*(Path(__file__).parent / "metal_on_cuda" / f"{name}.h" for name in VOCABULARY))


def is_whole(launch: Launch) -> bool:
    """Whether the grid is made of whole threadgroups, and these of whole simdgroups."""
    group = threadgroup_size(launch)
    whole = all(size % part == 0 for size, part in zip(launch.grid, group, strict=True))
    return whole and math.prod(group) % 32 == 0


def translate(text: MetalText, launch: Launch, body: str | None = None, extra_header: str = "") -> CudaText:
    """The CUDA form of a kernel for launches like this one.

    Args:
        body: a hand-written CUDA body that replaces the Metal text; it sees the same names.
        extra_header: what that body needs before it.

    Raises:
        ValueError: the text uses an attribute that CUDA has no equal of.
    """
    whole = is_whole(launch)
    if body is None:
        body = _for_cuda(replace_storage(text.source, lambda k: "__shared__"))
    source, user_header = body, _for_cuda(text.header)
    needs_grid = not whole or bool({"threads_per_grid", "grid_size"} & {name for name, _ in text.attributes})
    scalars = {name for name, array in zip(text.input_names, launch.inputs, strict=True) if array.ndim == 0}
    numbers = {name: type(n) for name, n in zip(text.input_names, launch.numbers, strict=False) if n is not None}
    prologue = "\n".join([*_number_lines(numbers), _prologue(text, source, scalars - numbers.keys(), whole)])
    types = " ".join(p.metal_type for p in parameters(text, launch)) + template_lines(launch)
    lanes = "0xFFFFFFFFu" if whole else "__activemask()"
    header = "\n".join(
        [
            f"#define LK_LANES {lanes}",
            vocabulary().used_by(user_header, source, prologue, types, extra_header),
            "namespace mlx::core::cu {",
            "using namespace metal;",
            user_header,
            "}",
            extra_header,
        ]
    )
    arrays = tuple(index for index, name in enumerate(text.input_names) if name not in numbers)
    names = [f"lk_{name}" if name in scalars else name for name in text.input_names if name not in numbers]
    names += ([NUMBERS] if numbers else []) + ([GRID] if needs_grid else [])
    source = compact(f"{prologue}\n{source}") + "\n"
    return CudaText(tuple(names), compact(header), source, arrays, needs_grid)


def number_words(numbers: tuple[Scalar | None, ...]) -> tuple[int, ...]:
    """The words of `lk_numbers`: each number of a launch as 32 bits, at least four of them."""
    words = [
        struct.unpack("I", struct.pack("f", n))[0] if type(n) is float else n & 0xFFFFFFFF
        for n in numbers
        if n is not None
    ]
    return tuple(words + [0] * (4 - len(words)))


def _number_lines(numbers: dict[str, type]) -> list[str]:
    return [
        f"const auto {name} = {_NUMBER[kind].format(word=f'{NUMBERS}[{index}]')};"
        for index, (name, kind) in enumerate(numbers.items())
    ]


def _for_cuda(text: str) -> str:
    """A text's CUDA branches, without Metal's address spaces."""
    return remove_words(keep_branches(strip_comments(text), {"LABKIT_CUDA": True, "__CUDACC__": True}))


def _prologue(text: MetalText, source: str, scalars: set[str], whole: bool) -> str:
    words = {"b": "blockIdx", "d": "blockDim", "t": "threadIdx", "g": "gridDim"}
    lines = [f"const auto {name} = lk_{name}[0];" for name in text.input_names if name in scalars]
    for name, metal_type in text.attributes:
        if name not in _ATTRIBUTES:
            raise ValueError(f"kernel {text.name}: the attribute {name} has no equal on CUDA")
        value = _ATTRIBUTES[name].format(**words)
        if metal_type == "uint3" and not re.search(rf"\b{name}\b(?!\s*\.\s*[xyz]\b)", source):
            # Only elements are asked for: a plain triple does, and Metal's vectors need not come along. (CUDA's
            # `make_uint3` does not compile at run time where Metal's `uint3` is in scope: ambiguous, CUDA 13.)
            metal_type, value = "lk_triple", f"{{{value[len('uint3(') : -1]}}}"
        lines.append(f"const {metal_type} {name} = {value};")
    if not whole:  # CUDA rounds the grid up to whole blocks; Metal runs the threads asked for
        past = " || ".join(f"blockIdx.{a} * blockDim.{a} + threadIdx.{a} >= {GRID}[{i}]" for i, a in enumerate("xyz"))
        lines.append(f"if ({past}) return;")
    return "\n".join(lines)
