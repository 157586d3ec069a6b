"""What pressure costs: a guard that sees none, a pause and its resume against their bytes, a run below a ceiling."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine import Engine, Event, MemoryGuard, Policy, Request, SamplingParams
from labkit.engine.memory import DeviceMeter, FakeMeter, Lines
from labkit.engine.prefix import PrefixStore
from labkit.measure.paired import Paired, paired
from labkit.models import LoadedModel

HUGE = 1 << 50


def request(loaded: LoadedModel, id: str, prompt: int, answer: int) -> Request:
    """A prompt of so many tokens unlike those of other ids, and an answer of exactly so many."""
    first = sum(id.encode())
    tokens = [(first + 7 * place + 3 * place * place) % min(loaded.model.vocab_size, 250) for place in range(prompt)]
    return Request(tokens, SamplingParams(max_tokens=answer, ignore_eos=True), id=id)


def idle_cost(loaded: LoadedModel, *, rows: int = 1, steps: int = 32, rounds: int = 9, chunk: int = 512) -> Paired:
    """Decode steps with a guard on the real meter that sees no pressure (first) against none (second), by turns."""
    engines = [Engine(loaded, prefill_chunk=chunk, guard=guard) for guard in (MemoryGuard(), None)]
    for engine in engines:
        for row in range(rows):
            engine.submit(request(loaded, f"row {row}", 16, (rounds + 3) * steps + 64))
        while sum(event.kind == "token" for event in engine.step()) < rows:
            pass

    def decode(engine: Engine) -> None:
        for _ in range(steps):
            engine.step()

    try:
        return paired(lambda: decode(engines[0]), lambda: decode(engines[1]), rounds=rounds, warm_up=2)
    finally:
        for engine in engines:
            engine.close()


@dataclass(frozen=True)
class PauseCost:
    """One row put away and brought back. Seconds are the medians of the rounds, bytes of its caches' valid part.

    Attributes:
        tokens: in its caches.
        bytes: that must go each way.
        pause_seconds, resume_seconds: of the engine, from the boundary on.
        out_seconds, in_seconds: the same bytes and nothing else: copied to the host, written, flushed; read, copied.
        ratio: both of the engine over both of the bytes, median of the rounds.
    """

    tokens: int
    bytes: int
    pause_seconds: float
    resume_seconds: float
    out_seconds: float
    in_seconds: float
    ratio: float

    def as_record(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


def pause_cost(loaded: LoadedModel, folder: Path, tokens: int, *, width: int, rounds: int = 5) -> PauseCost:
    """Pause and resume a row with `tokens` tokens in its caches, by turns with moving its bytes alone.

    The row's prompt is not stored beforehand: a pause writes all of it, as that of a long answer does.
    """
    store = _Private(loaded, folder, width)
    meter = FakeMeter(HUGE, loaded.weights_bytes)
    guard = MemoryGuard(HUGE, meter=meter, interval=0)
    engine = Engine(loaded, guard=guard, policy=Policy(patience=0), prefixes=store)
    engine.submit(request(loaded, "row", tokens, 4 * rounds + 8))
    try:
        _until(engine, "token")
        ours, floor, sizes = [], [], []
        for _ in range(rounds):
            before = engine.memory()["costs"]
            meter.live = int(0.97 * HUGE)
            _until(engine, "paused")
            meter.live = loaded.weights_bytes
            _until(engine, "token")
            costs = engine.memory()["costs"]
            ours.append([costs[name] - before[name] for name in ("pause_seconds", "resume_seconds")])
            arrays = [
                array for cache in engine._executor.lanes.batches()[0].caches for array in cache._pack()[0].values()
            ]
            mx.eval(arrays)
            sizes.append(sum(array.nbytes for array in arrays))
            floor.append(_move(arrays, folder / "floor"))
        ratios = [sum(a) / sum(b) for a, b in zip(ours, floor, strict=True)]
        (pause, resume), (out, back) = np.median(ours, axis=0), np.median(floor, axis=0)
        return PauseCost(tokens, int(np.median(sizes)), pause, resume, out, back, float(np.median(ratios)))
    finally:
        engine.close()
        store.close()


class _Private(PrefixStore):
    """A store that keeps paused rows and no prefixes."""

    def __init__(self, loaded: LoadedModel, folder: Path, width: int):
        super().__init__(loaded, folder / "store", width=width, keep_free_bytes=0, queue_bytes=64 << 30)

    def commit(self, tokens: Sequence[int], caches: Sequence[Any], **options: Any) -> None:
        return None


def _until(engine: Engine, kind: str) -> None:
    while not any(event.kind == kind for event in engine.step()):
        pass


def _move(arrays: Sequence[mx.array], path: Path) -> tuple[float, float]:
    """Seconds of moving arrays to a file on the disk, and back."""
    begin = time.perf_counter()
    with path.open("wb") as file:
        for array in arrays:
            # A view of the bytes: numpy has no bfloat16.
            file.write(memoryview(np.array(array.view(mx.uint8) if array.ndim else array)))
        file.flush()
        os.fsync(file.fileno())
    middle = time.perf_counter()
    back, data, at = [], path.read_bytes(), 0
    for array in arrays:
        raw = mx.array(np.frombuffer(data, np.uint8, array.nbytes, at))
        back.append(raw.view(array.dtype).reshape(array.shape))
        at += array.nbytes
    mx.eval(back)
    end = time.perf_counter()
    path.unlink()
    return middle - begin, end - middle


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
    waiting = [request(loaded, f"{place}: {length}", length, answer) for place, length in enumerate(prompts)]
    ids, events, begin = [one.id for one in waiting], [], time.perf_counter()
    ballast, dropped = None, ballast_bytes == 0
    while waiting or not engine.idle:
        if waiting and time.perf_counter() - begin >= gap_seconds * (len(ids) - len(waiting)):
            engine.submit(waiting.pop(0))
        new = engine.step()
        events += new
        if ballast is None and not dropped and _half_computed(new, ids[-1], prompts[-1]):
            ballast = mx.zeros((ballast_bytes,), mx.uint8)
            mx.eval(ballast)
        if any(event.kind == "finished" for event in new):
            ballast, dropped = None, True
    seconds, peak = time.perf_counter() - begin, mx.get_peak_memory()
    costs = (engine.memory() or {}).get("costs", {})
    engine.close()
    store.close()
    ends = {event.request: event for event in events if event.kind == "finished"}
    aborted = [id for id in ids if ends[id].reason == "error"]
    lost = sum(_computed(events, id) for id in aborted)
    chosen = {id: tuple(e.token for e in events if e.request == id and e.kind == "token") for id in ids}
    return (
        Pressure(
            policy="none" if ceiling_bytes is None else (policy or Policy()).pressure,
            ceiling_bytes=ceiling_bytes,
            peak_bytes=peak,
            seconds=seconds,
            finished=len(ids) - len(aborted),
            aborted=len(aborted),
            lost_tokens=lost,
            away_seconds={id: _away(events, id) for id in ids},
            first_token_seconds={id: ends[id].usage.first_token_seconds for id in ids},
            tokens=chosen,
            **{
                name: costs.get(name, 0)
                for name in (
                    "parks",
                    "pauses",
                    "resumes",
                    "pause_seconds",
                    "resume_seconds",
                    "moved_bytes",
                    "recomputed_tokens",
                )
            },
        ),
        events,
    )


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
