"""Rows that decode together, over one set of caches: who joins, who leaves, one forward for all of them.

A row alone keeps caches of the serial classes: nothing is copied, padded or masked for its sake, and its bits are
those of an engine that never batches. The second row merges the two; later ones are appended; rows that leave are
filtered out, and the last one standing gets serial caches again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.caches import Cache
from labkit.engine.at_once import likeliest
from labkit.engine.replay import Replays
from labkit.engine.replayed import Replay
from labkit.engine.sampling import Choice, choose
from labkit.engine.session import Session
from labkit.models import Model, Rows

Operation = tuple[Any, ...]


class DecodingBatch:
    """Some rows, their caches and the token that each of them feeds next.

    A row that waits to join, or that is parked, is a batch of its own; so joining takes batches and leaving gives one.

    Attributes:
        sessions: the rows, in order.
        pending: what each row feeds next: the token it has chosen, unread, or its prompt's last.
    """

    def __init__(self, model: Model, sessions: Sequence[Session], caches: list[Cache], pending: Choice):
        self._model = model
        self._replay: Replay | None = None
        self.sessions, self._caches, self.pending = list(sessions), caches, pending

    @classmethod
    def empty(cls, model: Model) -> DecodingBatch:
        """Without rows."""
        return cls(model, [], [], Choice.given(()))

    @classmethod
    def prefilled(cls, model: Model, sessions: Sequence[Session], caches: list[Cache]) -> DecodingBatch:
        """Rows whose caches hold their prompts but for the last token."""
        last = [session.token_at(session.to_prefill) for session in sessions]
        return cls(model, sessions, caches, Choice.given(last))

    def __len__(self) -> int:
        return len(self.sessions)

    @property
    def caches(self) -> list[Cache]:
        """One a layer, serial for one row that stands alone, else batched; empty without rows. Rows that are replayed
        come back first."""
        self.come_back()
        return self._caches

    @property
    def ids(self) -> tuple[str, ...]:
        """The rows' requests."""
        return tuple(session.id for session in self.sessions)

    @property
    def batched(self) -> bool:
        """Whether the caches are of the batched classes."""
        return any(cache.batched for cache in self._caches) or len(self) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, but for what they have of a recording."""
        lent = 0 if self._replay is None else self._replay.nbytes
        return sum(cache.nbytes for cache in self._caches) - lent

    # -- rows come and go ----------------------------------------------------------------------------------------------

    def join(self, *others: DecodingBatch) -> list[Operation]:
        """Take over the rows of `others`, which are empty afterwards; returns what was done to the caches."""
        parts = [part for part in (self, *others) if len(part)]
        if parts in ([], [self]):
            return []
        operations: list[Operation] = []
        whole: tuple[tuple[str, ...], list[Cache]] | None = None
        for batched, some in groupby(parts, key=lambda part: part.batched):
            group = list(some)
            # Rows that stand alone are merged at once; one by one, each would copy all that came before it.
            if not batched and (len(group) > 1 or (whole is None and len(parts) > 1)):
                pieces = [_merged(group, operations)]
            else:
                pieces = [(part.ids, part.caches) for part in group]
            for ids, caches in pieces:
                if whole is None:
                    whole = ids, caches
                    continue
                operations.append(("extend", whole[0], ids))
                for mine, theirs in zip(whole[1], caches, strict=True):
                    mine.extend(theirs)
                    theirs.release()
                whole = (*whole[0], *ids), whole[1]
        pending = parts[0].pending
        for part in parts[1:]:
            pending = pending + part.pending
        sessions = [session for part in parts for session in part.sessions]
        for part in others:
            part._clear()
        self.sessions, self._caches, self.pending = sessions, whole[1], pending
        return operations

    def keep(self, sessions: Sequence[Session]) -> list[Operation]:
        """Drop all rows but these."""
        if len(sessions) == len(self):
            return []
        before, kept = self.ids, {id(session) for session in sessions}
        rows = [row for row, session in enumerate(self.sessions) if id(session) in kept]
        if not rows:
            self.release()
            return [("filter", before, ())]
        for cache in self.caches:
            cache.filter(rows)
        self.sessions = [self.sessions[row] for row in rows]
        self.pending = self.pending.take(rows)
        return [("filter", before, self.ids)]

    def settle(self) -> list[Operation]:
        """Give a row that is left alone caches of the serial classes."""
        if len(self) != 1 or not self.batched:
            return []
        batched, self._caches = self.caches, [cache.extract(0) for cache in self.caches]
        for cache in batched:
            cache.release()
        return [("extract", self.ids, self.ids[0])]

    def leave(self, session: Session) -> tuple[DecodingBatch, list[Operation]]:
        """Take one row out, with serial caches of its own and its pending token, so that it may join again later."""
        row = self.sessions.index(session)
        if not self.batched:
            caches = self.caches
            alone, operations = DecodingBatch(self._model, [session], caches, self.pending), []
            self._clear()
            return alone, operations
        caches = [cache.extract(row) for cache in self.caches]
        mx.eval([cache.state for cache in caches])  # unevaluated, they would keep the whole batch alive
        operations = [("extract", self.ids, session.id)]
        alone = DecodingBatch(self._model, [session], caches, self.pending.take([row]))
        operations += self.keep([other for other in self.sessions if other is not session])
        return alone, operations

    def release(self) -> None:
        """Give back what the caches hold of shared pools, and forget the rows."""
        for cache in self._caches:
            cache.release()
        self._clear()

    def _clear(self) -> None:
        replay, self._replay = self._replay, None
        self.sessions, self._caches, self.pending = [], [], Choice.given(())
        if replay is not None:
            replay.discard()

    def come_back(self) -> None:
        """If the rows are replayed: let their caches and the pending token be what the last step left. Where that
        fails, it does for good: nobody decodes from stale caches."""
        if self._replay is not None:
            self.pending = self._replay.close() or self.pending
            self._replay = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def launch(
        self,
        masks: Sequence[mx.array | None],
        replays: Replays | None = None,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Feed the pending tokens; the next ones are chosen, and pending. Nothing is waited for.

        Args:
            masks: permitted tokens of each row as bits, uint32 [ceil(V / 32)], or None.
            replays: by which rows may be replayed that stay as they are.
            room: bytes that a recording may take; None: any number.
        """
        if self._replayed(masks, replays, room):
            self.pending = self._replay.launch()
        else:
            self._compute(masks)
        for session in self.sessions:
            session.launched()

    def _compute(self, masks: Sequence[mx.array | None]) -> None:
        caches, fed = self.caches, self.pending.token
        rows = Rows.batch([session.fed for session in self.sessions])
        eager = getattr(self._model, "eager", False)
        tokens = mx.array(np.asarray(fed)[:, None]) if eager else fed[:, None]
        logits = self._model(tokens, caches, rows, logits="last").logits
        samplers = [session.sampler for session in self.sessions]
        chosen = likeliest(logits, samplers, masks) if eager else None
        if chosen is None:
            steps = [session.chosen for session in self.sessions]
            chosen = choose(logits[:, -1, :], fed, samplers, steps, masks)
            mx.async_eval(chosen.arrays())
        self.pending = chosen

    def _replayed(
        self, masks: Sequence[mx.array | None], replays: Replays | None, room: Callable[[], int | None]
    ) -> bool:
        """Whether the next step is a replayed one."""
        if replays is None or not replays.here or any(mask is not None for mask in masks):
            return False
        if self._replay is not None and not self._replay.left:
            self.come_back()
        if self._replay is None:
            sessions = self.sessions
            self._replay = replays.open(
                self.ids,
                self._caches,
                [session.sampler for session in sessions],
                [session.fed for session in sessions],
                [session.chosen for session in sessions],
                self.pending.token,
                # No more columns than the longest may come to have: where it leaves, those before the others go.
                max(session.total for session in sessions) - 1 - max(session.fed for session in sessions),
                room,
            )
        return self._replay is not None


def _merged(parts: Sequence[DecodingBatch], operations: list[Operation]) -> tuple[tuple[str, ...], list[Cache]]:
    """Rows that stand alone -> their ids, and one batched cache a layer."""
    ids = tuple(id for part in parts for id in part.ids)
    operations.append(("merge", ids))
    return ids, merged([part.caches for part in parts])


def merged(rows: Sequence[list[Cache]]) -> list[Cache]:
    """Serial caches of several rows -> one batched cache a layer; the serial ones are given up."""
    layers = list(zip(*rows, strict=True))
    result = [type(layer[0]).merge(layer) for layer in layers]
    for layer in layers:
        for cache in layer:
            cache.release()
    return result
