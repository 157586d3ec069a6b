"""Shared prefixes: how a prompt's blocks are stored, and how the newest whole one is found."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from labkit.caches import Cache
from labkit.caches.extra_keys import ExtraKeys
from labkit.engine.prefix.chains import Chains
from labkit.engine.prefix.codec import Codec
from labkit.engine.prefix.counts import Counts
from labkit.engine.prefix.lease import Lease, Leases
from labkit.engine.prefix.record import name_of
from labkit.engine.prefix.retention import Retention
from labkit.engine.prefix.tiers import Tiers
from labkit.engine.prefix.tree import Tree


class Committed(NamedTuple):
    """Whether a state can be had again from the store, and what happened: "stored", "present" (it was there),
    "without_state" (the policy keeps none at this boundary), or why it was refused."""

    stored: bool
    reason: str


class SharedPrefixes:
    """Chains of blocks that any prompt may go on from.

    Args:
        tiers, codec, chains, counts: the store's.
        width: tokens of a block.
        retention: which boundaries keep states.
        tail: whether what is behind a prompt's last whole block is kept too.
        leases: makes leases.
        lock: guards `tree`.

    Attributes:
        tree: the blocks that are known.
    """

    def __init__(
        self,
        tiers: Tiers,
        codec: Codec,
        chains: Chains,
        counts: Counts,
        *,
        tree: Tree,
        width: int,
        retention: Retention,
        tail: bool,
        leases: Leases,
        lock: threading.RLock,
    ):
        self._tiers, self._codec, self._chains, self._counts = tiers, codec, chains, counts
        self._width, self._retention, self._tail, self._leases, self._lock = width, retention, tail, leases, lock
        self.tree = tree

    def commit(
        self, tokens: Sequence[int], caches: Sequence[Cache], extra: ExtraKeys, chunks: Sequence[int], last: bool
    ) -> Committed:
        """See `PrefixStore.commit`."""
        if not tokens or (len(tokens) % self._width and not self._tail):
            return Committed(False, "off_boundary")
        if (objection := self._codec.objection(caches, len(tokens))) is not None:
            return Committed(False, objection)
        keys = self._chains.keys(tokens, extra, chunks)
        with self._lock:
            node = self.tree.add(keys, self._chains.root)
        names = self._chains.columns(keys)
        missing = [index for index, name in enumerate(names) if not self._tiers.kept(name)]
        if (refusal := self._keep_columns(keys, missing, caches)) is not None:
            return Committed(False, refusal)
        if len(tokens) % self._width:
            return self._keep_tail(tokens, caches, keys, self._chains.tail_key(tokens, extra, keys, chunks))
        if not self._codec.whole:
            return Committed(True, "stored" if missing else "present")
        if self._tiers.kept(name_of(keys[-1], "state")):
            self._tiers.touch([name_of(keys[-1], "state")])
            return Committed(True, "present")
        if not self._retention.takes(node.depth, last=last, branching=node.forked or len(node.children) > 1):
            return Committed(True, "without_state")
        return self._keep_state(keys, caches)

    def _keep_columns(self, keys: list[str], missing: list[int], caches: Sequence[Cache]) -> str | None:
        """The blocks of a chain that are not kept yet, and those that were lost; why not, or None."""
        names = self._chains.columns(keys)
        for index in missing:
            start, end = index * self._width, (index + 1) * self._width
            record = self._chains.record(keys, index, "columns", self._codec.columns(caches, start, end), {})
            if (refusal := self._tiers.put(names[index], record, protect=names)) is not None:
                return refusal
        self._tiers.touch(names)
        return None

    def _keep_state(self, keys: list[str], caches: Sequence[Cache]) -> Committed:
        tensors, scalars = self._codec.state(caches)
        record = self._chains.record(keys, len(keys) - 1, "state", tensors, scalars)
        if record.nbytes > self._retention.budget_bytes:
            return Committed(False, "state_over_budget")
        name = name_of(keys[-1], "state")
        with self._lock:  # before the writer can say that it failed
            if (node := self.tree.get(keys[-1])) is None:  # as it has of the block's columns
                return Committed(False, "not_written")
            node.state_bytes = record.nbytes
        if (refusal := self._tiers.put(name, record, protect=self._chains.columns(keys))) is not None:
            node.state_bytes = 0
            return Committed(False, refusal)
        with self._lock:
            surplus = []
            if self.tree.state_bytes > self._retention.budget_bytes:
                kept = self.tree.snapshots()
                held = {s.key for s in kept if self._tiers.is_pinned(name_of(s.key, "state"))}
                surplus = self._retention.surplus(kept, {keys[-1], *held})
            for key in surplus:
                self.tree.get(key).state_bytes = 0
        for key in surplus:
            self._counts.add("states_thinned")
            self._tiers.drop(name_of(key, "state"), after=name)
        return Committed(True, "stored")

    def _keep_tail(self, tokens: Sequence[int], caches: Sequence[Cache], keys: list[str], key: str) -> Committed:
        if self._tiers.kept(name_of(key, "tail")):
            return Committed(True, "present")
        tensors, scalars = self._codec.both(caches, len(keys) * self._width, len(tokens))
        record = self._chains.record([*keys, key], len(keys), "tail", tensors, scalars)
        refusal = self._tiers.put(name_of(key, "tail"), record, protect=self._chains.columns(keys))
        return Committed(refusal is None, refusal or "stored")

    # -- finding -------------------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], extra: ExtraKeys, chunks: Sequence[int]) -> Lease | None:
        """Walk back to the newest block that is there and sound in every layer."""
        keys = self._chains.keys(tokens, extra, chunks)
        if self._tail and len(tokens) % self._width:
            lease = self._whole_with_tail(len(tokens), keys, self._chains.tail_key(tokens, extra, keys, chunks))
            if lease is not None:
                return lease
        matched = self._matched(keys)
        with self._lock:
            if matched:
                node = self.tree.add(keys[:matched], self._chains.root)
                if matched < len(keys) and node.children:
                    node.forked = True
        limit = matched
        while (depth := self._deepest_state(keys, limit)) > 0:
            chain = self._chains.columns(keys[:depth])
            names = [*chain, name_of(keys[depth - 1], "state")] if self._codec.whole else chain
            records = self._tiers.get(names, self._chains.expected)
            if None in records:
                lost = records.index(None)
                limit = lost if lost < len(chain) else depth - 1
                continue
            self._tiers.touch(names)
            self._recomputed(keys, matched, depth)
            state = records[-1] if self._codec.whole else None
            return self._leases.new(records[: len(chain)], state, depth * self._width)
        self._recomputed(keys, matched, 0)
        return None

    def whole(self, keys: Sequence[str], limit: int | None = None) -> tuple[int, list[str]]:
        """The newest of the first `limit` blocks that is there in every layer, as far as names tell: its number, and
        the records that it takes."""
        depth = self._deepest_state(keys, self._matched(keys) if limit is None else limit)
        names = self._chains.columns(keys[:depth])
        return depth, [*names, name_of(keys[depth - 1], "state")] if depth and self._codec.whole else names

    def _recomputed(self, keys: list[str], matched: int, depth: int) -> None:
        """The price of the states that are not kept, and a wish for one where it was missed."""
        if matched > depth:
            self._counts.add("recomputed_tokens", (matched - depth) * self._width)
            with self._lock:
                self.tree.mark_fork(keys[matched - 1])

    def _whole_with_tail(self, tokens: int, keys: list[str], key: str) -> Lease | None:
        name = name_of(key, "tail")
        if not self._tiers.has(name) or self._matched(keys) < len(self._chains.columns(keys)):
            return None
        names = [*self._chains.columns(keys), name]
        records = self._tiers.get(names, self._chains.expected)
        if None in records:
            return None
        self._tiers.touch(names)
        self._counts.add("tail_hits")
        return self._leases.new(records, records[-1], tokens)

    def _matched(self, keys: list[str]) -> int:
        """How many leading blocks are there, as far as by-token layers are concerned."""
        if not self._codec.by_token:
            with self._lock:
                return max((i for i, key in enumerate(keys, 1) if self.tree.get(key)), default=0)
        return next((i for i, key in enumerate(keys) if not self._tiers.has(name_of(key, "columns"))), len(keys))

    def _deepest_state(self, keys: list[str], limit: int) -> int:
        """The last of the first `limit` boundaries at which all other layers can go on."""
        if not self._codec.whole:
            return limit
        return next((d for d in range(limit, 0, -1) if self._tiers.has(name_of(keys[d - 1], "state"))), 0)
