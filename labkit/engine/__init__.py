"""Requests -> tokens: the engine, its requests and options, its events."""

from labkit.engine.capacity import Capacity, CapacityError
from labkit.engine.completion import Completion, RequestFailed
from labkit.engine.engine import Engine
from labkit.engine.events import Event, StepRecord, Usage
from labkit.engine.params import SamplingParams
from labkit.engine.request import Request
from labkit.engine.step import Constraint

__all__ = [
    "Capacity",
    "CapacityError",
    "Completion",
    "Constraint",
    "Engine",
    "Event",
    "Request",
    "RequestFailed",
    "SamplingParams",
    "StepRecord",
    "Usage",
]
