"""What the replay tests share: random schedules, tiny models twice, and one replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from labkit.models import LoadedModel
from labkit.parity.replay import Arrival, Oracle, Recorder, Schedule, Verdict, replay, run
from tests.tiny_models import CONFIGS, adapter, module

lengths = st.one_of(st.just(1), st.just(2), st.integers(3, 24))


@st.composite
def schedules(draw: Any) -> Schedule:
    """Up to nine requests, up to eight at a time: crowded or one by one, with common beginnings and cancels."""
    spread = draw(st.sampled_from([0, 4, 20]))
    shared = draw(st.sampled_from([0, 0, 4, 8, 16]))
    arrival = st.builds(
        Arrival,
        step=st.integers(0, spread),
        prompt=lengths,
        answer=st.integers(1, 12),
        shared=st.sampled_from([0, shared]),
        cancel=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 9)),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 99),
    )
    arrivals = draw(st.lists(arrival, min_size=1, max_size=9))
    return Schedule(
        tuple(arrivals),
        chunk=draw(st.sampled_from([1, 3, 4, 8, 16, 64, 64])),
        max_rows=draw(st.sampled_from([8, 8, 3])),
        pack=draw(st.sampled_from([True, True, False])),
    )


def named_schedules(*numbers: int) -> list[Schedule]:
    """Crowded schedules from numbers, for where a strategy is too slow."""
    from labkit.parity.replay import random_schedule

    return [random_schedule(number, longest=20, answer=10) for number in numbers]


def crowd(rows: int = 8, *, answer: int = 12, chunk: int = 8) -> Schedule:
    """Many requests at once, two more than fit, some with a common beginning: every operation happens."""
    arrivals = [
        Arrival(
            step=0 if number < rows else number,
            prompt=(17, 5, 1, 20, 12, 2, 19, 9, 26, 18)[number % 10],
            answer=answer + (number * 5) % 7,
            shared=16 if number % 3 == 0 else 0,
            temperature=float(number % 2),
            seed=number,
        )
        for number in range(rows + 2)
    ]
    return Schedule(tuple(arrivals), chunk, rows)


def pair(loaded: LoadedModel, name: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> tuple[LoadedModel, Any]:
    """A tiny model as labkit's and as mlx-lm's: two modules of equal weights. `loaded` gives the tokenizer."""
    other = module(name, **changes)
    model = adapter(name, **changes)
    for each in (other, model.module):
        each.set_dtype(dtype)
    if dtype != mx.float32:
        from labkit.models.adapter import Adapter

        model = Adapter(model.module, CONFIGS[name] | changes)
    return replace(loaded, model=model, config=CONFIGS[name] | changes), other


def replayed(loaded: LoadedModel, other: Any, schedule: Schedule) -> Verdict:
    """Run a schedule here, replay its log there."""
    engine, recorder = Recorder.engine(
        loaded, prefill_chunk=schedule.chunk, max_rows=schedule.max_rows, pack_prompts=schedule.pack
    )
    run(engine, schedule.arrivals)
    assert engine._executor.cache_bytes == 0
    return replay(engine.log, recorder.forwards, Oracle(other, grid=schedule.chunk))
