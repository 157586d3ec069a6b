"""Requests -> tokens: the engine, its requests and options, its events."""

from labkit.engine.admission import Admission
from labkit.engine.batch import DecodingBatch
from labkit.engine.capacity import Capacity, CapacityError
from labkit.engine.completion import Completion, RequestFailed
from labkit.engine.engine import Engine
from labkit.engine.events import Event, StepRecord, Usage
from labkit.engine.hooks import Lease, PrefixStore
from labkit.engine.memory import MemoryGuard
from labkit.engine.params import SamplingParams
from labkit.engine.parking import PausedRow, Policy
from labkit.engine.request import Request
from labkit.engine.scheduler import Plan, Scheduler
from labkit.engine.session import Session
from labkit.engine.step import Constraint

__all__ = [
    "Admission",
    "Capacity",
    "CapacityError",
    "Completion",
    "Constraint",
    "DecodingBatch",
    "Engine",
    "Event",
    "Lease",
    "MemoryGuard",
    "PausedRow",
    "Plan",
    "Policy",
    "PrefixStore",
    "Request",
    "RequestFailed",
    "SamplingParams",
    "Scheduler",
    "Session",
    "StepRecord",
    "Usage",
]
