"""Hypothesis drives a store against a plain dictionary: whatever is committed, evicted, pinned, damaged or refused,
what comes back is what was computed, and what is held is there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.engine.prefix import PrefixStore, Retention
from tests.engine.prefix.conftest import KINDS, WIDTH, Witness, identical
from tests.engine.prefix.faults import BROKEN, FULL, Failing
from tests.nightly import many

# Few tokens and few lengths, so that prompts share beginnings and part.
PROMPTS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5).map(
    lambda blocks: [token for block in blocks for token in [block] * WIDTH]
)


class Machine(RuleBasedStateMachine):
    """One folder; the engine may be killed, and start again with other limits."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store: PrefixStore | None = None
        self.pinned: dict[str, list[int]] = {}
        self.rows: dict[str, list[int]] = {}

    @initialize(kinds=st.sampled_from(["full", "hybrid", "all"]))
    def begin(self, kinds):
        self.witness = Witness(*KINDS[kinds])
        self.open(40_000, 6_000, None)

    def open(self, disk_bytes, memory_bytes, budget):
        self.system = Failing()
        retention = None if budget is None else Retention(budget_bytes=budget)
        self.store = PrefixStore(
            self.witness,
            Path(self.folder.name) / "store",
            width=WIDTH,
            keep_free_bytes=0,
            disk_bytes=disk_bytes,
            memory_bytes=memory_bytes,
            retention=retention,
            system=self.system,
        )
        self.limit = disk_bytes

    @rule(prompt=PROMPTS, extra=st.sampled_from([(), ("image",)]), from_store=st.booleans())
    def compute(self, prompt, extra, from_store):
        """A prompt, as an engine does it: from what is stored, committing at every boundary."""
        lease = self.store.lookup(prompt, extra) if from_store else None
        start, caches = 0, self.witness.make_caches()
        if lease is not None:
            start, caches = lease.tokens, lease.restore()
            lease.release()
            assert self.witness.same(caches, prompt[:start])
        for begin in range(start, len(prompt), WIDTH):
            self.witness.extend(caches, prompt, begin, begin + WIDTH)
            result = self.store.commit(prompt[: begin + WIDTH], caches, extra=extra)
            healthy = not self.system.failing
            if healthy and result == (True, "stored"):
                assert self.store.peek(prompt, extra) >= begin + WIDTH or self.limit < 20_000

    @rule(prompt=PROMPTS, extra=st.sampled_from([(), ("image",)]))
    def ask(self, prompt, extra):
        lease = self.store.lookup(prompt, extra)
        if lease is not None:
            assert lease.tokens % WIDTH == 0
            assert 0 < lease.tokens <= len(prompt)
            assert self.witness.same(lease.restore(), prompt[: lease.tokens])
            lease.release()

    @rule(prompt=PROMPTS, owner=st.sampled_from(["p", "q"]))
    def pin(self, prompt, owner):
        self.store.flush(600)
        held = self.store.pin(owner, prompt)
        self.pinned[owner] = prompt[:held]

    @rule(owner=st.sampled_from(["p", "q"]))
    def unpin(self, owner):
        self.store.unpin(owner)
        self.pinned.pop(owner, None)

    @rule(prompt=PROMPTS, id=st.sampled_from(["x", "y"]), more=st.integers(1, 5))
    def pause(self, prompt, id, more):
        row = [*prompt, *[9] * more]
        caches = self.witness.after(row)
        saved = self.store.save_private(id, row, caches, data=more, timeout=600).stored
        assert saved or self.system.failing or self.limit < 20_000
        if saved:
            self.rows[id] = row
        else:
            self.rows.pop(id, None)

    @rule(id=st.sampled_from(["x", "y"]))
    def resume(self, id):
        failing = bool(self.system.failing)
        lease = self.store.load_private(id)
        if id not in self.rows:
            assert lease is None
        elif not failing:
            assert lease is not None, "a row that is held is there"
        if lease is not None and id in self.rows:
            assert list(lease.token_ids) == self.rows[id]
            assert identical(lease.restore(), self.witness.after(self.rows[id]))
        if lease is not None:
            lease.release()

    @rule(id=st.sampled_from(["x", "y"]))
    def forget(self, id):
        self.store.drop_private(id)
        self.rows.pop(id, None)

    @rule(step=st.sampled_from(["create", "write", "sync", "replace", "read", "link", "touch", "sync_folder"]),
          code=st.sampled_from([FULL, BROKEN]), half=st.booleans())  # fmt: skip
    def the_disk_fails(self, step, code, half):
        self.store.flush(600)
        self.system.failing, self.system.half = {step: code}, half

    @precondition(lambda self: self.system.failing)
    @rule()
    def the_disk_is_well(self):
        self.store.flush(600)
        self.system.failing = {}

    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "swap", "gone"]))
    def damage(self, data, how):
        """Files of shared blocks that nobody holds."""
        self.store.flush(600)
        files = sorted((Path(self.folder.name) / "store" / "blocks").rglob("*.safetensors"))
        files = [path for path in files if path.stat().st_nlink == 1]
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = bytearray(path.read_bytes())
        if how == "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        elif how == "swap":
            content = data.draw(st.sampled_from(files)).read_bytes()
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(content)
        self.store.release_memory()

    @rule()
    def memory_is_wanted_elsewhere(self):
        self.store.flush(600)
        self.store.release_memory()

    @rule(disk_bytes=st.sampled_from([9_000, 40_000, 200_000]), memory_bytes=st.sampled_from([0, 2_000, 50_000]),
          budget=st.sampled_from([None, 400, 1_500]), kill=st.booleans())  # fmt: skip
    def start_again(self, disk_bytes, memory_bytes, budget, kill):
        """The engine ends, or is killed once its writes are done; pins end with it, paused rows do not."""
        self.store.flush(600)
        self.system.failing = {}
        if kill:
            abandon(self.store)
        else:
            self.store.close(20)
        self.pinned.clear()
        self.open(disk_bytes, memory_bytes, budget)
        for id, row in list(self.rows.items()):
            lease = self.store.load_private(id)
            assert lease is not None, "a row that was whole survives its engine"
            assert identical(lease.restore(), self.witness.after(row))
            lease.release()

    @invariant()
    def what_is_pinned_is_there(self):
        if self.store is None or self.system.failing:
            return
        for prompt in self.pinned.values():
            assert self.store.peek(prompt) == len(prompt)

    @invariant()
    def limits_hold_and_nothing_leaks(self):
        if self.store is None:
            return
        stats = self.store.stats()
        assert stats["leases"] == 0
        assert stats["pins"]["owners"] <= len(self.pinned) + 4 + 2
        files = [path for path in (Path(self.folder.name) / "store").rglob("*") if path.is_file()]
        sizes = {}
        for path in files:
            try:
                status = path.stat()
            except OSError:
                continue
            sizes[status.st_ino] = status.st_size
        held = sum(len(row) for row in [*self.rows.values(), *self.pinned.values()]) * 4_000
        assert sum(sizes.values()) <= max(self.limit, 200_000 if held else 0, self.largest())

    def largest(self) -> int:
        """A folder that was filled under a larger limit shrinks with the next write."""
        self.peak = max(getattr(self, "peak", 0), self.limit)
        return self.peak

    def teardown(self) -> None:
        if self.store is not None:
            self.system.failing = {}
            assert self.store.close(30)
        self.folder.cleanup()


def abandon(store: PrefixStore) -> None:
    """As after kill -9: the owner's lock falls, nothing is tidied up."""
    import os

    store._closing.detach()
    folder = store._tiers.disk.folder
    os.close(folder._alive)
    os.close(folder._lock)


TestStore = Machine.TestCase
TestStore.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestStoreLong(Machine.TestCase):
    settings = settings(max_examples=many(600), stateful_step_count=60, deadline=None)
