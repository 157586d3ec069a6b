"""Where two prompts part, and which part of them it was: the system message, a tool, an answer that was rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from labkit.models.chat import Segment


class Prompt(Protocol):
    """Tokens, and which of them came from where: a `Request` or a `RenderedChat`."""

    tokens: Sequence[int]
    segments: Sequence[Segment]


@dataclass(frozen=True)
class Parting:
    """What two prompts have in common.

    Attributes:
        kind: "same"; "appended" (the second goes on where the first ends); "cut" (it ends earlier); "changed".
        common: tokens at the beginning that are equal.
        reused: of those, tokens in whole blocks, all but the prompt's last token at most: what a store can give.
        computed: tokens of the second prompt that have to be computed.
        lost: of those, tokens that stand in the first prompt behind the place where they part: what the change cost.
        before, after: the segments that hold the first token that differs, None behind a prompt's end.
        into: how many tokens into its segment that is, in the second prompt (in the first where the second ends).
    """

    kind: Literal["same", "appended", "cut", "changed"]
    common: int
    reused: int
    computed: int
    lost: int
    before: Segment | None
    after: Segment | None
    into: int

    def __str__(self) -> str:
        cost = f"{self.reused} tokens are reused, {self.computed} computed"
        if self.kind == "same":
            return f"the same prompt: {cost}"
        if self.kind == "appended":
            return f"appended to at token {self.common}, {_name(self.after)}: {cost}"
        if self.kind == "cut":
            return f"cut off at token {self.common}, {_name(self.before)}: {cost}"
        where = _name(self.after)
        if self.before is not None and self.before[:2] != (self.after or (None,))[:2]:
            where = f"{_name(self.before)} became {where}"
        return f"parts at token {self.common}, {where}, {self.into} tokens in: {cost}, {self.lost} of them once known"


def parting(before: Prompt, after: Prompt, width: int) -> Parting:
    """Compare a prompt with the one before it.

    Args:
        before, after: with segments where they are known.
        width: tokens of a store's block.
    """
    pairs = enumerate(zip(before.tokens, after.tokens, strict=False))
    shorter = min(len(before.tokens), len(after.tokens))
    common = next((index for index, (a, b) in pairs if a != b), shorter)
    if common < shorter:
        kind = "changed"
    elif len(before.tokens) == len(after.tokens):
        kind = "same"
    else:
        kind = "appended" if common == len(before.tokens) else "cut"
    reused = min(common, len(after.tokens) - 1) // width * width
    first, second = (_holding(prompt.segments, common) for prompt in (before, after))
    start = (second or first).start if second or first else 0
    return Parting(
        kind=kind,
        common=common,
        reused=reused,
        computed=len(after.tokens) - reused,
        lost=max(0, min(len(before.tokens), len(after.tokens)) - common) if kind == "changed" else 0,
        before=first,
        after=second,
        into=common - start,
    )


def _holding(segments: Sequence[Segment], token: int) -> Segment | None:
    return next((segment for segment in segments if segment.start <= token < segment.end), None)


def _name(segment: Segment | None) -> str:
    if segment is None:
        return "where no segment is known"
    return segment.source if segment.role in ("template", segment.source) else f"{segment.role} ({segment.source})"
