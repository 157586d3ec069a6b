"""The memory guard: how tight memory is, how much is free, and how large the next chunk may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from labkit.engine.memory.meter import DeviceMeter, Meter, Reading, SystemClock

Level = Literal["normal", "soft", "hard", "emergency"]


@dataclass(frozen=True)
class Lines:
    """Where the levels begin, as shares of the ceiling.

    What no request can give back, the weights, takes its part of the room below the soft line and of the hysteresis:
    a model of nine tenths of the ceiling would else be above the soft line for ever, and serve one request at a time.
    `soft` is where that line is without any weights; with them it divides what they leave below the hard line alike.

    Attributes:
        soft: from here on no new request is let in.
        hard: from here on a request has to give memory back; no plan may go beyond it.
        emergency: from here on all requests do, at once. Between the ceiling and this line an emergency begins when the
            next poll still finds memory above the ceiling.
        hysteresis: how far below its line memory must fall before a level ends, so that no level flutters.
    """

    soft: float = 0.85
    hard: float = 0.95
    emergency: float = 1.05
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.soft <= self.hard <= 1 <= self.emergency:
            raise ValueError(f"lines must rise: 0 < soft <= hard <= 1 <= emergency, not {self}")
        if not 0 <= self.hysteresis < self.soft:
            raise ValueError(f"hysteresis must be a share from 0 to below soft, not {self.hysteresis!r}")


class MemoryGuard:
    """Watches memory between steps, in the thread that owns the arrays.

    Args:
        ceiling_bytes: what may be used in all; the device's working set by default.
        lines: where the levels begin.
        interval: seconds between polls that are not forced; `poll` in between says what the last one said.
        min_chunk: tokens that a chunk has at least, however little is free: a prompt always gets on.
        meter, clock: of the device and the system; fake ones in tests.

    Attributes:
        held_bytes: of the weights, what is in use since the engine began.
        level: what the last poll said.
        above_ceiling: whether the last poll found memory above the ceiling.
        polls: how often it was asked in time; forced polls are not among them.
        reclaims: how often the pool was given back.
    """

    def __init__(
        self,
        ceiling_bytes: int | None = None,
        *,
        lines: Lines | None = None,
        interval: float = 0.25,
        min_chunk: int = 32,
        meter: Meter | None = None,
        clock: SystemClock | None = None,
    ):
        if lines is not None and not isinstance(lines, Lines):
            raise ValueError(f"lines must be labkit.engine.memory.Lines, not {lines!r}")
        self.meter, self.clock, self.lines = meter or DeviceMeter(), clock or SystemClock(), lines or Lines()
        self.interval, self.min_chunk = interval, min_chunk
        limit = self.meter.read().limit
        self.ceiling_bytes = limit if ceiling_bytes is None else ceiling_bytes
        if type(self.ceiling_bytes) is not int or not 0 < self.ceiling_bytes <= limit:
            raise ValueError(f"ceiling_bytes must be from 1 to the device's {limit}, not {ceiling_bytes!r}")
        if not isinstance(interval, (int, float)) or not interval >= 0:
            raise ValueError(f"interval must be at least 0 seconds, not {interval!r}")
        if type(min_chunk) is not int or min_chunk < 1:
            raise ValueError(f"min_chunk must be a whole number of at least 1, not {min_chunk!r}")
        self.held_bytes = 0
        self.level: Level = "normal"
        self.above_ceiling, self.polls, self.reclaims = False, 0, 0
        self._polled: float | None = None
        self._reading: Reading | None = None

    @property
    def capacity_bytes(self) -> int:
        """What may be used without any request having to stop: the hard line."""
        return int(self.ceiling_bytes * self.lines.hard)

    def begin(self, weights_bytes: int) -> None:
        """An engine begins whose model has such weights, in use by now as far as the meter sees them."""
        self.held_bytes = min(weights_bytes, self.meter.read().needed, self.capacity_bytes)

    @property
    def _soft(self) -> float:
        """The soft line as a share of the ceiling."""
        return self.lines.soft + (1 - self.lines.soft / self.lines.hard) * self.held_bytes / self.ceiling_bytes

    @property
    def _hysteresis(self) -> float:
        """How far below its line a level ends, as a share of the ceiling."""
        return self.lines.hysteresis * (1 - self.held_bytes / (self.lines.hard * self.ceiling_bytes))

    @property
    def reading(self) -> Reading:
        """What the last poll measured."""
        if self._reading is None:
            self._reading = self.meter.read()
        return self._reading

    def poll(self, *, force: bool = False, ahead: int = 0) -> Level:
        """How tight memory is, called between steps. Before it says that it is tight, the pool is given back.

        Args:
            force: measure now, whatever the interval: after something was freed.
            ahead: bytes that the next step takes at a stroke; below 0, what it finds free in arrays that are there.
                They count towards the hard line, not the ceiling.
        """
        if not force:
            now = self.clock.now()
            counts = self._polled is None or now - self._polled >= self.interval
            if counts:
                self._polled = now
                self.polls += 1
            elif ahead <= 0:
                return self.level
            force = not counts
        self._reading = self.meter.read()
        if self._reading.pool and self._reading.used >= self._soft * self.ceiling_bytes:
            self.reclaim()
        share = self._reading.needed / self.ceiling_bytes
        # Between two polls there is time to make room; measuring again meanwhile is no second poll.
        lasting, self.above_ceiling = self.above_ceiling and not force, share >= 1
        if share >= self.lines.emergency or (share >= 1 and lasting):
            self.level = "emergency"
        else:
            self.level = self._below_emergency(share + ahead / self.ceiling_bytes)
        return self.level

    def _below_emergency(self, share: float) -> Level:
        held = self._hysteresis
        if share >= self.lines.hard - (held if self.level in ("hard", "emergency") else 0):
            return "hard"
        if share >= self._soft - (held if self.level != "normal" else 0):
            return "soft"
        return "normal"

    def reclaim(self) -> int:
        """Give the allocator's pool back, between steps; returns its bytes."""
        pool = self.reading.pool
        self.meter.reclaim()
        self.reclaims += 1
        self._reading = self.meter.read()
        return pool

    def free_bytes(self) -> int:
        """What may be taken before the hard line is reached, measured now. The pool counts as free."""
        self._reading = self.meter.read()
        return max(0, self.capacity_bytes - self._reading.needed)

    def calm_bytes(self) -> int:
        """What may be taken before the soft line is reached, measured now; below 0 beyond it."""
        self._reading = self.meter.read()
        return int(self.ceiling_bytes * self._soft) - self._reading.needed

    def chunk_for(self, wanted: int, cost: Callable[[int], int]) -> int:
        """How many of `wanted` prompt tokens to compute at once: all, or halves of them until they fit.

        Halves, because every width is another shape: few shapes keep the device's compiled graphs and pools few.

        Args:
            wanted: tokens.
            cost: tokens of a chunk -> bytes that it takes while it runs, including what it leaves in the caches.
        """
        free, tokens = self.free_bytes(), wanted
        while tokens > self.min_chunk and cost(tokens) > free:
            tokens = max(self.min_chunk, (tokens + 1) // 2)
        return min(tokens, wanted)
