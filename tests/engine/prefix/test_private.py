"""Paused rows in a store: exact, whole or not at all, the newest one, and held until they are taken up."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from labkit.engine.prefix import blockfile, codec
from tests.engine.prefix.conftest import PROMPT, ROW, Witness, address, commit_all, decoded, identical, leaves
from tests.engine.prefix.faults import FULL, Failing
from tests.settled import falls_to, settled_memory


@pytest.mark.parametrize("committed", [0, 40])
@pytest.mark.parametrize("name", ["store", None], ids=["disk", "memory"])
def test_a_paused_row_comes_back_exactly(open_store, witness, name, committed):
    store, caches = open_store(witness, name), decoded(witness)
    if committed:
        commit_all(store, witness, PROMPT)
    assert store.save_private("row", ROW, caches, data={"seed": 5}, committed=committed) == (True, "stored")
    store.release_memory()
    lease = store.load_private("row")
    assert (lease.tokens, lease.token_ids, lease.data) == (75, tuple(ROW), {"seed": 5})
    back = lease.restore()
    lease.release()
    assert identical(back, caches)
    for step in range(20):
        both = [*ROW, *range(step + 1)]
        for row in (back, caches):
            witness.extend(row, both, len(both) - 1, len(both))
        assert identical(back, caches)
    store.drop_private("row")
    store.flush(600)
    assert store.load_private("row") is None
    assert store.stats()["pins"] == {"owners": 0, "records": 0}
    assert store.lookup(ROW) is None or committed


def test_a_paused_row_is_written_from_where_it_lies_and_nobody_holds_it_then(open_store, hybrid, monkeypatch):
    store = open_store(hybrid)
    before, caches = settled_memory(), decoded(hybrid)
    monkeypatch.setattr(codec, "copied", lambda array: pytest.fail("a copy that the pause waits for"))
    assert store.save_private("row", ROW, caches).stored
    monkeypatch.undo()
    assert identical(store.load_private("row").restore(), caches)
    del caches
    gc.collect()
    assert falls_to(before), "the writer has let go of it too"


@pytest.mark.parametrize("committed", [0, 40])
def test_a_paused_row_is_read_to_where_its_caches_lie(open_store, witness, monkeypatch, committed):
    """Between the file and the caches no byte of the row's own is written twice."""
    store, caches = open_store(witness), decoded(witness)
    if committed:
        commit_all(store, witness, PROMPT)
    assert store.save_private("row", ROW, caches, committed=committed).stored
    filled, loads = [], blockfile.load

    def load(size, fill, place):
        def watched(buffers, at):
            filled.extend((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)) for buffer in buffers)
            return fill(buffers, at)

        return loads(size, watched, place)

    monkeypatch.setattr(blockfile, "load", load)
    monkeypatch.setattr(codec, "_array", lambda tensor: pytest.fail("a copy of a tensor"))
    monkeypatch.setattr(codec, "_room", lambda *_: pytest.fail("an array beside the one that was read into"))
    lease = store.load_private("row")
    back = lease.restore()
    assert identical(back, caches)
    own = {name: data for cache in caches for name, data in cache.dump()[0].items()}
    assert own
    for cache in back:
        held = [array for array in leaves(cache) if array.size]
        for array in held:
            begin = address(array)
            inside = sum(size for at, size in filled if begin <= at < begin + array.nbytes)
            columns = array.shape[-2] if cache.kind == "contiguous" else 0
            wanted = array.nbytes // columns * (len(ROW) - committed) if columns else array.nbytes
            assert inside == wanted, (cache.kind, array.shape)
    with pytest.raises(RuntimeError, match="given away"):
        lease.restore()
    assert store.stats()["leases"] == 0


def test_a_row_that_came_back_goes_on_in_the_memory_that_it_was_read_to(open_store, hybrid):
    """The host's next step copied all keys, values and states once more, and that took as long as the way back."""
    store, caches = open_store(hybrid), decoded(hybrid)
    assert store.save_private("row", ROW, caches).stored
    state, columns = store.load_private("row").restore()
    # Not as attributes, which would be to read them.
    read_to, states = [address(a) for a in (columns._keys, columns._values)], [address(a) for a in state._cache]
    assert [view.ctypes.data for view in columns.host_columns(1, 1)] == read_to
    assert [view.ctypes.data for view in state.host_states(1).arrays] == states
    assert identical([state, columns], caches)
    # Whoever has read an array keeps it as it was.
    seen = [columns.keys, state.cache[0]]
    assert state.host_states(1).arrays[0].ctypes.data != states[0]
    assert columns.host_columns(1, 1, start=70)[0].ctypes.data != read_to[0]
    assert [address(array) for array in seen] == [read_to[0], states[0]]


@pytest.mark.parametrize("read", ["before", "after"])
def test_what_a_reader_has_of_a_row_that_came_back_never_changes(open_store, hybrid, read):
    store, caches = open_store(hybrid), decoded(hybrid)
    assert store.save_private("row", ROW, caches).stored
    state, columns = store.load_private("row").restore()
    if read == "after":
        columns.host_columns(1, 1), state.host_states(1)
    kept = [columns.keys, columns.values, *state.cache]
    before = [np.array(array) for array in kept]
    columns.host_columns(1, 1, start=0)[0][:] = 7
    state.host_states(1).arrays[0][:] = 7
    assert all(np.array_equal(array, old) for array, old in zip(kept, before, strict=True))


