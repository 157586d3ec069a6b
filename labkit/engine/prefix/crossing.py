"""Bytes out of and into a device with memory of its own, in few arrays.

Each array that crosses is a buffer in memory that host and device share, allocated by the system and touched page by
page: 80 of them for a block of the 35B-A3B shape. So many arrays leave as parts of one, and what lies side by side on
the host is sent as one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx
import numpy as np

from labkit.engine.prefix.record import Tensor

Key = TypeVar("Key", bound=Hashable)

TOGETHER = 64 << 20
"""Bytes that cross side by side, so much memory of the device they take for a moment."""


def fetched(arrays: Mapping[Key, mx.array]) -> dict[Key, memoryview]:
    """Arrays' bytes, out of new arrays.

    MLX moves an array's whole buffer to shared memory as soon as the host asks for a byte of it, for good. A cache's
    own would lie there from then on: copied anew at each block, and read by the next kernel page by page.
    """
    found: dict[Key, memoryview] = {}
    by_dtype = sorted(arrays, key=lambda key: str(arrays[key].dtype))
    for keys in _groups(by_dtype, {key: arrays[key].nbytes for key in arrays}, lambda key: arrays[key].dtype):
        # One more element: alone, an array would be its own concatenation.
        parts = [*(arrays[key].reshape(-1) for key in keys), mx.zeros((1,), arrays[keys[0]].dtype)]
        data, at = copied(mx.concatenate(parts)), 0
        for key in keys:
            found[key] = data[at : at + arrays[key].nbytes]
            at += arrays[key].nbytes
    return found


def sent(parts: Mapping[Key, Sequence[Tensor]]) -> dict[Key, mx.array]:
    """Tensors [..., tokens, D] as arrays of the device's own, several of one key behind one another."""
    whole: dict[Key, mx.array] = {}
    for keys in _groups(list(parts), {key: sum(tensor.nbytes for tensor in parts[key]) for key in parts}):
        landed = _side_by_side({(key, n): tensor for key in keys for n, tensor in enumerate(parts[key])})
        for key in keys:
            some = [landed[key, n] for n in range(len(parts[key]))]
            # A copy either way: MLX takes a part out of a far wider buffer.
            whole[key] = mx.concatenate(some, axis=-2) if len(some) > 1 else mx.contiguous(some[0])
        mx.eval([whole[key] for key in keys])
    return whole


def copied(array: mx.array) -> memoryview:
    """A copy in memory of numpy's, which takes large pages where the system has them: touching new memory page by page
    costs more than the copy itself."""
    return memoryview(np.array(array, order="C")).cast("B").toreadonly()


def _side_by_side(tensors: Mapping[Key, Tensor]) -> dict[Key, mx.array]:
    """Tensors as parts of arrays, one for each run of neighbours in the host's memory."""
    places, arrays = [], {}
    for key, tensor in tensors.items():
        if not tensor.nbytes:
            arrays[key] = mx.zeros(tensor.shape, getattr(mx, tensor.dtype))
            continue
        data = memoryview(tensor.whole)
        places.append((np.frombuffer(data, np.uint8).ctypes.data, len(data), key, data.obj))
    for run in _runs(sorted(places, key=lambda place: place[:2]), tensors):
        begin, buffer = run[0][0], np.frombuffer(run[0][3], np.uint8)
        at = begin - buffer.ctypes.data
        crossing = mx.array(buffer[at : at + run[-1][0] + run[-1][1] - begin])
        for address, size, key, _ in run:
            part, tensor = crossing[address - begin : address - begin + size], tensors[key]
            arrays[key] = part.view(getattr(mx, tensor.dtype)).reshape(tensor.shape)
    return arrays


def _runs(places: Sequence[tuple], tensors: Mapping[Key, Tensor]) -> Iterator[list[tuple]]:
    """Places (address, bytes, key, buffer) in one buffer, each where the last one ends and on a number of its dtype."""
    run: list[tuple] = []
    for place in places:
        address, _, key, buffer = place
        itemsize = getattr(mx, tensors[key].dtype).size
        follows = run and buffer is run[-1][3] and address == run[-1][0] + run[-1][1]
        if run and not (follows and (address - run[0][0]) % itemsize == 0):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _groups(keys: Sequence[Key], sizes: Mapping[Key, int], kind=lambda key: None) -> Iterator[list[Key]]:
    """Neighbours of one kind, of at most TOGETHER bytes; whatever is larger alone."""
    group: list[Key] = []
    for key in keys:
        if group and (kind(key) != kind(group[0]) or sum(sizes[k] for k in group) + sizes[key] > TOGETHER):
            yield group
            group = []
        group.append(key)
    if group:
        yield group
