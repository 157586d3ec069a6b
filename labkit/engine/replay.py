"""Who decodes by a recording: where recordings can be replayed, one graph a token instead of hundreds of launches.

Rows that stay together for a few steps are recorded once (`labkit.kernels.recording`): forward, draw and counters. From
then on a step is one launch, and MLX has no part in it. Their caches hold stale arrays meanwhile; whoever wants the
caches asks for them first, and gets what the last step left (`Replay.close`).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.kernel_draws import columns_of
from labkit.engine.replayed import COUNTERS, LOGPROB, TOKEN, Replay
from labkit.engine.sampling import RowSampler
from labkit.kernels.recording import Machine, Moved, NoRoom, Recording, count_on, record
from labkit.kernels.sampling import sample
from labkit.models import Model, Rows
from labkit.models.decode_step import DecodeStep

QUIET, PATIENCE = 2, 24
"""Steps that the same rows take by MLX before they are replayed, where a recording of their form is there, and where
one must be made, which costs some 0.1 s: rows that come and go at every step never are."""

FEWEST = 8
"""Tokens that must be to come: opening copies the rows' states."""

KEPT = 512 << 20
"""Bytes of a recording that stays while nobody decodes."""


class Replays:
    """Who may be replayed, and the one recording that is kept.

    Args:
        model: the model. machine: where to replay; None: nowhere.
        patience: `PATIENCE`, or another number of steps.

    Attributes:
        refused: why the rows of a form are not replayed, by the form; () for none, where the machine has failed.
        recorded: recordings made. seconds: that they took.
    """

    def __init__(self, model: Model, machine: Machine | None, *, patience: int = PATIENCE):
        self._model, self._machine, self._patience = model, machine, patience
        self._recording: Recording | None = None
        self._form: tuple | None = None
        self._failures: list[str] = []  # of recordings that were made, those that are gone too
        self._asked: tuple = ()
        self._count = 0
        self._never: tuple | None = None
        self._opened_last: Callable[[], Replay | None] = lambda: None
        self.refused: dict[tuple, str] = {}
        self.recorded, self.seconds = 0, 0.0

    @property
    def here(self) -> bool:
        """Whether any rows may be replayed."""
        return self._machine is not None and hasattr(self._model, "decode_step")

    @property
    def nbytes(self) -> int:
        """Bytes of the recording that is kept."""
        return 0 if self._recording is None else self._recording.nbytes

    def idle(self) -> None:
        """Nobody decodes: a large recording goes."""
        if self.nbytes > KEPT:
            self._recording = self._form = None

    @property
    def unused(self) -> bool:
        """Whether no rows are in it."""
        last = self._opened_last()
        return last is None or last.closed

    @property
    def owed(self) -> int:
        """Bytes that the rows in it take when they come back."""
        return 0 if self.unused else self._opened_last().nbytes

    def spare(self) -> None:
        """The recording goes; if rows are in it, when they come back, without taking more memory for that."""
        if not self.unused:
            self._opened_last().last = True
        self._recording = self._form = None

    def _give_up(self) -> None:
        """The machine has failed in the middle, and rows ended for it: the others are left to MLX."""
        self.refused[self._form or ()] = self._failures[0]
        self._recording = self._form = self._machine = None

    def open(
        self,
        who: tuple,
        caches: list[Cache],
        samplers: Sequence[RowSampler],
        fed: Sequence[int],
        chosen: Sequence[int],
        token: mx.array,
        tokens: int,
        room: Callable[[], int | None] = lambda: None,
    ) -> Replay | None:
        """Replay these rows from now on, or None if they are not to be.

        Args:
            who: the rows' names: they must have asked `QUIET` times in a row.
            caches, samplers: theirs. fed: tokens in the caches. chosen: tokens drawn.
            token: what they feed next, uint32 [B].
            tokens: that the longest of them may still be given.
            room: bytes that a recording may take, asked if one must be made; None: any number.
        """
        if not self.here:
            return None
        if self._failures:
            self._give_up()
            return None
        if not self.unused:
            return None  # other rows' states are in the recording
        if who != self._asked:
            self._asked, self._count = who, 0
        self._count += 1
        options = [sampler.for_kernels for sampler in samplers]
        if self._count <= QUIET or tokens < FEWEST or self._never == who or None in options:
            return None
        if self._count <= self._patience and (self._form is None or self._form[TOKEN][0] != (len(who),)):
            return None  # another form: nothing is made ready for it
        step = self._model.decode_step(caches, Rows.batch(list(fed)), fed, tokens)
        if step is None:
            self._never = who
        if step is None or step.room < FEWEST:
            return None
        return self._opened(who, step, columns_of(tuple(options)), chosen, token, room)

    def _opened(
        self,
        who: tuple,
        step: DecodeStep,
        options: dict[str, mx.array],
        chosen: Sequence[int],
        token: mx.array,
        room: Callable[[], int | None],
    ) -> Replay | None:
        rows, by = len(chosen), _counters((*step.by, *(1,) * len(chosen)))
        carried = [
            token.astype(mx.uint32), mx.zeros((rows,), mx.float32), _counters((*step.counters, *chosen)), *step.memory
        ]  # fmt: skip
        given = [*options.values(), *step.given]
        form = tuple((array.shape, array.dtype) for array in (*carried, *given))
        if form in self.refused:
            self._never = who
            return None
        if form != self._form and self._count <= self._patience:
            return None
        mx.eval(carried, given, by)
        try:
            own = self._own(form, step, options, carried, given, by, room)
        except NoRoom:
            self._count = 0  # they ask again after as many steps
            return None
        except Exception as reason:  # whatever it is, MLX computes the rows as before
            self.refused[form] = f"{type(reason).__name__}: {reason}"
            self._recording = self._form = None
            self._failures.clear()  # nobody was in it
            return None
        step.keep(own[COUNTERS + 1 :], 0)
        # Not the step itself: it holds the states that the rows began with.
        lent = sum(array.nbytes for array in own[COUNTERS + 1 :])
        replay = Replay(self._recording, step.keep, step.room, rows, lent)
        self._opened_last = weakref.ref(replay)
        return replay

    def _own(
        self,
        form: tuple,
        step: DecodeStep,
        options: dict[str, mx.array],
        carried: list[mx.array],
        given: list[mx.array],
        by: mx.array,
        room: Callable[[], int | None],
    ) -> list[mx.array]:
        """The recording's arrays with the values of `carried`, after recording anew if need be."""
        if form == self._form:
            with contextlib.suppress(Moved):
                return self._recording.open(carried, given)
        self._recording = self._form = None  # its memory first
        self._recording, self._form = self._record(step, options, carried, given, by, room()), form
        return self._recording.open(carried, given)

    def _record(
        self,
        step: DecodeStep,
        options: dict[str, mx.array],
        carried: list[mx.array],
        given: list[mx.array],
        by: mx.array,
        room: int | None,
    ) -> Recording:
        names, counted, rows = list(options), len(step.counters), carried[TOKEN].size
        kept = {"room": room, "failures": self._failures}

        def whole(carried: list[mx.array], given: list[mx.array]) -> list[mx.array]:
            token, _, counters, *memory = carried
            logits, memory = step.compute(token[:, None], counters[:counted], given[len(names) :], memory)
            draw = dict(zip(names, given, strict=False))
            number = counters[counted : counted + rows].view(mx.uint32)
            token, logprob = sample(logits.reshape(rows, -1), step=number, **draw)
            return [token, logprob, count_on(counters, by), *memory]

        begin = time.perf_counter()
        recording = record(whole, carried, given, self._machine, reads=(TOKEN, LOGPROB), **kept)
        self.recorded, self.seconds = self.recorded + 1, self.seconds + time.perf_counter() - begin
        return recording


def _counters(numbers: Sequence[int]) -> mx.array:
    return mx.array(list(numbers), dtype=mx.int32)
