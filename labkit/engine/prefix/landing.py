"""A paused row's way back without a copy: its file is read to where its caches will lie."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.caches.host import shares_memory
from labkit.engine.prefix.codec import Codec, host_views


class Landing:
    """Arrays for one row, made when its file says what is in it. Nobody may have them before it has proved sound.

    Attributes:
        arrays: by the tensors' names; none where the host cannot write the device's memory.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self.arrays: dict[str, mx.array] = {}

    def room(self, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[memoryview, ...]]:
        """Memory for the tensors of a private record (`DiskTier.read`)."""
        (tokens,) = tensors["tokens"][1]
        own = {name: tensor for name, tensor in tensors.items() if name != "tokens" and 0 not in tensor[1]}
        if not shares_memory():
            return {}
        self.arrays = self._codec.rooms(own, tokens)
        room = {}
        for name, view in host_views(self.arrays).items():
            shape = own[name][1]
            if view.shape != shape:  # a by-token layer: the record holds its newest columns
                view = view[..., tokens - shape[-2] : tokens, :]
            room[name] = _pieces(view)
        return room


def _pieces(view: np.ndarray) -> tuple[memoryview, ...]:
    """A view's memory, cut where it does not hang together."""
    if view.flags.c_contiguous:
        return (memoryview(view).cast("B"),)
    return tuple(piece for part in view for piece in _pieces(part))
