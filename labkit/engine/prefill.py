"""Prompts that are being computed, chunk by chunk, and the caches that they fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from labkit import devices
from labkit.caches import Cache
from labkit.engine.batch import DecodingBatch, Operation, merged
from labkit.engine.events import Event
from labkit.engine.followers import Followers
from labkit.engine.hooks import PrefixStore
from labkit.engine.paging import Paging
from labkit.engine.scheduler import Prompt
from labkit.engine.session import Session
from labkit.kernels.targets import device_target
from labkit.models import Model, Rows


class Prefill:
    """Each prompt has serial caches of its own until its last chunk; prompts that share a forward are merged for it.

    Args:
        model: the model.
        grid: tokens between the boundaries where states are handed on and stored.
        pack: whether prompts may share a forward, if the model masks padding on the right.
        operations: where it is written down what was done to caches.
        prefixes: where states come from and go to, if there is such a store.
        paging: where caches come from, if they lie in pools.

    Attributes:
        sessions: the requests, the first in line first.
        after: what was done to caches after the last forward; the next record tells it.
    """

    def __init__(
        self,
        model: Model,
        *,
        grid: int,
        pack: bool,
        operations: list[Operation],
        prefixes: PrefixStore | None = None,
        paging: Paging | None = None,
    ):
        self.sessions: list[Session] = []
        self.after: list[Operation] = []
        self._model, self._grid, self._pack = model, grid, pack
        self._operations, self._prefixes, self._paging = operations, prefixes, paging
        self._caches: dict[str, list[Cache]] = {}
        self._followers = Followers(grid)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for caches in self._caches.values() for cache in caches)

    def views(self) -> list[Prompt]:
        """The prompts as the scheduler sees them."""
        self._followers.update(self.sessions)
        if self._pack and len(self.sessions) > 1:
            self._pack = masks_padding(self._model)
        return [
            Prompt(
                session.id,
                session.prefilled,
                session.to_prefill,
                follows=self._followers.follows(session),
                alone=not self._pack or self._is_kept(session),
            )
            for session in self.sessions
        ]

    def _is_kept(self, session: Session) -> bool:
        """Whether a prompt's last state is stored, which is done with caches of the serial classes."""
        if self._prefixes is None:
            return False
        return self._prefixes.tail or session.to_prefill % self._grid == 0

    def start(self, session: Session) -> list[DecodingBatch]:
        """Begin with a request, from the longest stored prefix of its prompt or from nothing.

        Returns:
            The row, if there is nothing to compute before it decodes.
        """
        session.start()
        caches = self._restored(session)
        if caches is None:
            caches = self._new(session)
        self._caches[session.id] = caches
        self.sessions.append(session)
        return self._ready()

    def _new(self, session: Session) -> list[Cache]:
        caches, shared = (self._model.make_caches(), 0) if self._paging is None else self._paging.begin(session)
        if shared:
            session.restored(shared, _widths([], shared, self._grid))
            self._operations.append(("restore", session.id, shared))
        else:
            self._operations.append(("new", session.id))
        return caches

    def _restored(self, session: Session) -> list[Cache] | None:
        prompt = session.known[: session.to_prefill]
        if self._prefixes is None or not prompt:
            return None
        # What it computed before a park, in smaller chunks where memory was short, is found by their widths.
        extra = session.request.extra
        lease = self._prefixes.lookup(prompt, extra=extra, chunks=session.chunks)
        if lease is None and session.chunks:
            session.chunks.clear()
            lease = self._prefixes.lookup(prompt, extra=extra)
        if lease is None:
            return None
        try:
            caches = lease.restore()
        finally:
            lease.release()
        session.restored(lease.tokens, _widths(session.chunks, lease.tokens, self._grid))
        self._operations.append(("restore", session.id, lease.tokens))
        return caches if self._paging is None else self._paging.take(session, caches)

    def drop(self, session: Session) -> None:
        """Let go of a request."""
        for cache in self._caches.pop(session.id, ()):
            cache.release()
        if session in self.sessions:
            self.sessions.remove(session)

    # -- one step ------------------------------------------------------------------------------------------------------

    def run(
        self, sessions: Sequence[Session], spans: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[Session, Event]], dict[str, Any], list[DecodingBatch]]:
        """One forward for these prompts' next chunks.

        Returns:
            Their events; what the step's record says; the rows that are ready to decode.
        """
        pieces = [session.known[start:end] for session, (start, end) in zip(sessions, spans, strict=True)]
        if len(sessions) == 1:
            self._run_alone(sessions[0], pieces[0], spans[0][0])
            events = [(sessions[0], sessions[0].computed(spans[0][1]))]
            self._hand_on(sessions[0], self._caches[sessions[0].id])
            ready = self._ready()
        else:
            batch = self._run_together(sessions, pieces)
            events = [(session, session.computed(end)) for session, (_, end) in zip(sessions, spans, strict=True)]
            for row, session in enumerate(sessions):
                self._hand_on(session, batch.caches, row)
                self.sessions.remove(session)
            ready = [batch, *self._ready()]
        plan = {
            "kind": "prefill",
            "rows": tuple(session.id for session in sessions),
            "shape": (len(sessions), max(map(len, pieces))),
            "positions": tuple(start for start, _ in spans),
            "lengths": tuple(map(len, pieces)),
            "inputs": tuple(pieces),
            "chunk": spans[0] if len(sessions) == 1 else None,
        }
        return events, plan, ready

    def _run_alone(self, session: Session, tokens: tuple[int, ...], start: int) -> None:
        caches = self._caches[session.id]
        self._model(mx.array([tokens], dtype=mx.int32), caches, Rows.single(start), logits=None)
        _settle(caches)

    def _run_together(self, sessions: Sequence[Session], pieces: Sequence[tuple[int, ...]]) -> DecodingBatch:
        """The last chunks of several prompts in one forward, padded on the right."""
        caches = merged([self._caches.pop(session.id) for session in sessions])
        self._operations.append(("merge", tuple(session.id for session in sessions)))
        lengths = [len(piece) for piece in pieces]
        tokens = mx.array([[*piece, *[0] * (max(lengths) - len(piece))] for piece in pieces], dtype=mx.int32)
        unequal = len(set(lengths)) > 1
        rows = Rows.batch([session.prefilled for session in sessions], lengths=lengths if unequal else None)
        self._model(tokens, caches, rows, logits=None)
        _settle(caches)
        return DecodingBatch.prefilled(self._model, sessions, caches)

    def _hand_on(self, leader: Session, caches: list[Cache], row: int | None = None) -> None:
        """Give the state to the prompts that wait for it, and to the store."""
        waiting = self._followers.arrived(leader)
        for session in self.sessions:
            if session.id in waiting:
                own = [cache.copy() if row is None else cache.extract(row) for cache in caches]
                for cache in self._caches[session.id]:
                    cache.release()
                self._caches[session.id] = own if self._paging is None else self._paging.take(session, own)
                session.restored(leader.prefilled, leader.chunks)
                self.after.append(("copy", session.id, leader.id))
        left = leader.to_prefill - leader.prefilled
        tail = self._prefixes is not None and self._prefixes.tail and left == 0
        if row is None and self._prefixes is not None and (leader.prefilled % self._grid == 0 or tail):
            tokens = leader.known[: leader.prefilled]
            extra, last = leader.request.extra, left < self._grid
            self._prefixes.commit(tokens, caches, extra=extra, chunks=leader.chunks, last=last)

    def _ready(self) -> list[DecodingBatch]:
        """Prompts that are computed but for the last token become rows."""
        ready = [session for session in self.sessions if session.prefilled == session.to_prefill]
        self.sessions = [session for session in self.sessions if session not in ready]
        return [DecodingBatch.prefilled(self._model, [session], self._caches.pop(session.id)) for session in ready]


