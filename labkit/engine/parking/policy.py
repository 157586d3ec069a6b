"""Who gives memory back when it is tight, and who comes back when it is not: decisions over plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from labkit.engine.memory import Level
from labkit.engine.parking.states import ENDS, LINE, LIVE, State, Trigger, after

MARGIN_STEPS = 256
"""Tokens that rows at work must have room for before one that was put aside comes back: who came back as soon as it
fitted was put aside again a few tokens later. Buffers grow once in so many."""

MOST_DOUBLINGS = 6
"""Of `Policy.calm_polls`."""

Pressure = Literal["park", "single-victim", "abort-all"]
Reserve = Literal["nothing", "prompts", "answers"]


@dataclass(frozen=True)
class Policy:
    """What is done under pressure.

    Attributes:
        pressure: "park": prompts are parked and rows paused, and only where neither can be, one victim ends.
            "single-victim": one ends at once. "abort-all": all end, as servers without either do.
        reserve: what is kept for those who run before somebody comes in beside them: "nothing"; the bytes of their
            "prompts", which will be taken for certain; or those of their whole "answers" too, which may end early.
        max_parks: how often a prompt is parked; each time, what was not committed is computed again. Whoever has been
            put aside so often comes back only when there is room for all that run to finish as well.
        patience: polls at the hard line before the only row is put aside, or a victim ends. Above the ceiling there is
            no patience.
        calm_polls: polls below the hard line before somebody who was put aside comes back to an empty engine although
            the estimate says that it does not fit; twice as many after each time that it was put aside again.
        stall_seconds: how long everybody may wait while nothing runs; then the first in line ends with an error.
    """

    pressure: Pressure = "park"
    reserve: Reserve = "prompts"
    max_parks: int = 3
    patience: int = 20
    calm_polls: int = 3
    stall_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.pressure not in ("park", "single-victim", "abort-all"):
            raise ValueError(f"pressure must be 'park', 'single-victim' or 'abort-all', not {self.pressure!r}")
        if self.reserve not in ("nothing", "prompts", "answers"):
            raise ValueError(f"reserve must be 'nothing', 'prompts' or 'answers', not {self.reserve!r}")
        for name in ("max_parks", "patience", "calm_polls"):
            if type(value := getattr(self, name)) is not int or value < 0:
                raise ValueError(f"{name} must be a whole number of at least 0, not {value!r}")
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds must be above 0, not {self.stall_seconds!r}")


@dataclass
class Row:
    """What decisions may know of a request.

    Attributes:
        id: the request's.
        order: its place in line; the smallest goes first.
        state: where it stands; changed by `Ledger.move` alone.
        live: bytes that it holds on the device.
        parks, pauses: how often it was put aside since somebody last finished.
        pausable: whether there is a store for its state.
        unstored: whether storing it failed since somebody last finished.
    """

    id: str
    order: tuple[float, ...]
    state: State = State.WAITING
    live: int = 0
    parks: int = 0
    pauses: int = 0
    pausable: bool = True
    unstored: bool = False

    @property
    def put_aside(self) -> int:
        """Parks and pauses."""
        return self.parks + self.pauses


@dataclass(frozen=True)
class Room:
    """What the first in line would find, in bytes.

    Attributes:
        free: below the hard line, now.
        nothing: what it takes to run to its end beside those that run, as they stand;
        prompts: when their prompts are there as well;
        answers: when their answers have become as long as they may;
        growing: when they have decoded `MARGIN_STEPS` more tokens.
    """

    free: int
    nothing: int
    prompts: int
    answers: int
    growing: int


@dataclass(frozen=True)
class Action:
    """What to do next: park or pause a row, end some, or let the first in line in. `reason` is an error's code."""

    kind: Literal["park", "pause", "end", "enter"]
    ids: tuple[str, ...]
    reason: str = ""


