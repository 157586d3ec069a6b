"""The states of a request under memory pressure, and the only ways from one to another: plain data."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a request stands.

    WAITING: in line, without memory. HELD: the first in line, which fits but not just now. PREFILLING, DECODING: at
    work. PARKED: its prompt was being computed; what was committed is pinned, the rest must be computed again. PAUSING,
    RESUMING: its exact state is being written or read. PAUSED: that state is stored. FINISHED, ABORTED, REJECTED: ends.
    """

    WAITING = "waiting"
    HELD = "held"
    PREFILLING = "prefilling"
    PARKED = "parked"
    DECODING = "decoding"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


class Trigger(StrEnum):
    """What moves a request."""

    REFUSE = "refuse"  # it can never fit
    HOLD = "hold"  # it fits, but not now
    ADMIT = "admit"
    COMMIT = "commit"  # blocks of its prompt were stored
    PARK = "park"
    READMIT = "readmit"  # a parked request is let in again
    DECODE = "decode"  # its prompt is there
    PAUSE = "pause"
    STORED = "stored"  # the paused state can be read again
    STORE_FAILED = "store failed"
    RESUME = "resume"
    RESTORED = "restored"
    RESTORE_FAILED = "restore failed"  # the paused state cannot be read: it is computed again
    FINISH = "finish"
    ABORT = "abort"  # cancelled, failed, the one victim, or an emergency


LIVE = frozenset({State.PREFILLING, State.DECODING, State.PAUSING, State.RESUMING})
"""States with memory on the device."""

LINE = frozenset({State.WAITING, State.HELD, State.PARKED, State.PAUSED})
"""States in line, without memory on the device."""

ENDS = frozenset({State.FINISHED, State.ABORTED, State.REJECTED})

TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.WAITING, Trigger.REFUSE): State.REJECTED,
    (State.WAITING, Trigger.HOLD): State.HELD,
    (State.WAITING, Trigger.ADMIT): State.PREFILLING,
    (State.HELD, Trigger.ADMIT): State.PREFILLING,
    (State.PREFILLING, Trigger.COMMIT): State.PREFILLING,
    (State.PREFILLING, Trigger.PARK): State.PARKED,
    (State.PARKED, Trigger.READMIT): State.WAITING,
    (State.PREFILLING, Trigger.DECODE): State.DECODING,
    (State.DECODING, Trigger.PAUSE): State.PAUSING,
    (State.PAUSING, Trigger.STORED): State.PAUSED,
    (State.PAUSING, Trigger.STORE_FAILED): State.DECODING,
    (State.PAUSED, Trigger.RESUME): State.RESUMING,
    (State.RESUMING, Trigger.RESTORED): State.DECODING,
    (State.RESUMING, Trigger.RESTORE_FAILED): State.WAITING,
    (State.DECODING, Trigger.FINISH): State.FINISHED,
    (State.PREFILLING, Trigger.FINISH): State.FINISHED,
    (State.PAUSING, Trigger.FINISH): State.FINISHED,
    **{(state, Trigger.ABORT): State.ABORTED for state in State if state not in ENDS},
}


class IllegalMove(RuntimeError):
    """A move that is not in `TRANSITIONS`: a defect of whoever asked for it."""


def after(state: State, trigger: Trigger) -> State:
    """The state that follows.

    Raises:
        IllegalMove: none does.
    """
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        raise IllegalMove(f"a request that is {state} cannot {trigger}") from None
