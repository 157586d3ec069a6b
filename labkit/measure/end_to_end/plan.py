"""Which points of a comparison are measured, in which order, how often, and how long that may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode"]

LENGTHS = tuple(256 << power for power in range(10))
"""Ten lengths, from 256 to 131,072 tokens."""

QUICK_PREFILL, QUICK_DECODE = (256, 512, 1024), (256, 1024, 4096)
QUICK = {"rounds": 3, "steps": 16, "warm_up_tokens": 64, "point_seconds": 30.0}


@dataclass(frozen=True)
class Point:
    """One measurement: reading a prompt of `length` tokens, or decoding with `length` tokens in the caches."""

    kind: Kind
    length: int

    @property
    def name(self) -> str:
        """Such as "decode-4096"."""
        return f"{self.kind}-{self.length}"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        points: in the order in which they are measured.
        rounds: by turns, for each point.
        steps: decode steps that are timed in each round.
        warm_up: decode steps before them.
        warm_up_tokens: of a prompt, read by each side before its first sample of a length.
        once_above: a side whose sample takes longer than this many seconds is measured once, not every round.
        released_up_to: tokens up to which mlx-lm as released takes part where a fair line exists beside it.
        point_seconds: of one point, after which no further round of it begins.
        seconds: in all, after which no further point or round begins; None for no limit.
        seed: of prompts and filled caches.
    """

    points: tuple[Point, ...]
    rounds: int = 5
    steps: int = 32
    warm_up: int = 4
    warm_up_tokens: int = 4096  # two chunks: every form of a kernel is compiled
    once_above: float = 10.0
    released_up_to: int = 4096
    point_seconds: float = 60.0
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a plan without points measures nothing: give prefill lengths or decode contexts")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if wrong := [point.length for point in self.points if point.length < 2]:
            raise ValueError(f"a prompt or a context has at least 2 tokens, not {wrong[0]}")

    @classmethod
    def of(cls, prefill: Sequence[int], decode: Sequence[int], **options) -> Plan:
        """Decode contexts, then prompt lengths, each ascending; options as the attributes."""
        points = [Point("decode", length) for length in sorted(set(decode))]
        points += [Point("prefill", length) for length in sorted(set(prefill))]
        return cls(tuple(points), **options)

    @classmethod
    def full(cls, **options) -> Plan:
        """All ten prompt lengths and all ten contexts."""
        return cls.of(LENGTHS, LENGTHS, **options)

    def measures(self) -> dict[str, float | int]:
        """What must be equal for two runs' points to stand in one table."""
        return {"rounds": self.rounds, "steps": self.steps, "warm_up": self.warm_up, "seed": self.seed}
