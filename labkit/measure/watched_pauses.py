"""A row that is paused where one likes, with the logits that each of its tokens was chosen from."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from labkit.engine import Engine, Event, MemoryGuard, Policy, Request, SamplingParams, batch
from labkit.engine.memory import FakeClock, FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.models import LoadedModel

CEILING = 1 << 40


class Watched:
    """One run of one request, on an engine and a store of its own.

    The meter reads tight as soon as the answer has an offset's tokens, and calm once the row has gone; the policy has
    no patience, so that even the only row is put aside.

    Args:
        loaded: the model.
        tokens, params: the request.
        pauses: after how many tokens of the answer it is paused.
        width: tokens of a block and of a chunk.
        extra: a request that runs beside it.

    Attributes:
        events: of all requests.
        logits: for each step, what its token was chosen from, float32 [V], once for each time that it was chosen.
        stored: the arguments of each call that stored a paused row.
        log: the engine's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: Sequence[int],
        params: SamplingParams,
        pauses: Sequence[int] = (),
        *,
        width: int,
        extra: Request | None = None,
    ):
        self.events: list[Event] = []
        self.logits: dict[int, list[np.ndarray]] = {}
        self.stored: list[tuple[tuple, dict[str, Any]]] = []
        choose, pauses = batch.choose, list(pauses)

        def spy(scores: mx.array, fed: mx.array, samplers: Sequence[Any], steps: Sequence[int], masks: Any) -> Any:
            for row, (sampler, step) in enumerate(zip(samplers, steps, strict=True)):
                if sampler.params is params:
                    self.logits.setdefault(step, []).append(np.array(scores[row].astype(mx.float32)))
            return choose(scores, fed, samplers, steps, masks)

        meter = FakeMeter(1 << 50, loaded.weights_bytes)
        guard = MemoryGuard(CEILING, meter=meter, clock=FakeClock(), interval=0)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(batch, "choose", spy),
            mock.patch.object(batch, "likeliest", return_value=None),  # the same tokens, behind the spy's back
            PrefixStore(loaded, folder, width=width, keep_free_bytes=0) as store,
        ):
            save = store.save_private
            store.save_private = lambda *a, **o: (self.stored.append((a, o)), save(*a, **o))[1]
            engine = Engine(loaded, guard=guard, policy=Policy(patience=0), prefixes=store)
            self.id = engine.submit(Request(tokens, params))
            if extra is not None:
                engine.submit(extra)
            while not engine.idle:
                due = pauses and len(self.tokens) >= pauses[0] and self.count("paused") == self.count("resumed")
                meter.live = int(0.97 * CEILING) if due else loaded.weights_bytes
                before = self.count("paused")
                self.events += engine.step()
                if self.count("paused") > before:
                    pauses.pop(0)
            self.log = engine.log
            engine.close()

    @property
    def mine(self) -> list[Event]:
        """The request's own events."""
        return [event for event in self.events if event.request == self.id]

    @property
    def tokens(self) -> list[int]:
        """What its reader was given."""
        return [event.token for event in self.mine if event.kind == "token"]

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(event.text for event in self.mine)

    def count(self, kind: str) -> int:
        """Its events of a kind."""
        return sum(event.kind == kind for event in self.mine)
