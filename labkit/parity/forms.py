"""In which steps a side reads a text: the whole sequence in wide chunks, or a prefill and then one token at a time.

The two forms run different code (matrix-matrix against matrix-vector products, a chunked scan against a single step, a
mask against none, caches filled against caches extended), so each is a check of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FORMS = ("whole", "incremental")

# A chunk's logits in float32 stay within this many bytes, whatever the vocabulary.
LOGITS_BYTES = 128 * 2**20
WIDEST_CHUNK = 512


@dataclass(frozen=True)
class Form:
    """How a window is fed to a model.

    Attributes:
        kind: "whole" reads everything in chunks; "incremental" reads `prefill` tokens in chunks, then one at a time.
        prefill: tokens before single steps begin (incremental only).
        chunk: tokens of one wide forward; None lets the vocabulary decide (at most 512, 128 MiB of logits).
    """

    kind: Literal["whole", "incremental"] = "whole"
    prefill: int = 64
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise ValueError(f"a form is one of {', '.join(FORMS)}, not {self.kind!r}")
        if self.prefill < 0:
            raise ValueError(f"prefill counts tokens and cannot be {self.prefill}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"a chunk holds at least one token, not {self.chunk}")

    @classmethod
    def incremental(cls, prefill: int = 64, chunk: int | None = None) -> Form:
        return cls("incremental", prefill, chunk)

    def widths(self, length: int, vocabulary: int) -> list[int]:
        """Widths of the forwards that together read `length` tokens."""
        chunk = self.chunk or max(1, min(WIDEST_CHUNK, LOGITS_BYTES // (4 * vocabulary)))
        wide = length if self.kind == "whole" else min(self.prefill, length)
        full, rest = divmod(wide, chunk)
        return [chunk] * full + [rest] * bool(rest) + [1] * (length - wide)

    def __str__(self) -> str:
        return "whole sequence" if self.kind == "whole" else f"prefill {self.prefill}, then single steps"
