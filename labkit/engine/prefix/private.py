"""Private chains: one paused row each, exact to the last bit, whole or not at all.

A row that has decoded stands off the grid, so nobody else may go on from it. It is stored under its own name: the
columns that no shared block holds, the states as they are, the tokens, and whatever its owner wants beside them. Shared
blocks that the row itself committed or was restored from are held by a pin instead of being written again.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Sequence
from typing import Any

from labkit.caches import Cache
from labkit.engine.prefix import hashing
from labkit.engine.prefix.chains import Chains
from labkit.engine.prefix.codec import Codec
from labkit.engine.prefix.folder import entries
from labkit.engine.prefix.landing import Landing
from labkit.engine.prefix.lease import Lease, Leases
from labkit.engine.prefix.record import Tensor, name_of
from labkit.engine.prefix.tiers import Tiers


class PrivateChains:
    """Paused rows by id.

    Args:
        tiers, codec, chains: the store's.
        width: tokens of a shared block.
        leases: makes leases.
    """

    def __init__(self, tiers: Tiers, codec: Codec, chains: Chains, width: int, leases: Leases):
        self._tiers, self._codec, self._chains, self._width, self._leases = tiers, codec, chains, width, leases
        self._newest: dict[str, str | None] = {}  # which save of a row counts; None once it was dropped

    def save(
        self,
        id: str,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        data: Any,
        shared: Sequence[str],
        timeout: float | None,
    ) -> str | None:
        """Store a row; returns why not, or None. When it returns None the row is where it will be found again.

        Args:
            shared: blocks at its beginning that hold this row's own bytes.
            data: JSON data.
        """
        if (objection := self._codec.objection(caches, len(tokens))) is not None:
            return objection
        key, beside = self.key(id), json.dumps(data)
        name, owner = name_of(key, "private"), f"private {id}"
        columns = self._chains.columns(shared)
        if not self._tiers.pin(f"{owner} shared", columns):
            shared, columns = [], []
        start = len(shared) * self._width
        # The caller holds the caches until the bytes are on the disk. In memory alone they stay, and need a copy.
        lent = self._tiers.disk is not None
        tensors, scalars = self._codec.both(caches, start, len(tokens), lent=lent)
        tensors["tokens"] = Tensor("int32", (len(tokens),), struct.pack(f"<{len(tokens)}i", *tokens))
        self._newest[id] = save = uuid.uuid4().hex
        about = {**scalars, "id": id, "save": save, "shared": json.dumps(list(shared)), "data": beside}
        record = self._chains.record([key], 0, "private", tensors, about)
        self._tiers.unpin(owner)
        if self._tiers.has(name):
            self._tiers.drop(name)
        refusal = self._tiers.write(name, record, owner, protect=columns, timeout=timeout)
        if refusal is not None:
            self.drop(id)
        return refusal

    def load(self, id: str) -> Lease | None:
        """The row, if every part of it is there and sound."""
        name, owner = name_of(self.key(id), "private"), f"private {id}"
        landing = Landing(self._codec)
        record = self._tiers.get([name], self._chains.expected, hot=False, room=landing.room)[0]
        if (
            record is None
            or record.about["id"] != id
            or record.about["save"] != self._newest.get(id, record.about["save"])
        ):
            return None
        shared = json.loads(record.about["shared"])
        columns = self._chains.columns(shared)
        blocks = self._tiers.get(columns, self._chains.expected)
        if None in blocks:
            return None
        self._newest[id] = record.about["save"]
        # After a restart nobody holds it any more.
        self._tiers.pin(f"{owner} shared", columns)
        self._tiers.pin(owner, [name])
        ids = record.tensors["tokens"].data
        tokens = struct.unpack(f"<{len(ids) // 4}i", ids)
        parts = [*blocks, record] if len(tokens) > len(shared) * self._width else blocks
        data = json.loads(record.about["data"])
        return self._leases.new(parts, record, len(tokens), data=data, token_ids=tokens, landed=landing.arrays)

    def drop(self, id: str) -> None:
        """Forget a row and let its shared blocks go."""
        if id in self._newest:
            self._newest[id] = None
        self._tiers.unpin(f"private {id}")
        self._tiers.unpin(f"private {id} shared")
        self._tiers.drop(name_of(self.key(id), "private"))

    def ids(self) -> list[str]:
        """The rows under this root that no living engine holds, the longest unused first. Headers only are read: a row
        may still prove damaged."""
        if self._tiers.disk is None:
            return []
        found = []
        for entry in sorted(entries(self._tiers.disk.folder.path / "private"), key=lambda entry: entry.used):
            about = self._tiers.disk.about(entry.name) if entry.record and not entry.pinned else None
            ours = about is not None and about.get("root") == self._chains.root
            if ours and entry.name == name_of(self.key(about["id"]), "private"):  # no copy under another name
                found.append(about["id"])
        return found

    def key(self, id: str) -> str:
        """A row's name. Under another model's root it is another name."""
        return hashing.digest(b"private", self._chains.root.encode(), id.encode(errors="surrogatepass"))