_MASKS: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


def masks_padding(model: Model) -> bool:
    """Whether padding on the right leaves a row's state as it is. Found by trying, once a model: a row of one token
    beside one of nine must continue as it does alone. Some state-space models take any mask, and let every column
    through."""
    if model not in _MASKS:
        _MASKS[model] = _masks_padding(model)
    return _MASKS[model]


def _masks_padding(model: Model) -> bool:
    tokens = mx.arange(18).reshape(2, 9) % model.vocab_size
    lengths, after = [9, 1], mx.zeros((2, 1), mx.int32)
    caches = model.make_caches(2)
    model(tokens, caches, Rows.batch([0, 0], lengths=lengths), logits=None)
    together = model(after, caches, Rows.batch(lengths)).logits[1].astype(mx.float32)
    caches = model.make_caches()
    model(tokens[1:, :1], caches, Rows.single(), logits=None)
    alone = model(after[1:], caches, Rows.single(1)).logits[0].astype(mx.float32)
    rounding = 1e-3 if model.dtype == mx.float32 else 5e-2
    return mx.max(mx.abs(together - alone)).item() <= rounding * mx.max(mx.abs(alone)).item()


def _widths(chunks: Sequence[int], tokens: int, grid: int) -> list[int]:
    """In what widths the first `tokens` tokens were computed: in `chunks` as far as they go, then in whole cells."""
    widths, filled = [], 0
    for chunk in chunks:
        if filled + chunk <= tokens:
            widths.append(chunk)
            filled += chunk
    while filled < tokens:
        widths.append(min(grid - filled % grid, tokens - filled))
        filled += widths[-1]
    return widths


POOL_SHARE = 1 / 32
"""Of a GPU's working set, that MLX may keep for the next chunk."""


def _settle(caches: Sequence[Cache]) -> None:
    """Wait for a chunk, so that its intermediate arrays are gone before the next one makes its own.

    On a GPU their memory is taken again by the next chunk, which would have the driver map all of it anew, up to a
    gigabyte; but buffers that have grown leave ever larger old ones behind, which are never reused.
    """
    mx.eval([cache.state for cache in caches])
    if device_target() is None or mx.get_cache_memory() > POOL_SHARE * devices.this_device().working_set_bytes:
        mx.clear_cache()
