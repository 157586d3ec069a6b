"""`PrefixStore`: prompts' beginnings, kept in memory and on disk beyond their requests and beyond the process.

What is served is what was computed, to the last bit, or nothing. Whatever goes wrong - a full disk, a damaged file, an
engine killed in the middle of a write - costs a block that is computed again, and stands in `stats()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit import __version__, devices
from labkit.caches import Cache
from labkit.caches.extra_keys import ExtraKeys
from labkit.engine.prefix import hashing
from labkit.engine.prefix.chains import Chains
from labkit.engine.prefix.codec import Codec
from labkit.engine.prefix.counts import Counts
from labkit.engine.prefix.disk import DiskTier
from labkit.engine.prefix.filesystem import FileSystem
from labkit.engine.prefix.folder import Folder
from labkit.engine.prefix.grid import Grid
from labkit.engine.prefix.lease import Lease, Leases
from labkit.engine.prefix.private import PrivateChains
from labkit.engine.prefix.retention import Retention
from labkit.engine.prefix.shared import Committed, SharedPrefixes
from labkit.engine.prefix.tiers import Tiers
from labkit.engine.prefix.tree import Tree
from labkit.models import LoadedModel

Chunks = Sequence[int]
"""The widths of the chunks that a prompt was computed in so far, in order. Empty: one chunk a block throughout."""


class PrefixStore:
    """States of prompts' beginnings in blocks of `grid` tokens.

    All calls belong to the thread that owns the model's arrays; `stats` may be called from any.

    Args:
        loaded: the model; another one, or the same through another graph or on another device, reads other chains.
        folder: where blocks are kept beyond the process; several engines may share it. None: in memory alone.
        width: tokens of a block, and of the chunks that prompts are computed in.
        memory_bytes: of hot copies (without a folder: of everything).
        disk_bytes: of all files in the folder.
        keep_free_bytes: what the volume must keep for others.
        retention: which boundaries keep the states of layers that cannot be cut into blocks.
        tail: whether the end of a prompt, less than a block, is kept too: the same prompt again computes one token.
        queue_bytes, queue_seconds: blocks that may wait for the disk, and how long a commit waits for room there.
        numerics: what else decides how results are rounded, such as an engine's mode.
        system: the operating system, for tests.

    Attributes:
        grid: tokens of a block.
        tail: whether it keeps less than a block.

    Raises:
        Unsupported: a model with caches that cannot be stored as bytes.
        ValueError: a folder that is something else's; sizes that are none.
        OSError: a folder that cannot be made or written.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        folder: str | Path | None = None,
        *,
        width: int = 2048,
        memory_bytes: int = 1 << 30,
        disk_bytes: int = 32 << 30,
        keep_free_bytes: int = 1 << 30,
        retention: Retention | None = None,
        tail: bool = False,
        queue_bytes: int = 1 << 30,
        queue_seconds: float = 5.0,
        numerics: str = "",
        system: FileSystem | None = None,
    ):
        sizes = {"memory_bytes": memory_bytes, "disk_bytes": disk_bytes, "queue_bytes": queue_bytes}
        for name, value in (sizes | {"keep_free_bytes": keep_free_bytes}).items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be a whole number of bytes, not {value!r}")
        if not hasattr(loaded, "fingerprint"):
            raise ValueError(f"a prefix store is for a loaded model, labkit.load(...), not {loaded!r}")
        if type(width) is not int or width < 1:
            raise ValueError(f"width must be a whole number of tokens, at least 1, not {width!r}")
        if not isinstance(queue_seconds, (int, float)) or not queue_seconds >= 0:
            raise ValueError(f"queue_seconds must be at least 0, not {queue_seconds!r}")
        if retention is not None and not isinstance(retention, Retention):
            raise ValueError(f"retention must be a labkit.engine.prefix.Retention, not {retention!r}")
        model = loaded.model
        self.grid, self.tail = width, tail
        self._codec = Codec(model.make_caches, model.layouts)
        layouts = [layout.fingerprint for layout in model.layouts]
        root = hashing.root(loaded.fingerprint, _numerics(model, numerics), layouts, width)
        self._chains = Chains(root, loaded.fingerprint, Grid(width), by_token=bool(self._codec.by_token))
        self._lock = threading.RLock()
        self._tree, self._counts, self._leases = Tree(), Counts(), Leases(self._codec)
        disk = None
        if folder is not None:
            place = Folder(Path(folder), root)
            disk = DiskTier(place, limit_bytes=disk_bytes, keep_free_bytes=keep_free_bytes, system=system)
            self._tree.learn(disk.sweep())
        self._tiers = Tiers(
            memory_bytes=memory_bytes,
            disk=disk,
            queue_bytes=queue_bytes,
            queue_seconds=queue_seconds,
            on_gone=self._tree.gone,
            lock=self._lock,
        )
        self._shared = SharedPrefixes(
            self._tiers,
            self._codec,
            self._chains,
            self._counts,
            tree=self._tree,
            width=width,
            retention=retention or Retention(),
            tail=tail,
            leases=self._leases,
            lock=self._lock,
        )
        self._private = PrivateChains(self._tiers, self._codec, self._chains, width, self._leases)
        self._closing = weakref.finalize(self, Tiers.close, self._tiers, 30.0)

    # -- shared prefixes -----------------------------------------------------------------------------------------------

    def lookup(self, tokens: Sequence[int], extra: ExtraKeys = (), chunks: Chunks = ()) -> Lease | None:
        """The longest stored prefix of `tokens`; None without one.

        A prompt's last token has to be fed for its logits: ask for the tokens before it.

        Args:
            tokens: what may be skipped.
            extra: what the prefix depends on besides its tokens.
            chunks: for a prompt that goes on where it stopped, the chunks it was computed in.
        """
        self._counts.add("lookups")
        lease = self._shared.find(tokens, extra, chunks)
        self._counts.add("hits" if lease else "misses")
        self._counts.add("hit_tokens", lease.tokens if lease else 0)
        return lease

    def peek(self, tokens: Sequence[int], extra: ExtraKeys = (), chunks: Chunks = ()) -> int:
        """How many tokens a lookup would most likely cover. Reads nothing and holds nothing."""
        return self._shared.whole(self._chains.keys(tokens, extra, chunks))[0] * self.grid

    def commit(
        self,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        *,
        extra: ExtraKeys = (),
        chunks: Chunks = (),
        last: bool = False,
    ) -> Committed:
        """Offer the state behind `tokens`. The caches are copied, and stay the caller's.

        Args:
            tokens: everything that is in the caches: whole blocks, or with a tail if the store keeps tails.
            caches: one row's, of the classes that the model makes for one row.
            extra: what the prefix depends on besides its tokens.
            chunks: the chunks it was computed in, if any was no whole block. Such blocks round differently and are
                found only by a lookup that names the same chunks.
            last: whether this is the prompt's last boundary, whose state is kept whatever the policy's interval.
        """
        result = self._shared.commit(tokens, caches, extra, chunks, last)
        self._counts.add("commits")
        self._counts.add(f"commit_{result.reason}")
        return result

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin(self, owner: str, tokens: Sequence[int], extra: ExtraKeys = (), chunks: Chunks = ()) -> int:
        """Keep the longest stored prefix of `tokens` from being evicted, by this engine or another, until `unpin`. An
        owner's second pin takes the place of its first.

        Returns:
            Tokens that are held; 0 if none could be.
        """
        keys = self._chains.keys(tokens, extra, chunks)
        depth, names = self._shared.whole(keys)
        while depth:
            if self._tiers.pin(f"pin {owner}", names):
                return depth * self.grid
            depth, names = self._shared.whole(keys, depth - 1)
        self._tiers.unpin(f"pin {owner}")
        return 0

    def unpin(self, owner: str) -> bool:
        """Let go. False if the owner holds nothing."""
        return self._tiers.unpin(f"pin {owner}")

    # -- private chains ------------------------------------------------------------------------------------------------

    def save_private(
        self,
        id: str,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        *,
        data: Any = None,
        committed: int = 0,
        extra: ExtraKeys = (),
        chunks: Chunks = (),
        timeout: float | None = None,
    ) -> Committed:
        """Store one row exactly, under its id alone, and hold it. It is stored, or nothing of it is.

        Args:
            id: names the row.
            tokens: everything that is in the caches.
            caches: the row's, of the classes that the model makes for one row; copied.
            data: what else the row needs, JSON data.
            committed: tokens at the row's beginning that it committed itself or was restored from: they are held,
                not written again.
            extra, chunks: as they were committed with.
            timeout: seconds to wait for the disk.
        """
        shared = self._chains.keys(tokens[: committed // self.grid * self.grid], extra, chunks)
        refusal = self._private.save(id, tokens, caches, data, shared, timeout)
        self._counts.add(f"private_{refusal or 'saved'}")
        return Committed(refusal is None, refusal or "stored")

    def load_private(self, id: str) -> Lease | None:
        """The row, exactly; None if any part of it is gone or damaged. It stays until `drop_private`."""
        lease = self._private.load(id)
        self._counts.add("private_loaded" if lease else "private_lost")
        return lease

    def drop_private(self, id: str) -> None:
        """Forget a row."""
        self._private.drop(id)

    def private_ids(self) -> list[str]:
        """Rows of this model that no living engine holds: those that were paused when their engine was killed."""
        return self._private.ids()

    # -- state and end -------------------------------------------------------------------------------------------------

    def release_memory(self, target: int = 0) -> int:
        """Let hot copies go until `target` bytes of them remain; returns the bytes that were freed. Without a folder
        they are the only copies, and are lost."""
        return self._tiers.release_memory(target)

    def stats(self) -> dict[str, Any]:
        """What happened and what is held, JSON data. Every refusal, loss and failure has a counter."""
        with self._lock:
            states = {"kept": sum(1 for _ in self._tree.snapshots()), "bytes": self._tree.state_bytes}
        return {
            **self._counts.as_dict(),
            "leases": self._leases.held,
            "blocks_known": len(self._tree),
            "states": states,
            **self._tiers.stats(),
        }

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was committed is on the disk. False if the time was not enough."""
        return self._tiers.flush(timeout)

    def close(self, timeout: float | None = 30.0) -> bool:
        """Write what waits, at most for so many seconds, then let the folder go. False if something was given up."""
        self._closing.detach()
        return self._tiers.close(timeout)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numerics(model: Any, mode: str) -> str:
    """Whose arithmetic it is."""
    device = devices.this_device()
    graph = f"{type(model).__module__}.{type(model).__qualname__}"
    switches = [f"{name}={getattr(model, name)!r}" for name in ("variants", "invariant") if hasattr(model, name)]
    versions = f"labkit {__version__}, mlx {mx.__version__}"
    return "|".join((graph, *switches, str(model.dtype), mode, device.kind, device.name, versions))
