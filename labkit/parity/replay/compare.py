"""Two caches' states, field by field and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# mlx-lm's order of each class's state.
_FIELDS = {
    ("contiguous", 3): ("keys", "values", "offset"),
    ("contiguous", 5): ("keys", "values", "offset", "left_padding", "index"),
    ("rotating", 6): ("keys", "values", "offset", "keep", "max_size", "index"),
    ("rotating", 8): ("keys", "values", "offset", "left_padding", "max_size", "written", "index", "rotated"),
    ("recurrent", 3): ("states", "left_padding", "lengths"),
}


@dataclass(frozen=True)
class Difference:
    """Something that is not the same.

    Attributes:
        layer: number of the cache.
        kind: its kind.
        field: "keys", "left_padding", "state 1", ...
        ours, theirs: the two values, arrays as lists where they are short.
    """

    layer: int
    kind: str
    field: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"cache {self.layer} ({self.kind}): {self.field} is {self.ours}, mlx-lm's {self.theirs}"


def differences(layer: int, kind: str, ours: tuple, theirs: tuple) -> Iterator[Difference]:
    """What differs between the states of one cache here and at mlx-lm."""
    names = _FIELDS.get((kind, len(ours)), tuple(f"item {i}" for i in range(len(ours))))
    mine, other = dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True))
    if kind == "recurrent":
        yield from _recurrent(layer, mine, other)
        return
    for name in names:
        a, b = mine[name], other[name]
        if name in ("keys", "values") and a is not None and b is not None:
            columns = _columns(mine, a, b)
            a, b = a[:, :, :columns], b[:, :, :columns]
        if not same(a, b):
            yield Difference(layer, kind, name, _shown(a, b), _shown(b, a))


def _columns(state: dict[str, Any], a: mx.array, b: mx.array) -> int:
    """Columns in use: what follows them is free room, of which each side may have any amount."""
    turned = state.get("rotated", False) or ("keep" in state and state["offset"] > state["index"])
    if turned:
        return max(a.shape[2], b.shape[2])
    return state["index"] if "index" in state else state["offset"]


def _recurrent(layer: int, mine: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    for index, (a, b) in enumerate(zip(mine["states"], other["states"], strict=True)):
        if not same(a, b):
            yield Difference(layer, "recurrent", f"state {index}", _shown(a, b), _shown(b, a))
    for name in ("left_padding", "lengths"):
        a, b = mine[name], other[name]
        if not same(a, b) and not (name == "left_padding" and _nothing(a) and _nothing(b)):
            yield Difference(layer, "recurrent", name, _shown(a, b), _shown(b, a))


def _nothing(padding: mx.array | None) -> bool:
    return padding is None or not mx.any(padding > 0).item()


def same(a: Any, b: Any) -> bool:
    """Equal bits."""
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b, equal_nan=True).item())
    if isinstance(a, mx.array) or isinstance(b, mx.array):
        return False
    return a == b


def _shown(a: Any, b: Any) -> Any:
    if not isinstance(a, mx.array):
        return a
    if a.ndim <= 1:
        return a.tolist()
    if isinstance(b, mx.array) and a.shape == b.shape:
        far = mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))).item()
        return f"{a.dtype} {list(a.shape)}, {far:.3g} away"
    return f"{a.dtype} {list(a.shape)}"
