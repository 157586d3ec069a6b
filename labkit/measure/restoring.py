"""Restoring a prefix against computing it: seconds of both, by the prefix's length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.engine.prefix import PrefixStore, Retention
from labkit.models import LoadedModel, Rows


@dataclass(frozen=True)
class Restored:
    """One length. Seconds are the best of the rounds: what the work takes undisturbed.

    Attributes:
        tokens: of the prefix.
        bytes: of its blocks and of the state at its end.
        prefill_seconds: computing it, chunk by chunk.
        memory_seconds: looking it up and restoring it from hot copies.
        disk_seconds: the same from files, read, checked and copied; the system's page cache has them.
        commit_seconds: what offering its blocks and states to the store added, in the thread that computes.
        between_seconds: computing it with commits in between, their own time left out: more than `prefill_seconds`
            where they leave something behind that the next chunk waits for. Once, as the commits.
    """

    tokens: int
    bytes: int
    prefill_seconds: float
    memory_seconds: float
    disk_seconds: float
    commit_seconds: float
    between_seconds: float

    @property
    def memory_ratio(self) -> float:
        """Prefill over restore from memory."""
        return self.prefill_seconds / self.memory_seconds

    @property
    def disk_ratio(self) -> float:
        """Prefill over restore from disk."""
        return self.prefill_seconds / self.disk_seconds

    def as_record(self) -> dict[str, Any]:
        """JSON data, ratios included."""
        return asdict(self) | {"memory_ratio": self.memory_ratio, "disk_ratio": self.disk_ratio}


def measure(
    loaded: LoadedModel,
    folder: Path,
    lengths: Sequence[int],
    *,
    width: int,
    rounds: int = 3,
    seconds: float | None = None,
    budget_bytes: int = 8 << 30,
) -> list[Restored]:
    """Compute one long prompt `rounds` times, store it once, restore its beginnings `rounds` times.

    Args:
        loaded: a model and its fingerprint.
        folder: a new one, for the store.
        lengths: multiples of `width`, in tokens.
        width: of blocks and chunks.
        seconds: for all of it, about: lengths that would take longer are left out.
        budget_bytes: for hot copies, states, the writer's queue and the folder, each.

    Raises:
        ValueError: a length that is no multiple of the width.
    """
    lengths = sorted(set(lengths))
    for length in lengths:
        if length < width or length % width:
            raise ValueError(f"a length of {length} tokens is no multiple of the block's {width}")
    tokens = [(7 + 5 * i * i) % min(loaded.model.vocab_size, 250) for i in range(lengths[-1])]
    sizes = dict.fromkeys(("memory_bytes", "disk_bytes", "queue_bytes"), budget_bytes)
    retention = Retention(budget_bytes=budget_bytes)
    with PrefixStore(loaded, folder, width=width, keep_free_bytes=0, retention=retention, **sizes) as store:
        _compute(loaded, tokens[:width], width)  # compiles
        # One pass tells how far the time reaches: it is computed once more for each round, and once to commit.
        limit = None if seconds is None else seconds / (rounds + 2)
        prefill, _ = _compute(loaded, tokens, width, limit=limit)
        lengths = [length for length in lengths if length in prefill]
        tokens = tokens[: lengths[-1]] if lengths else []
        for _ in range(rounds):
            again, _ = _compute(loaded, tokens, width)
            prefill = {length: min(prefill[length], again[length]) for length in lengths}
        between, committed = _compute(loaded, tokens, width, store)
        store.flush()
        memory = {length: _best(store, tokens[:length], rounds, cold=False) for length in lengths}
        disk = {length: _best(store, tokens[:length], rounds, cold=True) for length in lengths}
    return [Restored(n, disk[n][1], prefill[n], memory[n][0], disk[n][0], committed[n], between[n]) for n in lengths]


def _compute(
    loaded: LoadedModel,
    tokens: Sequence[int],
    width: int,
    store: PrefixStore | None = None,
    limit: float | None = None,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of computing, and of committing, up to each boundary; none is begun after `limit` seconds."""
    caches, computing, committing = loaded.model.make_caches(), 0.0, 0.0
    computed, committed = {}, {}
    for start in range(0, len(tokens), width):
        end, begin = start + width, time.perf_counter()
        chunk = mx.array([tokens[start:end]], dtype=mx.int32)
        loaded.model(chunk, caches, Rows.single(start), logits=None)
        mx.eval([cache.state for cache in caches])
        computing += time.perf_counter() - begin
        if store is not None:
            begin = time.perf_counter()
            store.commit(tokens[:end], caches)
            committing += time.perf_counter() - begin
        computed[end], committed[end] = computing, committing
        if limit is not None and computing > limit:
            break
    return computed, committed


def _best(store: PrefixStore, tokens: Sequence[int], rounds: int, *, cold: bool) -> tuple[float, int]:
    """Seconds of the fastest restore, and the bytes that it moved."""
    best, moved = float("inf"), 0
    for _ in range(rounds):
        if cold:
            store.release_memory()
        begin = time.perf_counter()
        lease = store.lookup(tokens)
        caches = lease.restore()
        mx.eval([cache.state for cache in caches])
        best = min(best, time.perf_counter() - begin)
        if lease.tokens != len(tokens):
            raise RuntimeError(f"{lease.tokens} of {len(tokens)} tokens came back: raise budget_bytes")
        moved = lease.nbytes
        lease.release()
    return best, moved
