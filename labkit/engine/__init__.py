"""Requests -> tokens: the engine, its requests and options, its events.

A request enters by `Engine.submit`, waits in the register until admission lets it start, is computed by the prefill in
chunks, decodes as a row of a batch, and leaves; the scheduler says what each step does, the executor does it.

engine.py      requests in, events out; asking.py: streams and whole answers; worker.py: the thread behind `astream`
request.py     what is asked; params.py: sampling options; events.py: what is reported; completion.py: a whole answer
session.py     all that is kept of one request apart from arrays; register.py: who is here; text.py: stop strings
admission.py   who may start, by bytes; capacity.py: what fits at all; paging.py: the same in blocks of a pool
scheduler.py   what the next step is: a policy over plain data
executor.py    carries a plan out, and owns every array
prefill.py     prompts, chunk by chunk; followers.py: prompts with a common beginning
lanes.py       who decodes with whom; batch.py: rows over one set of caches
sampling.py    from logits to tokens; kernel_draws.py: the same by kernels; nucleus.py: the largest few logits on a CPU;
               at_once.py: greedy rows' tokens there
step.py        one token ahead of the host; replay.py, replayed.py: recorded steps
delivery.py    events to callbacks and readers; journal.py: the log of steps
prefix/        beginnings of prompts, kept in memory and on disk; hooks.py: what the engine asks of such a store
memory/        how tight memory is; parking/: park, pause and resume; wired.py: weights that stay resident on Metal
assembly.py    an engine's parts, made from its options; commands.py: `labkit generate`
"""

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
