"""One row that decodes greedily by the fastest direct loop: what the engine does for it, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.params import SamplingParams
from labkit.engine.replay import Replays
from labkit.engine.replayed import Replay
from labkit.engine.sampling import Choice, RowSampler, choose
from labkit.models.contract import Model
from labkit.models.rows import Rows

MANY = 1 << 20
"""Tokens that the row may still want: it never says that it ends."""


class DirectRow:
    """A row between two steps; each step feeds the token that the last one chose, unread.

    Args:
        caches: filled up to `position`.
        replays: by which it is replayed after a few steps; None: never.
    """

    def __init__(self, model: Model, caches: list[Cache], position: int, replays: Replays | None = None):
        self._model, self._caches, self._position, self._replays = model, caches, position, replays
        self._sampler, self._step = RowSampler(SamplingParams(temperature=0.0), 0), 0
        self._replay: Replay | None = None

    @property
    def replayed(self) -> bool:
        """Whether the last step was."""
        return self._replay is not None

    def build(self, pending: Choice) -> Choice:
        """The next step, built but not begun, unless it is replayed, which begins it."""
        if self._replay is not None and not self._replay.left:
            pending, self._replay = self._replay.close(), None
        position, step = self._position + self._step, self._step
        self._step += 1
        if self._replay is None and self._replays is not None:
            rows = [self._sampler], [position], [step]
            self._replay = self._replays.open((id(self),), self._caches, *rows, pending.token, MANY)
        if self._replay is not None:
            return self._replay.launch()
        fed = pending.token
        output = self._model(fed[:, None], self._caches, Rows.single(position), logits="last")
        return choose(output.logits[:, -1, :], fed, [self._sampler], [step], [None])

    def begin(self, choice: Choice) -> None:
        """Send what `build` built to the device."""
        if self._replay is None:
            mx.async_eval(choice.arrays())

    def tokens(self, token: int) -> Iterator[int]:
        """Feed a token, then what follows: tokens as the host reads them, the next one on its way before."""
        pending = self._next(Choice.given([token]))
        while True:
            following = self._next(pending)
            yield pending.token.tolist()[0]
            pending = following

    def _next(self, pending: Choice) -> Choice:
        choice = self.build(pending)
        self.begin(choice)
        return choice
