"""One output that holds many: MLX fills each output that a launch wants filled by a launch of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

COUNTER = 32
"""Words before the first part: the barrier's counter has them for itself."""

LINE = 32
"""Words that a part begins on a multiple of: 128 bytes."""

LEAST = 4096
"""Words of an output at least: MLX keeps tiny arrays in the host's memory on CUDA; there a barrier took 511 us."""


@dataclass(frozen=True)
class Words:
    """An output of uint32 words and the parts in it.

    Attributes:
        parts: (name, shape, dtype) of each; a text finds one from word `<NAME>_AT` on.
    """

    parts: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each part begins and ends, in words."""
        found, at = {}, COUNTER
        for name, shape, dtype in self.parts:
            words = -(-math.prod(shape) * dtype.size // 4)
            found[name] = at, at + words
            at += -(-words // LINE) * LINE
        return found

    @cached_property
    def size(self) -> int:
        """Words in all."""
        return max(LEAST, max(end for _, end in self.places.values()))

    @cached_property
    def template(self) -> list[tuple[str, int]]:
        """The places as template arguments."""
        return [(f"{name.upper()}_AT", begin) for name, (begin, _) in self.places.items()]

    def take(self, words: mx.array, *names: str) -> list[mx.array]:
        """Parts of the output: views, without a copy."""
        found = []
        for name, shape, dtype in self.parts:
            if name in names:
                begin, end = self.places[name]
                values = words[begin:end].view(dtype)
                count = math.prod(shape)
                values = values if values.size == count else values[:count]
                found.append((names.index(name), values.reshape(shape)))
        return [array for _, array in sorted(found, key=lambda pair: pair[0])]
