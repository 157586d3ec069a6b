"""The operations of one decode step, as a GPU would get them, from MLX's own record of the graph: nothing is computed.

MLX can show what a function does without doing it (`mx.export_function` with a callback): every primitive with its
inputs, outputs, shapes and dtypes. Two things would differ from a GPU's graph where there is none: MLX's fast
operations (RMS norm, rotary positions, attention) fall apart into elementary ones, and what `mx.compile` has made into
one launch is spelled out. So both are replaced, while a step is captured, by one custom kernel with the same inputs and
outputs that is never run.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from labkit import devices
from labkit.caches import Cache, Layout
from labkit.engine.params import SamplingParams
from labkit.engine.sampling import RowSampler, choose
from labkit.measure.end_to_end.fair_line import own_deltanet
from labkit.measure.end_to_end.filled import Filled
from labkit.models.contract import Model
from labkit.models.rows import Rows

FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")


@dataclass(frozen=True)
class Value:
    """An array of the graph: its name there, shape, dtype; and the parameter's path where it is one, or "cache"."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    origin: str = ""

    @property
    def nbytes(self) -> int:
        size = self.dtype.size
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Operation:
    """One primitive: MLX's name of it (a custom kernel's own name), what it reads and what it makes."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Captured:
    """The operations of a step, each after those that it reads from; names of its results; tokens in its caches."""

    operations: tuple[Operation, ...]
    results: tuple[str, ...]
    context: int | None = None


def capture(model: Model, *, context: int = 64, length: int = 1, target: str | None = None) -> Captured:
    """One greedy decode step of one row with `context` tokens in its caches, token in, token out; or one chunk of a
    prompt, which ends with the caches.

    Args:
        model: of any graph. context: 0 for a prompt's first chunk.
        length: tokens: 1 for a decode step, more for a chunk of a prompt.
        target: "metal": as on a GPU, on any machine: kernels of labkit and of mlx-lm are single launches. "here": as
            this machine's MLX computes it, fast operations and compiled functions spelled out. Default: "metal".

    Raises:
        ValueError: no such target, a model whose caches do not say their arrays beforehand, or a context whose caches
            do not fit.
    """
    if target not in (None, "metal", "here"):
        raise ValueError(f'target is "metal" or "here", not {target!r}')
    caches = model.make_caches()
    _check_room(caches, model.layouts, context)
    if context:
        caches = Filled(model.layouts, context, None).into(caches)
    known = _origins(model) | {_address(a): "cache" for c in caches for a in _held(c)}
    sampler = RowSampler(SamplingParams(temperature=0.0), 0)

    def step(tokens: mx.array) -> list[mx.array]:
        output = model(tokens, caches, Rows.single(context), logits="last" if length == 1 else None)
        chosen = []
        if length == 1:
            chosen = choose(output.logits[:, -1, :], tokens[0], [sampler], [0], [None]).arrays()
        return [*chosen, *(a for c in caches for a in _held(c))]

    seen: list[dict[str, Any]] = []
    with _here() if target == "here" else _as_on_a_gpu():
        mx.export_function(seen.append, step, mx.ones((1, length), dtype=mx.int32))
    return _captured(seen, known, context)


def _check_room(caches: Sequence[Cache], layouts: Sequence[Layout | None], context: int) -> None:
    """The caches are really there, though nothing is computed with them."""
    pairs = zip(caches, layouts, strict=True)
    held = sum(type(cache).bytes_of(layout, context) for cache, layout in pairs if layout is not None)
    if held > (room := devices.this_device().working_set_bytes):
        raise ValueError(f"caches of {context:,} tokens take {held:,} bytes, and this machine has {room:,}")


def record(function: Callable[..., Any], *arguments: mx.array, target: str | None = None) -> Captured:
    """The operations of any function of arrays, as it stands or, given a target, as `capture` would show it."""
    seen: list[dict[str, Any]] = []
    with {None: contextlib.nullcontext, "metal": _as_on_a_gpu, "here": _here}[target]():
        mx.export_function(seen.append, function, *arguments)
    return _captured(seen, {}, None)


def _captured(seen: list[dict[str, Any]], known: dict[int, str], context: int | None) -> Captured:
    origins, operations, results = {}, [], ()
    for entry in seen:
        if entry["type"] == "constants":
            origins = {name: known.get(_address(array), "constant") for name, array in entry["constants"]}
        elif entry["type"] == "outputs":
            results = tuple(name for name, _, _ in entry["outputs"])
        elif entry["type"] == "primitive":
            inputs = tuple(Value(n, tuple(s), d, origins.get(n, "")) for n, s, d in entry["inputs"])
            outputs = tuple(Value(n, tuple(s), d) for n, s, d in entry["outputs"])
            arguments = tuple(entry.get("arguments", ()))
            name = entry["name"]
            if name == "CustomKernel":
                name = _kernel_name(str(arguments[0]))
            operations.append(Operation(name, inputs, outputs, arguments))
    return Captured(tuple(operations), results, context)


def _kernel_name(function: str) -> str:
    """custom_kernel_NAME_TEMPLATE_DTYPES -> NAME, where labkit knows the kernel; else all before the first dtype."""
    name = function.removeprefix("custom_kernel_")
    known = [n for n in (*_registered(), *_MADE) if name == n or name.startswith(f"{n}_")]
    return max(known, key=len, default=_DTYPES.split(name)[0])


@cache
def _registered() -> tuple[str, ...]:
    from labkit.kernels.registry import find_entries

    return tuple(entry.name for entry in find_entries([]))


_DTYPES = re.compile(r"_+(?:b?float(?:16)?(?:_t)?|half|u?int\d*)c?(?:_|$)")

_MADE: set[str] = set()


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Fast operations, compiled functions, labkit's kernels and mlx-lm's DeltaNet are one launch each."""
    from labkit.kernels.targets import metal, use_target

    owners = {(mx.fast, name): getattr(mx.fast, name) for name in FAST}
    owners |= {(mx, name): getattr(mx, name) for name in ("contiguous", "dequantize")}
    compiled = type(mx.compile(lambda x: x))
    packages = ("mlx_lm.", "mlx.nn.", "labkit.")
    for module in [m for n, m in sys.modules.items() if f"{n}.".startswith(packages) and m]:
        owners |= {(module, name): value for name, value in vars(module).items() if type(value) is compiled}
    replacements = {(o, name): _one_launch(name.lstrip("_"), value) for (o, name), value in owners.items()}
    with (
        _replaced(replacements | {(metal, "unavailable"): lambda kernel: ""}),
        own_deltanet("metal"),
        use_target("metal"),
    ):
        yield


