"""Caches <-> records: the one file here that touches MLX, in the thread that owns the arrays.

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
from labkit.engine.prefix.record import Record, Tensor


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
        fresh = make_caches()
        for cache, layout in zip(fresh, layouts, strict=True):
            if layout is None or "snapshot" not in cache.supports:
                raise Unsupported(cache.kind, "be kept in a prefix store", "it cannot be stored as bytes")
        self._classes = [type(cache) for cache in fresh]
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

    def columns(self, caches: Sequence[Cache], start: int, end: int, *, lent: bool = False) -> dict[str, Tensor]:
        """What the by-token layers hold of the tokens start to end.

        Args:
            lent: the bytes may lie in the caches' own memory, for whoever needs them no longer than the caches.
        """
        arrays = {(index, n): a for index in self.by_token for n, a in caches[index].columns(start, end).items()}
        return _taken(arrays, lent)

    def state(self, caches: Sequence[Cache], *, lent: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What all other layers hold: tensors (`lent`: as for `columns`), and their scalars for `Record.about`."""
        arrays, scalars = {}, {}
        for index in self.whole:
            own, scalars[index] = caches[index].dump()
            arrays |= {(index, name): array for name, array in own.items()}
        return _taken(arrays, lent), {"scalars": json.dumps(scalars)}

    def rooms(self, tensors: dict[str, tuple[str, tuple[int, ...]]], tokens: int) -> dict[str, mx.array]:
        """Arrays for a row's tensors (dtype, shape), those of by-token layers as long as `tokens` tokens are best
        given."""
        caches, arrays = self._make(), {}
        for name, (dtype, shape) in tensors.items():
            layer = int(name.partition(".")[0])
            if layer in self.by_token:
                shape = (*shape[:-2], max(tokens, caches[layer].room_for(tokens)), shape[-1])
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
        caches = self._make()
        parts: dict[int, dict[str, list[Tensor]]] = {index: {} for index in self.by_token}
        for name in blocks[0].tensors if self.by_token else ():
            layer, _, short = name.partition(".")
            if layer.isdigit() and int(layer) in parts:
                parts[int(layer)][short] = [block.tensors[name] for block in blocks]
        rooms = {index: caches[index].room_for(tokens) for index in self.by_token}
        for index, whole in _joined(parts, rooms, landed).items():
            caches[index].fill_columns(whole, tokens)
        scalars: dict[str, Any] = json.loads(state.about["scalars"]) if state is not None else {}
        for index in self.whole:
            names = [name for name in state.tensors if name.startswith(f"{index}.")]
            arrays = {n.partition(".")[2]: landed[n] if n in landed else _array(state.tensors[n]) for n in names}
            caches[index].fill(arrays, scalars[str(index)])
        mx.eval([cache.state for cache in caches])
        return caches


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def _taken(arrays: dict[tuple[int, str], mx.array], lent: bool) -> dict[str, Tensor]:
    """Arrays -> bytes, all evaluated together; each copied once out of the cache's own buffer, or not at all."""
    # As integers of the same width, since numpy has no bfloat16: a view, also of columns in the middle of a buffer.
    views = {key: array.view(_UNSIGNED[array.dtype.size]) for key, array in arrays.items() if array.size}
    if shares_memory():
        mx.eval(list(views.values()))
        taken = {key: (_pieces if lent else _copied)(view) for key, view in views.items()}
    else:
        taken = _fetched(views)
    return {
        f"{layer}.{name}": Tensor(dtype_name(array.dtype), tuple(array.shape), taken.get((layer, name), b""))
        for (layer, name), array in arrays.items()
    }


TOGETHER = 64 << 20
"""Bytes that leave a device side by side, so much memory of it they take for a moment."""


def _fetched(views: dict[tuple[int, str], mx.array]) -> dict[tuple[int, str], memoryview]:
    """Bytes out of a device with memory of its own, in few and new arrays.

    MLX moves an array's whole buffer to memory that both share as soon as the host asks for a byte of it, for good. A
    cache's own would lie there from then on: allocated and copied anew at each block, and read by the next kernel page
    by page; 80 buffers a block of the 35B-A3B shape.
    """
    fetched, groups = {}, []
    for key in sorted(views, key=lambda key: views[key].dtype.size):
        last = groups[-1] if groups else None
        if last is None or views[last[0]].dtype != views[key].dtype or _bytes(views, [*last, key]) > TOGETHER:
            groups.append([key])
        else:
            last.append(key)
    for keys in groups:
        # One more element: alone, an array would be its own concatenation.
        parts = [*(views[key].reshape(-1) for key in keys), mx.zeros((1,), views[keys[0]].dtype)]
        data, at = _copied(mx.concatenate(parts)), 0
        for key in keys:
            fetched[key] = data[at : at + views[key].nbytes]
            at += views[key].nbytes
    return fetched


def _bytes(views: dict[tuple[int, str], mx.array], keys: Sequence[tuple[int, str]]) -> int:
    return sum(views[key].nbytes for key in keys)


def _copied(array: mx.array) -> memoryview:
    """A copy in memory of numpy's, which takes large pages where the system has them: touching new memory page by page
    costs more than the copy itself."""
    return memoryview(np.array(array, order="C")).cast("B").toreadonly()


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
    parts: dict[int, dict[str, list[Tensor]]], rooms: dict[int, int], landed: Mapping[str, mx.array]
) -> dict[int, dict[str, mx.array]]:
    """By layer and name: tensors [..., tokens, D] behind one another in an array of `rooms[layer]` columns, each byte
    written once where the host writes the device's memory. Where an array has `landed`, its last tensor lies there."""
    if not shares_memory():
        return {layer: {name: _concatenated(some) for name, some in of.items()} for layer, of in parts.items()}
    whole = {
        layer: {
            name: landed[f"{layer}.{name}"] if f"{layer}.{name}" in landed else _room(some, rooms[layer])
            for name, some in of.items()
        }
        for layer, of in parts.items()
    }
    # Memory that nobody else has seen: see labkit.caches.host.
    views = host_views({(layer, name): array for layer, of in whole.items() for name, array in of.items()})
    for (layer, name), view in views.items():
        at, tensors = 0, parts[layer][name]
        for tensor in tensors[:-1] if f"{layer}.{name}" in landed else tensors:
            part = np.frombuffer(tensor.whole, np.uint8).view(view.dtype).reshape(tensor.shape)
            view[..., at : at + tensor.shape[-2], :] = part
            at += tensor.shape[-2]
    return whole


def host_views(arrays: dict[Any, mx.array]) -> dict[Any, np.ndarray]:
    """Views of arrays' own memory that can be written, as whole numbers; all evaluated at once, since each wait for the
    device takes as long as a small array."""
    views = {key: array.view(_UNSIGNED[array.dtype.size]) for key, array in arrays.items()}
    mx.eval(list(arrays.values()), list(views.values()))
    return {key: np.array(view, copy=False) for key, view in views.items()}


def _room(tensors: Sequence[Tensor], columns: int) -> mx.array:
    """Zeros for these tensors behind one another, and for further columns."""
    first, tokens = tensors[0], sum(tensor.shape[-2] for tensor in tensors)
    return mx.zeros((*first.shape[:-2], max(columns, tokens), first.shape[-1]), getattr(mx, first.dtype))


def _concatenated(tensors: Sequence[Tensor]) -> mx.array:
    parts = [_array(tensor) for tensor in tensors]
    whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)
    mx.eval(whole)  # so that only one layer is there twice
    return whole
