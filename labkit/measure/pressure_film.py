"""A run under pressure as a film: for every step who was where and how many bytes were held, from counted bytes alone.

The meter counts the caches and what the script takes from outside, the clock moves by one a step: the film depends on
sizes and policy, not on the machine's speed. Only `seconds` is measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from labkit.devices import this_device
from labkit.engine import Engine, Event, MemoryGuard, Policy
from labkit.engine.memory import FakeClock, FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.measure.parking import request
from labkit.models import LoadedModel, synthetic

Place = str  # "waiting", "prefill", "decode", "parked", "paused", "finished", "aborted"
AWAY = ("parked", "paused")


@dataclass
class Film:
    """One run.

    Attributes:
        ids: the requests.
        policy, ceiling_bytes: as given, bytes beside the weights.
        hard_bytes: the hard line, beside the weights.
        places: for every step, each request's place.
        bytes: for every step, of all caches.
        outside: for every step, what the script took.
        moves: (step, request, "parked" | "paused" | "resumed" | "aborted" | "finished").
        answers: the tokens that each request's reader was given.
        lost_tokens: prompt and answer tokens that were computed for nothing.
        seconds: how long the run took.
    """

    ids: tuple[str, ...]
    policy: str
    ceiling_bytes: int
    hard_bytes: int
    places: list[tuple[Place, ...]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    moves: list[tuple[int, str, str]] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)
    lost_tokens: int = 0
    seconds: float = 0.0

    def count(self, *kinds: str) -> int:
        """Moves of these kinds."""
        return sum(kind in kinds for _, _, kind in self.moves)


def small_hybrid(*, compiled: bool = False) -> LoadedModel:
    """One recurrent and one attention layer, random, with tiny-hybrid's tokenizer: a step takes milliseconds.

    Args:
        compiled: by labkit's compiled loops, where the device is a CPU; otherwise by mlx-lm's module, as on a GPU.
    """
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    graph = "native" if compiled and this_device().kind == "cpu" else "adapter"
    return synthetic("tiny-hybrid", layers=2, bits=None, dtype=mx.float32, graph=graph, **sizes)


def shoot(
    loaded: LoadedModel,
    prompts: Sequence[int],
    answer: int,
    ceiling_bytes: int,
    policy: Policy,
    *,
    width: int,
    gap: int = 2,
    outside: Callable[[int], int] = lambda step: 0,
    limit: int = 5000,
) -> Film:
    """Run prompts of these lengths, one arriving every `gap` steps.

    Args:
        ceiling_bytes: beside the weights.
        outside: bytes that another program takes, by step.
    """
    step = 0
    meter = FakeMeter(1 << 50, lambda: loaded.weights_bytes + engine.cache_bytes if engine else loaded.weights_bytes)
    meter.outside = lambda _: outside(step)
    engine, clock = None, FakeClock()
    with tempfile.TemporaryDirectory() as folder, PrefixStore(loaded, folder, width=width, keep_free_bytes=0) as store:
        guard = MemoryGuard(loaded.weights_bytes + ceiling_bytes, meter=meter, clock=clock, interval=0.5)
        engine = Engine(loaded, guard=guard, policy=policy, prefixes=store)
        waiting = [request(loaded, name, length, answer) for name, length in zip("ABCDEFGH", prompts, strict=False)]
        ids = tuple(one.id for one in waiting)
        film = Film(ids, policy.pressure, ceiling_bytes, guard.capacity_bytes - loaded.weights_bytes)
        place, computed = dict.fromkeys(ids, "waiting"), dict.fromkeys(ids, 0)
        begin = time.perf_counter()
        while (waiting or not engine.idle) and step < limit:
            if waiting and step >= gap * (len(ids) - len(waiting)):
                engine.submit(waiting.pop(0))
            clock.time += 1.0
            for event in engine.step():
                _follow(event, step, film, place, computed)
            film.places.append(tuple(place[id] for id in ids))
            film.bytes.append(engine.cache_bytes)
            film.outside.append(outside(step))
            step += 1
        film.seconds = time.perf_counter() - begin
        film.lost_tokens += engine.memory()["costs"]["recomputed_tokens"]
        engine.close()
    return film


def _follow(event: Event, step: int, film: Film, place: dict[str, Place], computed: dict[str, int]) -> None:
    id = event.request
    if event.kind == "prefill":
        place[id], computed[id] = "prefill", event.done
    elif event.kind == "token":
        place[id], computed[id] = "decode", computed[id] + 1
        film.answers.setdefault(id, []).append(event.token)
    elif event.kind in AWAY:
        place[id] = event.kind
        film.moves.append((step, id, event.kind))
    elif event.kind == "resumed":
        place[id] = "prefill" if place[id] == "parked" else "decode"
        film.moves.append((step, id, "resumed"))
    elif event.kind == "finished":
        place[id] = "aborted" if event.reason == "error" else "finished"
        film.moves.append((step, id, place[id]))
        if event.reason == "error":
            film.lost_tokens += computed[id]


def as_record(film: Film) -> dict[str, Any]:
    """What a film comes to, JSON data."""
    return {
        "policy": film.policy,
        "finished": film.count("finished"),
        "aborted": film.count("aborted"),
        "parks": film.count("parked"),
        "pauses": film.count("paused"),
        "steps": len(film.places),
        "lost_tokens": film.lost_tokens,
    }