@contextlib.contextmanager
def _here() -> Iterator[None]:
    """MLX cannot show this one operation."""
    with _replaced({(mx, "contiguous"): _one_launch("contiguous", mx.contiguous)}):
        yield


@contextlib.contextmanager
def _replaced(values: dict[tuple[Any, str], Any]) -> Iterator[None]:
    saved = {(owner, name): getattr(owner, name) for owner, name in values}
    try:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in saved.items():
            setattr(owner, name, value)


def _one_launch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays as one custom kernel: same inputs, outputs of the same shapes, contents undefined."""

    def call(*arguments: Any, **options: Any) -> Any:
        results = function(*arguments, **options)
        made = tree_flatten(results)
        inputs = [value for _, value in tree_flatten([list(arguments), options]) if isinstance(value, mx.array)]
        _MADE.add(name)
        kernel = mx.fast.metal_kernel(
            name=name,
            input_names=[f"in{index}" for index in range(len(inputs))],
            output_names=[f"out{index}" for index in range(len(made))],
            source="",
        )
        outputs = kernel(
            inputs=inputs,
            output_shapes=[array.shape for _, array in made],
            output_dtypes=[array.dtype for _, array in made],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return tree_unflatten([(path, out) for (path, _), out in zip(made, outputs, strict=True)])

    return call


def _origins(model: Model) -> dict[int, str]:
    """Where each parameter lies in memory -> its path."""
    module = getattr(model, "module", None)
    named = tree_flatten(module.parameters()) if module is not None else _named(getattr(model, "weights", None), "")
    return {_address(array): path for path, array in named if isinstance(array, mx.array)}


def _named(value: Any, path: str) -> Iterator[tuple[str, mx.array]]:
    """The arrays in a tree of dataclasses and sequences, each with its path."""
    inner = f"{path}." if path else ""
    if isinstance(value, mx.array):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named(item, path if len(value) == 1 else f"{inner}{index}")
    elif is_dataclass(value):
        for field in fields(value):
            # A matrix in parts, a packed one in arrays: the name is the matrix's.
            own = field.name not in ("parts", "w", "weight", "scales", "biases")
            yield from _named(getattr(value, field.name), f"{inner}{field.name}" if own else path)


def _held(cache: Any) -> list[mx.array]:
    """The arrays of a cache as they stand: to ask for its `state` might first bring it into another form."""
    return [value for _, value in tree_flatten(list(vars(cache).values())) if isinstance(value, mx.array)]


def _address(array: mx.array) -> int:
    """Where an evaluated array begins in memory; its id where the system does not say, or would copy it to the host."""
    import numpy as np

    if devices.this_device().kind == "cuda":
        return id(array)
    try:
        view = array.view(mx.uint8) if array.dtype == mx.bfloat16 else array
        return np.asarray(view).__array_interface__["data"][0]
    except (ValueError, TypeError, RuntimeError, BufferError):
        return id(array)