def test_a_pause_waits_for_one_write_and_reads_nothing_back(open_store, hybrid):
    """The thread that waits writes; what it has just written is not asked for again."""
    system = Failing()
    store, caches = open_store(hybrid, system=system), decoded(hybrid)
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    system.calls.clear(), system.threads.clear()
    assert store.save_private("row", ROW, caches, committed=40).stored
    # Five blocks are pinned before; then the row's own name, given before the file's.
    calls = [call for call in system.calls if call != "write"][5:]
    assert calls[:4] == ["free_bytes", "create", "link", "replace"]
    assert sorted(calls[4:6]) == ["sync", "sync_folder"], "at the same time"
    assert calls[6:] == ["close"]
    assert system.threads == {"MainThread"}


def test_a_pause_comes_behind_all_that_waits_for_the_disk(open_store, hybrid):
    """The blocks that it builds on are there before it is: killed at any moment, it is whole or not there."""
    gate, order = threading.Event(), []

    class Slow(Failing):
        def replace(self, source, target):
            if "private" not in target.name:
                gate.wait(600)
            order.append(target.name.split(".")[1])
            return super().replace(source, target)

    store, caches = open_store(hybrid, system=Slow(), memory_bytes=0), decoded(hybrid)
    commit_all(store, hybrid, PROMPT)
    assert store.save_private("row", ROW, caches, committed=40, timeout=0.05) == (False, "not_written")
    assert store.stats()["writer"]["not_reached"] == 1
    assert store.stats()["pins"] == {"owners": 0, "records": 0}
    gate.set()
    assert store.save_private("row", ROW, caches, committed=40).stored
    assert order == [*["columns", "state"] * 5, "private"]
    assert identical(store.load_private("row").restore(), caches)


def test_a_paused_row_survives_its_process(open_store, witness):
    first = open_store(witness)
    commit_all(first, witness, PROMPT)
    caches = decoded(witness)
    first.save_private("row", ROW, caches, data=[1, 2], committed=40)
    first.close()
    second = open_store(witness)
    assert identical(second.load_private("row").restore(), caches)
    assert second.stats()["pins"]["owners"] == 2
    assert open_store(Witness(*witness.kinds, fingerprint="other")).load_private("row") is None


@pytest.mark.parametrize("lost", ["private", "columns"])
def test_a_paused_row_is_whole_or_not_at_all(open_store, hybrid, lost):
    store = open_store(hybrid, memory_bytes=0)
    commit_all(store, hybrid, PROMPT)
    store.save_private("row", ROW, decoded(hybrid), committed=40)
    folder = store._tiers.disk.folder
    for path in folder.path.rglob(f"*.{lost}.safetensors"):
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
        break
    assert store.load_private("row") is None
    assert store.stats()["private_lost"] == 1


@pytest.mark.parametrize("step", ["create", "write", "sync", "replace", "sync_folder"])
def test_a_pause_that_cannot_be_written_says_so_and_keeps_nothing(open_store, hybrid, step):
    system = Failing()
    store = open_store(hybrid, system=system)
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    system.failing = {step: FULL}
    caches = decoded(hybrid)
    assert store.save_private("row", ROW, caches, committed=40) == (False, "not_written")
    system.failing = {}
    assert store.load_private("row") is None
    assert store.stats()["pins"] == {"owners": 0, "records": 0}
    assert store.stats()["private_not_written"] == 1
    assert store.save_private("row", ROW, caches, committed=40).stored
    assert identical(store.load_private("row").restore(), caches)


def test_a_row_that_is_paused_again_is_the_newer_one(open_store, hybrid):
    store, caches = open_store(hybrid), decoded(hybrid)
    for turn in range(3):
        both = [*ROW, *range(turn)]
        assert store.save_private("row", both, caches, data=turn).stored
        lease = store.load_private("row")
        assert (lease.data, lease.tokens) == (turn, len(both))
        assert identical(lease.restore(), caches)
        hybrid.extend(caches, [*both, turn], len(both), len(both) + 1)


@pytest.mark.parametrize("step", ["create", "write", "unlink"])
def test_an_older_pause_is_never_taken_for_the_newer_one(open_store, hybrid, step):
    system = Failing()
    store, caches = open_store(hybrid, system=system), decoded(hybrid)
    assert store.save_private("row", ROW, caches).stored
    hybrid.extend(caches, [*ROW, 5], 75, 76)
    system.failing = {"create": FULL, step: FULL}
    assert store.save_private("row", [*ROW, 5], caches) == (False, "not_written")
    system.failing = {}
    assert store.load_private("row") is None


def test_paused_rows_are_held_against_eviction(open_store, hybrid):
    store = open_store(hybrid, disk_bytes=25_000, memory_bytes=0)
    commit_all(store, hybrid, PROMPT)
    caches = decoded(hybrid)
    assert store.save_private("row", ROW, caches, committed=40).stored
    for start in range(60, 75):
        commit_all(store, hybrid, [start, *PROMPT[:20]])
    store.flush(600)
    assert store.stats()["disk"]["evicted"]
    assert identical(store.load_private("row").restore(), caches)
