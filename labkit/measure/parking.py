"""What pressure costs: requests that run below a ceiling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.engine import Engine, Event, MemoryGuard, Policy, Request, SamplingParams
from labkit.engine.memory import DeviceMeter, Lines
from labkit.engine.prefix import PrefixStore
from labkit.models import LoadedModel

COSTS = ("parks", "pauses", "resumes", "pause_seconds", "resume_seconds", "moved_bytes", "recomputed_tokens")
"""What an engine counts of its parks and pauses: fields of `Pressure`."""


def request(loaded: LoadedModel, id: str, prompt: int, answer: int) -> Request:
    """A prompt of `prompt` tokens unlike those of other ids, and an answer of exactly `answer` tokens."""
    first = sum(id.encode())
    tokens = [(first + 7 * place + 3 * place * place) % min(loaded.model.vocab_size, 250) for place in range(prompt)]
    return Request(tokens, SamplingParams(max_tokens=answer, ignore_eos=True), id=id)


def arrays_meter() -> DeviceMeter:
    """MLX's arrays alone: what a process holds besides would drown a small ceiling."""
    return DeviceMeter(process=False)


@dataclass(frozen=True)
class Pressure:
    """One run of several prompts below a ceiling.

    Attributes:
        policy: what was done under pressure; "none": no ceiling.
        ceiling_bytes, peak_bytes: what might be used, and what MLX had in use at most.
        seconds: from the first arrival to the last end.
        finished, aborted: requests that answered in full, and that ended with an error.
        parks, pauses, resumes: how often.
        pause_seconds, resume_seconds: the engine stood still for it.
        moved_bytes: of caches, both ways.
        recomputed_tokens: computed again after parks.
        lost_tokens: prompt and answer tokens of aborted requests, computed for nothing.
        away_seconds: of each request, how long it was put aside.
        first_token_seconds: of each request, from its arrival.
        tokens: of each request, its answer.
    """

    policy: str
    ceiling_bytes: int | None
    peak_bytes: int
    seconds: float
    finished: int
    aborted: int
    parks: int
    pauses: int
    resumes: int
    pause_seconds: float
    resume_seconds: float
    moved_bytes: int
    recomputed_tokens: int
    lost_tokens: int
    away_seconds: dict[str, float]
    first_token_seconds: dict[str, float | None]
    tokens: dict[str, tuple[int, ...]]

    def as_record(self) -> dict[str, Any]:
        """JSON data, answers left out."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def under_pressure(
    loaded: LoadedModel,
    folder: Path,
    prompts: Sequence[int],
    answer: int,
    *,
    width: int,
    ceiling_bytes: int | None,
    policy: Policy | None = None,
    lines: Lines | None = None,
    gap_seconds: float = 0.5,
    ballast_bytes: int = 0,
) -> tuple[Pressure, list[Event]]:
    """Prompts of these lengths, one arriving every `gap_seconds`, on an engine whose ceiling is real.

    Args:
        folder: a new one, for the store.
        ceiling_bytes: of MLX's arrays; None for an engine without a guard.
        ballast_bytes: taken when half of the last prompt is computed, until the first request ends: what another
            program would take.

    Returns:
        What came of it, and every event.
    """
    store = PrefixStore(loaded, folder, width=width, keep_free_bytes=0, disk_bytes=128 << 30, queue_bytes=16 << 30)
    options: dict[str, Any] = {}
    if ceiling_bytes is not None:
        options = {"guard": MemoryGuard(ceiling_bytes, lines=lines, meter=arrays_meter()), "policy": policy}
    mx.clear_cache()
    mx.reset_peak_memory()
    engine = Engine(loaded, prefixes=store, **options)
    requests = [request(loaded, f"{place}: {length}", length, answer) for place, length in enumerate(prompts)]
    ids, begin = [one.id for one in requests], time.perf_counter()
    events = _arrive_and_finish(engine, requests, gap_seconds, ballast_bytes)
    seconds, peak = time.perf_counter() - begin, mx.get_peak_memory()
    costs = (engine.memory() or {}).get("costs", {})
    engine.close()
    store.close()
    ends = {event.request: event for event in events if event.kind == "finished"}
    aborted = [id for id in ids if ends[id].reason == "error"]
    pressure = Pressure(
        policy="none" if ceiling_bytes is None else (policy or Policy()).pressure,
        ceiling_bytes=ceiling_bytes,
        peak_bytes=peak,
        seconds=seconds,
        finished=len(ids) - len(aborted),
        aborted=len(aborted),
        lost_tokens=sum(_computed(events, id) for id in aborted),
        away_seconds={id: _away(events, id) for id in ids},
        first_token_seconds={id: ends[id].usage.first_token_seconds for id in ids},
        tokens={id: tuple(e.token for e in events if e.request == id and e.kind == "token") for id in ids},
        **{name: costs.get(name, 0) for name in COSTS},
    )
    return pressure, events


def _arrive_and_finish(
    engine: Engine, requests: Sequence[Request], gap_seconds: float, ballast_bytes: int
) -> list[Event]:
    """Submit one request after the other and work until all have ended; all events."""
    waiting, events, begin, last = list(requests), [], time.perf_counter(), requests[-1]
    ballast, dropped = None, ballast_bytes == 0
    while waiting or not engine.idle:
        if waiting and time.perf_counter() - begin >= gap_seconds * (len(requests) - len(waiting)):
            engine.submit(waiting.pop(0))
        new = engine.step()
        events += new
        if ballast is None and not dropped and _half_computed(new, last.id, len(last.tokens)):
            ballast = mx.zeros((ballast_bytes,), mx.uint8)
            mx.eval(ballast)
        if any(event.kind == "finished" for event in new):
            ballast, dropped = None, True
    return events


def _half_computed(events: Sequence[Event], id: str, prompt: int) -> bool:
    return any(event.kind == "prefill" and event.request == id and event.done >= prompt // 2 for event in events)


def _computed(events: Sequence[Event], id: str) -> int:
    """Tokens that were in a request's caches when it ended."""
    done = 0
    for event in events:
        if event.request == id:
            done = event.done if event.kind in ("prefill", "resumed") else done + (event.kind == "token")
    return done


def _away(events: Sequence[Event], id: str) -> float:
    """Seconds that a request was put aside."""
    away, since = 0.0, None
    for event in events:
        if event.request != id:
            continue
        if event.kind in ("parked", "paused"):
            since = event.time
        elif since is not None and event.kind in ("resumed", "finished"):
            away, since = away + event.time - since, None
    return away
