"""Caches <-> records, in the thread that owns the arrays.

Layers whose layout is `by_token` are cut into blocks. All others (recurrent states, rings) are copied whole. Bytes are
taken as they are, in the array's own dtype: a detour through another dtype would round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.caches import Cache, Layout, Unsupported
from labkit.caches.host import shares_memory
from labkit.caches.layout import dtype_name
from labkit.engine.prefix.crossing import copied, fetched, sent
from labkit.engine.prefix.record import Record, Tensor

Arrays = dict[tuple[int, str], mx.array]
"""By layer and the name that its cache has for them."""


class Codec:
    """Knows a model's caches.

    Args:
        make_caches: empty caches for one row.
        layouts: their layouts.

    Raises:
        Unsupported: a kind of cache that cannot be stored as bytes.
    """

    def __init__(self, make_caches: Callable[[], list[Cache]], layouts: Sequence[Layout | None]):
        self._make, self._layouts = make_caches, layouts
        self._empty = make_caches()  # never filled: asked what such caches take
        for cache, layout in zip(self._empty, layouts, strict=True):
            if layout is None or "snapshot" not in cache.supports:
                raise Unsupported(cache.kind, "be kept in a prefix store", "it cannot be stored as bytes")
        self._classes = [type(cache) for cache in self._empty]
        self.by_token = [index for index, layout in enumerate(layouts) if layout.by_token]
        self.whole = [index for index, layout in enumerate(layouts) if not layout.by_token]

    def objection(self, caches: Sequence[Cache], tokens: int) -> str | None:
        """Why these caches are not the state of one row of this model after `tokens` tokens; None if they may be."""
        if [type(cache) for cache in caches] != self._classes:
            return "other_kind"
        for cache, layout in zip(caches, self._layouts, strict=True):
            if cache.batch_size != 1:
                return "several_rows"
            if cache.empty() or cache.layout != layout:
                return "other_layout"
            if getattr(cache, "offset", tokens) != tokens:
                return "other_length"
        return None

    def columns(self, caches: Sequence[Cache], start: int, end: int) -> dict[str, Tensor]:
        """What the by-token layers hold of the tokens start to end."""
        return _taken(self._columns(caches, start, end))

    def state(self, caches: Sequence[Cache]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What all other layers hold: tensors, and their scalars for `Record.about`."""
        arrays, scalars = self._state(caches)
        return _taken(arrays), scalars

    def both(
        self, caches: Sequence[Cache], start: int, end: int, *, lent: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """`columns` and `state`, taken together.

        Args:
            lent: the bytes may lie in the caches' own memory, for whoever needs them no longer than the caches.
        """
        arrays, scalars = self._state(caches)
        return _taken(self._columns(caches, start, end) | arrays, lent), scalars

    def _columns(self, caches: Sequence[Cache], start: int, end: int) -> Arrays:
        layers = self.by_token if end > start else ()
        return {(index, n): array for index in layers for n, array in caches[index].columns(start, end).items()}

    def _state(self, caches: Sequence[Cache]) -> tuple[Arrays, dict[str, str]]:
        arrays, scalars = {}, {}
        for index in self.whole:
            own, scalars[index] = caches[index].dump()
            arrays |= {(index, name): array for name, array in own.items()}
        return arrays, {"scalars": json.dumps(scalars)}

    def rooms(self, tensors: dict[str, tuple[str, tuple[int, ...]]], tokens: int) -> dict[str, mx.array]:
        """Arrays for a row's tensors (dtype, shape), those of by-token layers as long as `tokens` tokens are best
        given."""
        arrays = {}
        for name, (dtype, shape) in tensors.items():
            layer = int(name.partition(".")[0])
            if layer in self.by_token:
                shape = (*shape[:-2], max(tokens, self._empty[layer].room_for(tokens)), shape[-1])
            arrays[name] = mx.zeros(shape, getattr(mx, dtype))
        return arrays

    def assemble(
        self,
        blocks: Sequence[Record],
        state: Record | None,
        tokens: int,
        landed: Mapping[str, mx.array] = MappingProxyType({}),
    ) -> list[Cache]:
        """Fresh caches after `tokens` tokens, from the by-token layers' blocks in order and all other layers' state.

        Args:
            landed: by name, what `rooms` gave for the last of the blocks and the state, whose bytes lie there already.
        """
        caches, own = self._make(), {index: {} for index in (*self.by_token, *self.whole)}
        first = blocks[0].tensors if self.by_token else {}
        columns = {n: [block.tensors[n] for block in blocks] for n in first if _layer(n) in self.by_token}
        states = {n: t for n, t in state.tensors.items() if _layer(n) in self.whole} if state is not None else {}
        if shares_memory():
            arrays = _joined(columns, {n: caches[_layer(n)].room_for(tokens) for n in columns}, landed)
            arrays |= {n: landed[n] if n in landed else _array(tensor) for n, tensor in states.items()}
        else:
            arrays = sent(columns | {n: [tensor] for n, tensor in states.items()})
        for name, array in arrays.items():
            own[_layer(name)][name.partition(".")[2]] = array
        scalars: dict[str, Any] = json.loads(state.about["scalars"]) if state is not None else {}
        for index in self.by_token:
            caches[index].fill_columns(own[index], tokens)
        for index in self.whole:
            caches[index].fill(own[index], scalars[str(index)])
        mx.eval([cache.state for cache in caches])
        for cache in caches:
            cache.own()
        return caches


def _layer(name: str) -> int | None:
    """Whose tensor it is; None for what is no cache's."""
    layer = name.partition(".")[0]
    return int(layer) if layer.isdigit() else None


def _taken(arrays: Arrays, lent: bool = False) -> dict[str, Tensor]:
    """Arrays -> bytes, all evaluated together; each copied once out of the cache's own buffer, or not at all."""
    views = {key: _known(array) for key, array in arrays.items() if array.size}
    if shares_memory():
        mx.eval(list(views.values()))
        taken = {key: (_pieces if lent else copied)(view) for key, view in views.items()}
    else:
        taken = fetched(views)
    return {
        f"{layer}.{name}": Tensor(dtype_name(array.dtype), tuple(array.shape), taken.get((layer, name), b""))
        for (layer, name), array in arrays.items()
    }


def _known(array: mx.array) -> mx.array:
    """An array of a dtype that numpy has, with the same bytes: a view, also of columns in the middle of a buffer."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def _pieces(array: mx.array | np.ndarray) -> tuple[memoryview, ...]:
    """The array's own memory, cut where it does not hang together."""
    view = np.array(array, copy=False)
    if view.flags.c_contiguous:
        return (memoryview(view).cast("B").toreadonly(),)
    if view.ndim <= 2:
        return (memoryview(np.array(view, order="C")).cast("B").toreadonly(),)
    return tuple(piece for part in view for piece in _pieces(part))


def _array(tensor: Tensor) -> mx.array:
    dtype = getattr(mx, tensor.dtype)
    if not tensor.nbytes:
        return mx.zeros(tensor.shape, dtype)
    return mx.array(np.frombuffer(tensor.whole, dtype=np.uint8)).view(dtype).reshape(tensor.shape)


def _joined(
    parts: dict[str, list[Tensor]], rooms: dict[str, int], landed: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    """By name: tensors [..., tokens, D] behind one another in an array of so many columns, each byte written once.
    Where an array has `landed`, its last tensor lies there."""
    whole = {name: landed[name] if name in landed else _room(some, rooms[name]) for name, some in parts.items()}
    missing = {name: some[:-1] if name in landed else some for name, some in parts.items()}
    # Memory that nobody else has seen: see labkit.caches.host.
    views = host_views({name: whole[name] for name, some in missing.items() if some})
    for name, view in views.items():
        at = 0
        for tensor in missing[name]:
            part = np.frombuffer(tensor.whole, np.uint8).view(view.dtype).reshape(tensor.shape)
            view[..., at : at + tensor.shape[-2], :] = part
            at += tensor.shape[-2]
    return whole


def host_views(arrays: dict[Any, mx.array]) -> dict[Any, np.ndarray]:
    """Views of arrays' own memory that can be written; all evaluated at once, since each wait for the device takes as
    long as a small array."""
    views = {key: _known(array) for key, array in arrays.items()}
    mx.eval(list(arrays.values()), list(views.values()))
    return {key: np.array(view, copy=False) for key, view in views.items()}


def _room(tensors: Sequence[Tensor], columns: int) -> mx.array:
    """Zeros for these tensors behind one another, and for further columns."""
    first, tokens = tensors[0], sum(tensor.shape[-2] for tensor in tensors)
    return mx.zeros((*first.shape[:-2], max(columns, tokens), first.shape[-1]), getattr(mx, first.dtype))