class Ledger:
    """The requests of an engine and their states. It decides; whoever owns the arrays acts and tells what came of it.

    Attributes:
        rows: by id, without those that have ended.
        counts: moves so far, by trigger.
    """

    def __init__(self, policy: Policy | None = None):
        self.policy = policy or Policy()
        self.rows: dict[str, Row] = {}
        self.counts: dict[str, int] = {}
        self._tight = self._calm = 0  # polls in a row
        self._may_end = True

    def add(self, row: Row) -> None:
        """A request that is new here."""
        if row.id in self.rows:
            raise ValueError(f"request {row.id!r} is here already")
        self.rows[row.id] = row

    def move(self, id: str, trigger: Trigger) -> State:
        """Something happened to a request; returns where it stands now.

        Raises:
            IllegalMove: it cannot happen to it.
        """
        row = self.rows[id]
        row.state = after(row.state, trigger)
        self.counts[trigger] = self.counts.get(trigger, 0) + 1
        if trigger is Trigger.PARK:
            row.parks += 1
        elif trigger is Trigger.STORED:
            row.pauses += 1
        elif trigger is Trigger.STORE_FAILED:
            row.unstored = True
        if row.state not in LIVE:
            row.live = 0
        if row.state in ENDS:
            del self.rows[id]
            # Somebody's memory is free for good: who was put aside for it starts to count anew.
            for other in self.rows.values():
                other.parks, other.pauses, other.unstored = 0, 0, False
        return row.state

    def ended(self, id: str, *, finished: bool) -> None:
        """A request has ended: by itself, or cancelled or with an error."""
        row = self.rows.get(id)
        if row is not None:
            self.move(id, Trigger.FINISH if finished and row.state in LIVE else Trigger.ABORT)

    @property
    def waits(self) -> bool:
        """Whether anybody is in line."""
        return any(row.state in LINE for row in self.rows.values())

    # -- who is where --------------------------------------------------------------------------------------------------

    def live(self) -> list[Row]:
        """Those with memory on the device."""
        return [row for row in self.rows.values() if row.state in LIVE]

    def line(self) -> list[Row]:
        """Those without, the first in line first."""
        return sorted((row for row in self.rows.values() if row.state in LINE), key=lambda row: row.order)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def polled(self, level: Level) -> None:
        """The guard has polled; once for each of its polls, forced ones left out."""
        tight = level in ("hard", "emergency")
        self._tight, self._calm = (self._tight + 1, 0) if tight else (0, self._calm + 1)
        self._may_end = True

    def relieve(self, level: Level, *, above_ceiling: bool = False) -> Action | None:
        """Who gives memory back; asked again, with a new measurement, until nobody has to."""
        live = self.live()
        if not live or level not in ("hard", "emergency"):
            return None
        if level == "emergency":
            return Action("end", tuple(row.id for row in live), "memory_emergency")
        if self.policy.pressure == "abort-all":
            return Action("end", tuple(row.id for row in live), "memory_pressure")
        impatient = above_ceiling or self._tight >= self.policy.patience
        if self.policy.pressure == "park" and (len(live) > 1 or impatient) and (action := self._put_aside(live)):
            return action
        # One victim, and then a look at what its memory was worth. The only row may get through: it is left.
        if len(live) > 1 and self._may_end and (impatient or self.policy.pressure == "single-victim"):
            self._may_end, self._tight = False, 0
            return Action("end", (_victim(live).id,), "memory_pressure")
        return None

    def _put_aside(self, live: Collection[Row]) -> Action | None:
        """A prompt before a row that decodes: it loses little, and frees its memory without a byte written."""
        prompts = [row for row in live if row.state is State.PREFILLING and row.parks < self.policy.max_parks]
        if prompts:
            return Action("park", (_victim(prompts).id,))
        rows = [row for row in live if row.state is State.DECODING and row.pausable and not row.unstored]
        return Action("pause", (_victim(rows).id,)) if rows else None

    def enter(self, level: Level, room: Room) -> Action | None:
        """Whether the first in line comes in. Nobody overtakes it: what it needs is kept for it."""
        line = self.line()
        if not line or level in ("hard", "emergency"):
            return None
        head = line[0]
        aside = head.put_aside > 0 or head.state in (State.PARKED, State.PAUSED)
        if not self.live():
            calm = self.policy.calm_polls << min(max(head.put_aside - 1, 0), MOST_DOUBLINGS)
            comes = not aside or room.free >= room.nothing or self._calm >= calm
        elif level == "soft" and not aside:
            comes = False
        else:
            reserve = "answers" if head.put_aside >= self.policy.max_parks else self.policy.reserve
            needed = getattr(room, reserve)
            comes = room.free >= (max(needed, room.growing) if aside else needed)
        return Action("enter", (head.id,)) if comes else None

    def stalled(self, seconds: float) -> Action | None:
        """The first in line ends if nothing has run, and nobody could, for too long."""
        line = self.line()
        if not line or self.live() or seconds < self.policy.stall_seconds:
            return None
        return Action("end", (line[0].id,), "memory_stalled")


def _victim(rows: Collection[Row]) -> Row:
    """The one with the most live bytes; of several, the last in line."""
    return max(rows, key=lambda row: (row.live, row.order))
