"""Schedules: who asks for what, and when; and an engine's run of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine import Engine, Event, Request, SamplingParams


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule.

    Attributes:
        step: the engine's step before which it is submitted.
        prompt: its prompt's length; the first `shared` tokens are the same for all arrivals.
        answer: tokens to generate.
        shared: tokens of the common beginning.
        cancel: steps after its submission when it is cancelled, or None.
        temperature: of its draws.
        seed: of its prompt and draws.
    """

    step: int
    prompt: int
    answer: int
    shared: int = 0
    cancel: int | None = None
    temperature: float = 0.0
    seed: int = 0

    def request(self, number: int, vocabulary: int) -> Request:
        """The request, named by its place in the schedule."""
        common = random.Random(0).choices(range(vocabulary), k=self.shared)
        own = random.Random(self.seed + 1).choices(range(vocabulary), k=self.prompt)
        tokens = [*common, *own][: max(self.prompt, 1)]
        params = SamplingParams(
            max_tokens=self.answer, temperature=self.temperature, seed=self.seed, ignore_eos=True, top_p=0.95
        )
        return Request(tokens, params, id=f"r{number}", arrival=float(number))


@dataclass(frozen=True)
class Schedule:
    """What is asked of an engine, and its options."""

    arrivals: tuple[Arrival, ...]
    chunk: int = 2048
    max_rows: int = 8
    pack: bool = True


def random_schedule(seed: int, *, rows: int = 8, longest: int = 32, answer: int = 20) -> Schedule:
    """A schedule drawn from a seed: up to 12 requests, `rows` at a time, crowded or spread out, some cancelled."""
    draw = random.Random(seed)
    shared = draw.choice([0, 0, 8, 16])
    spread = draw.choice([0, 0, 6, 25])
    arrivals = []
    for number in range(draw.choice([draw.randint(1, 4), draw.randint(8, 12)])):
        arrivals.append(
            Arrival(
                step=draw.randint(0, spread),
                prompt=draw.choice([1, 2, draw.randint(1, 9), draw.randint(1, longest), longest]),
                answer=draw.randint(1, answer),
                shared=shared if draw.random() < 0.7 else 0,
                cancel=draw.randint(0, 12) if draw.random() < 0.15 else None,
                temperature=draw.choice([0.0, 1.0]),
                seed=1000 * seed + number,
            )
        )
    chunk = draw.choice([2, 4, 8, 16, 16, 64, 64, 64, draw.randint(1, 20)])
    return Schedule(tuple(arrivals), chunk, draw.choice([rows, rows, draw.randint(1, rows)]), draw.random() < 0.8)


def run(engine: Engine, arrivals: Sequence[Arrival], observe: Callable[[int], Any] | None = None) -> list[Event]:
    """Work a schedule off; returns all events.

    Args:
        engine: a fresh one, with the schedule's options.
        arrivals: the schedule's.
        observe: called after each step with its number.
    """
    requests = [arrival.request(i, engine.loaded.model.vocab_size) for i, arrival in enumerate(arrivals)]
    events: list[Event] = []
    step, last = 0, max((a.step + (a.cancel or 0) for a in arrivals), default=0)
    while step <= last or not engine.idle:
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival.step == step:
                engine.submit(request)
            if arrival.cancel is not None and arrival.step + arrival.cancel == step:
                engine.cancel(request.id)
        events += engine.step()
        if observe is not None:
            observe(step)
        step += 1
    return events
