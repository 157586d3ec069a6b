"""A Metal text and one launch of it, in `mx.fast.metal_kernel`'s terms, and the parameters MLX gives its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import mlx.core as mx

from labkit.kernels.metal_text import attributes_in

METAL_TYPES: dict[mx.Dtype, str] = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.bool_: "bool",
}

CONSTANT_BELOW = 8
"""MLX passes an input of fewer elements in Metal's `constant` address space."""

TemplateValue = mx.Dtype | bool | int
Scalar = bool | int | float


@dataclass(frozen=True)
class MetalText:
    """A kernel as `mx.fast.metal_kernel` takes it: the body of a function and the names of what it sees."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False

    @cached_property
    def attributes(self) -> list[tuple[str, str]]:
        """(name, Metal type) of the attributes that the source names."""
        return attributes_in(self.source)

    @cached_property
    def names_used(self) -> frozenset[str]:
        """Which of `<input>_shape`, `<input>_strides`, `<input>_ndim` the source names, as MLX finds them."""
        names = (f"{n}_{suffix}" for n in self.input_names for suffix in ("shape", "strides", "ndim"))
        return frozenset(name for name in names if name in self.source)

    @cached_property
    def checked_forms(self) -> set[tuple]:
        """Sizes, dtypes and template arguments of launches that passed `make_launch`'s checks."""
        return set()


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: arrays, sizes and template arguments.

    Attributes:
        numbers: for each input the Python number that it was given as, or None for an array; empty if nobody knows.
    """

    inputs: tuple[mx.array, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: tuple[tuple[str, TemplateValue], ...] = ()
    init_value: float | None = None
    verbose: bool = False
    stream: Any = None
    numbers: tuple[Scalar | None, ...] = ()


ParameterKind = Literal["input", "scalar", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True)
class Parameter:
    """One buffer of the kernel function, in MLX's order."""

    name: str
    kind: ParameterKind
    metal_type: str
    array: int  # index of the input or output it is or describes
    constant: bool = False  # in Metal's constant address space


def as_array(value: mx.array | Scalar) -> mx.array:
    """A Python number becomes the scalar array that MLX would make of it."""
    if isinstance(value, mx.array):
        return value
    if type(value) in _SCALAR_DTYPES:
        if value == 0:  # 0.0 == -0.0, which a kernel may tell apart
            return mx.array(value, dtype=_SCALAR_DTYPES[type(value)])
        return _scalar(type(value), value)
    return as_array(_plain_number(value))


def _plain_number(value: Any) -> Scalar:
    """A number of a type derived from Python's, such as numpy's float64, as Python's own."""
    for kind in _SCALAR_DTYPES:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a kernel's input is an array, int, float or bool, not {type(value).__name__}: {value!r}")


_SCALAR_DTYPES = {bool: mx.bool_, int: mx.int32, float: mx.float32}
_INPUTS = {mx.array, *_SCALAR_DTYPES}


@lru_cache(maxsize=4096)
def _scalar(kind: type, value: Scalar) -> mx.array:
    # Kept, since making an array costs more than a small kernel. By type, since 1 == 1.0 == True.
    return mx.array(value, dtype=_SCALAR_DTYPES[kind])


def make_launch(
    text: MetalText,
    *,
    inputs: Sequence[mx.array | Scalar],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    template: Sequence[tuple[str, TemplateValue]] | None = None,
    init_value: float | None = None,
    verbose: bool = False,
    stream: Any = None,
) -> Launch:
    """Check a call's arguments against the kernel's names.

    Raises:
        ValueError: a count or a size does not fit.
        TypeError: an input or template argument of another type than MLX takes.
    """
    # Once a token and layer: the checks of what repeats from call to call are remembered by value.
    _same_count(text, "inputs", len(inputs), "input_names", text.input_names)
    form = (
        tuple(map(tuple, output_shapes)),
        tuple(output_dtypes),
        tuple(grid),
        tuple(threadgroup),
        tuple(map(tuple, template)) if template else (),
    )
    try:
        known = form in text.checked_forms
    except TypeError:  # something unhashable, which the checks name
        known = False
    if not known:
        _check_form(text, *form)
        text.checked_forms.add(form)
    inputs = [value if type(value) in _INPUTS else _plain_number(value) for value in inputs]
    numbers = tuple([None if type(value) is mx.array else value for value in inputs])
    return Launch(tuple(map(as_array, inputs)), *form, init_value, verbose, stream, numbers)


def _check_form(
    text: MetalText, output_shapes: tuple, output_dtypes: tuple, grid: tuple, threadgroup: tuple, template: tuple
) -> None:
    _same_count(text, "output_shapes", len(output_shapes), "output_names", text.output_names)
    _same_count(text, "output_dtypes", len(output_dtypes), "output_names", text.output_names)
    for label, sizes in (("grid", grid), ("threadgroup", threadgroup)):
        if len(sizes) != 3 or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"kernel {text.name}: {label} needs three positive sizes, not {sizes}")
    for name, value in template:
        if not isinstance(value, (bool, int, mx.Dtype)):
            raise TypeError(
                f"kernel {text.name}: template argument {name} is {value!r}; a dtype, bool or int is needed"
            )
    for dtype in output_dtypes:
        if dtype not in METAL_TYPES:
            raise TypeError(f"kernel {text.name}: no Metal type for output dtype {dtype}")


def check_input_dtypes(text: MetalText, launch: Launch) -> None:
    """Raise a TypeError for an input of a dtype that has no Metal type, such as complex64."""
    for name, array in zip(text.input_names, launch.inputs, strict=True):
        if array.dtype not in METAL_TYPES:
            raise TypeError(f"kernel {text.name}: no Metal type for input {name} of dtype {array.dtype}")


def parameters(text: MetalText, launch: Launch) -> list[Parameter]:
    """The buffers of the kernel function in MLX's order: each input with its shape, strides and rank, then outputs."""
    check_input_dtypes(text, launch)
    found = []
    for index, (name, array) in enumerate(zip(text.input_names, launch.inputs, strict=True)):
        kind = "input" if array.ndim else "scalar"
        found.append(Parameter(name, kind, METAL_TYPES[array.dtype], index, array.size < CONSTANT_BELOW))
        if array.ndim:
            for suffix, metal_type in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
                if f"{name}_{suffix}" in text.names_used:
                    found.append(Parameter(f"{name}_{suffix}", suffix, metal_type, index, True))
    for index, (name, dtype) in enumerate(zip(text.output_names, launch.output_dtypes, strict=True)):
        metal_type = METAL_TYPES[dtype]
        found.append(Parameter(name, "output", f"atomic<{metal_type}>" if text.atomic_outputs else metal_type, index))
    return found


def template_lines(launch: Launch, types: dict[mx.Dtype, str] = METAL_TYPES) -> str:
    """The template arguments as declarations for the top of the body."""
    lines = []
    for name, value in launch.template:
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {types[value]};")
        elif isinstance(value, bool):
            lines.append(f"constexpr bool {name} = {str(value).lower()};")
        else:
            lines.append(f"constexpr int {name} = {value};")
    return "\n".join(lines)


def threadgroup_size(launch: Launch) -> tuple[int, int, int]:
    """The threadgroup as dispatched: no larger than the grid."""
    return tuple(map(min, launch.threadgroup, launch.grid))


def _same_count(text: MetalText, what: str, got: int, names_of: str, names: tuple[str, ...]) -> None:
    if got != len(names):
        raise ValueError(f"kernel {text.name}: {got} {what} given for the {len(names)} {names_of} {list(names)}")
