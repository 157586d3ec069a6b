"""Rows that decode by a recording: their steps, and what these leave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.sampling import Choice
from labkit.kernels.recording import Recording

TOKEN, LOGPROB, COUNTERS = range(3)
"""What is carried from step to step before the model's memory."""


class Later:
    """Values of a step that the device may not have reached: `tolist` waits for it."""

    def __init__(self, step: Started, index: int, dtype: type):
        self._step, self._index, self._dtype = step, index, dtype

    def tolist(self) -> list:
        """The values, one a row."""
        return self._step.values()[self._index].view(self._dtype).tolist()


class Started:
    """One replayed step."""

    def __init__(self, recording: Recording, begun: Any):
        self._read: Callable[[], list[np.ndarray]] | None = lambda: recording.read(begun)
        self._values: list[np.ndarray] = []

    def values(self) -> list[np.ndarray]:
        """Wait for it: the rows' tokens and their log-probabilities, as bytes."""
        if self._read is not None:
            self._values, self._read = self._read(), None  # which holds the recording no longer
        return self._values

    def choice(self, rows: int) -> Choice:
        """As `choose` gives it, but that its arrays can only be read."""
        return Choice(Later(self, 0, np.uint32), Later(self, 1, np.float32), [None] * rows, [None] * rows, {})


class Replay:
    """Rows that are being replayed.

    Args:
        keep: lets the rows' caches take what so many steps have left. room: steps that there is room for.

    Attributes:
        nbytes: of the recording's arrays that the rows' caches hold meanwhile.
        last: whether the recording goes with it: the caches take its arrays instead of copies.
        left: steps until it must be closed.
        closed: whether it was, or has failed at that: the rows are lost then, since others may be in the recording.
    """

    def __init__(
        self, recording: Recording, keep: Callable[[list[mx.array], int], None], room: int, rows: int, nbytes: int
    ):
        self._recording, self._keep, self._rows = recording, keep, rows
        self._taken = 0
        self._last: Started | None = None
        self._before: Started | None = None
        self.nbytes, self.last = nbytes, False
        self.left, self.closed = room, False

    def launch(self) -> Choice:
        """Begin one step; nothing is waited for but the step before the last one.

        Raises:
            RuntimeError: it was closed.
        """
        self._check_open()
        if self._before is not None:
            self._before.values()  # its copies are about to be written anew
        self._before, self._last = self._last, Started(self._recording, self._recording.replay())
        self._taken, self.left = self._taken + 1, self.left - 1
        return self._last.choice(self._rows)

    def close(self) -> Choice | None:
        """Let the caches take what the last step left. Returns its token as arrays, or None if no step was taken.

        Raises:
            RuntimeError: it was closed.
        """
        self._check_open()
        self._wait()
        carried = self._recording.carried(last=self.last)
        self._keep(carried[COUNTERS + 1 :], self._taken)
        if self._last is None:
            return None
        rows = self._rows
        return Choice(carried[TOKEN], carried[LOGPROB], [None] * rows, [None] * rows, {})

    def discard(self) -> None:
        """Wait for the steps that were begun, so that their tokens can still be read; the rows' caches are given up."""
        if not self.closed:
            with contextlib.suppress(Exception):  # whoever reads its tokens is told why a step has failed
                self._wait()

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the machine failed while these rows were replayed: what their caches hold is older")

    def _wait(self) -> None:
        self.closed = True
        try:
            for started in (self._before, self._last):
                if started is not None:
                    started.values()
        finally:
            self._recording.close()
