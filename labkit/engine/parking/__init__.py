"""Park, pause and resume instead of abort: the states of requests under memory pressure, and who does what when."""

from labkit.engine.parking.keeper import Hands, Keeper
from labkit.engine.parking.parking import Parking
from labkit.engine.parking.paused import PausedRow
from labkit.engine.parking.policy import Action, Ledger, Policy, Room, Row
from labkit.engine.parking.states import ENDS, LINE, LIVE, TRANSITIONS, IllegalMove, State, Trigger, after

__all__ = [
    "ENDS",
    "LINE",
    "LIVE",
    "TRANSITIONS",
    "Action",
    "Hands",
    "IllegalMove",
    "Keeper",
    "Ledger",
    "Parking",
    "PausedRow",
    "Policy",
    "Room",
    "Row",
    "State",
    "Trigger",
    "after",
]
