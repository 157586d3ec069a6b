"""What the store keeps: named tensors as bytes, with a few strings about them. No MLX array ever gets in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

Part = Literal["columns", "state", "tail", "private"]
"""`columns`: what layers that remember every token hold of one block. `state`: what all other layers hold at a block's
end. `tail`: both, of less than a block. `private`: a paused row."""


class Tensor(NamedTuple):
    """dtype (MLX's name), shape, and the bytes in row-major order: in one piece, or in several laid end to end."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | tuple[memoryview, ...]

    @property
    def pieces(self) -> tuple[bytes | memoryview, ...]:
        """The bytes, as they lie in memory."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def whole(self) -> bytes | memoryview:
        """The bytes in one piece."""
        return b"".join(self.data) if isinstance(self.data, tuple) else self.data

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return sum(map(len, self.pieces))


@dataclass(frozen=True)
class Record:
    """One file's worth of tensors. `about` becomes the header's metadata."""

    tensors: dict[str, Tensor]
    about: dict[str, str] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def name_of(key: str, part: Part) -> str:
    """What a record goes by in every tier: the block's hash and the part."""
    return f"{key}.{part}"
