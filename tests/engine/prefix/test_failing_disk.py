"""A store whose disk, memory or queue fails or is full: blocks are computed again, and nothing else is lost."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from tests.engine.prefix.conftest import PROMPT, WIDTH, commit_all, restored
from tests.engine.prefix.faults import BROKEN, FULL, Failing


@pytest.mark.parametrize("code", [FULL, BROKEN], ids=["full", "broken"])
@pytest.mark.parametrize("step", ["create", "write", "sync", "replace"])
def test_trap_19_a_failed_write_leaves_no_block_behind(open_store, hybrid, step, code):
    """A failed save stayed in the table."""
    system = Failing()
    store = open_store(hybrid, system=system, memory_bytes=0)
    commit_all(store, hybrid, PROMPT[:16])
    store.flush(600)
    system.failing = {step: code}
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert restored(store, hybrid, PROMPT) == 16
    stats = store.stats()
    assert stats["writer"]["failed"] >= 3
    assert stats["writer"]["last_error"]
    assert stats["blocks_known"] == 2
    assert stats["states"]["kept"] == 2
    system.failing = {}
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert restored(store, hybrid, PROMPT) == 40, "the disk is well again, and so is the store"


def test_hot_copies_serve_while_the_disk_fails(open_store, hybrid, caplog):
    system = Failing()
    store = open_store(hybrid, system=system)
    system.failing = {"write": FULL}
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert restored(store, hybrid, PROMPT) == 40
    warnings = [record for record in caplog.records if record.name == "labkit.prefix"]
    assert len(warnings) == 1, "said once, not for every block"
    system.failing = {}
    commit_all(store, hybrid, PROMPT)
    assert store.close(), "and what failed is written when it is offered again"
    assert restored(open_store(hybrid), hybrid, PROMPT) == 40


@pytest.mark.parametrize("damage", ["state", "columns"])
@pytest.mark.parametrize("block", range(5))
def test_damage_costs_what_is_behind_it(open_store, hybrid, damage, block):
    store = open_store(hybrid, memory_bytes=0)
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    keys = store._chains.keys(PROMPT, (), ())
    place = store._tiers.disk.folder.place(f"{keys[block]}.{damage}")
    data = bytearray(place.read_bytes())
    data[-3] ^= 16
    place.write_bytes(data)
    expected = 40 if damage == "state" and block < 4 else block * WIDTH
    assert restored(store, hybrid, PROMPT) == expected
    assert restored(store, hybrid, PROMPT) == expected
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert restored(store, hybrid, PROMPT) == 40, "computed again, it is stored again"


def test_trap_24_the_writer_sees_bytes_only(open_store, hybrid, monkeypatch):
    """Tensors pulled in the writer's thread made it evaluate lazy arrays."""
    guarded = threading.main_thread()
    wrong: list[str] = []

    def watch(original, called):
        def inner(*arguments, **options):
            if threading.current_thread() is not guarded:
                wrong.append(called)
            return original(*arguments, **options)

        return inner

    for called in ("eval", "array", "contiguous", "concatenate", "zeros", "save_safetensors", "load"):
        monkeypatch.setattr(mx, called, watch(getattr(mx, called), called))
    system = Failing()  # its `write` asserts bytes
    store = open_store(hybrid, system=system, memory_bytes=0)
    for start in range(100, 108):
        commit_all(store, hybrid, [start, *PROMPT])
    assert store.flush(600)
    assert system.threads == {"labkit-prefix-writer"}
    assert restored(store, hybrid, [107, *PROMPT]) == 40
    assert not wrong


def test_trap_57_the_limits_hold_at_every_insertion(open_store, hybrid):
    """A prompt cache grew until the process died."""
    limit = 3_000
    store = open_store(hybrid, memory_bytes=limit, disk_bytes=15_000)
    for start in range(20):
        commit_all(store, hybrid, [start, *PROMPT[:20]])
        assert store.stats()["memory"]["bytes"] <= limit
    store.flush(600)
    folder = store._tiers.disk.folder.path
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 15_000
    assert restored(store, hybrid, [19, *PROMPT[:20]]) == 16
    assert restored(store, hybrid, [0, *PROMPT[:20]]) == 0


def test_memory_alone_refuses_what_it_cannot_hold_and_says_so(open_store, hybrid):
    store = open_store(hybrid, None, memory_bytes=2_000)
    results = commit_all(store, hybrid, PROMPT)
    assert [result.stored for result in results] == sorted((result.stored for result in results), reverse=True)
    assert results[-1] == (False, "memory_full"), "a chain never makes room for itself by its own beginning"
    assert restored(store, hybrid, PROMPT) == 8 * sum(result.stored for result in results) > 0
    assert store.stats()["commit_memory_full"]


def test_a_full_queue_refuses_and_the_hole_is_filled_later(open_store, hybrid):
    gate = threading.Event()

    class Slow(Failing):
        def create(self, path, size):
            gate.wait(600)
            return super().create(path, size)

    store = open_store(hybrid, system=Slow(), queue_bytes=2_000, queue_seconds=0.01, memory_bytes=0)
    results = commit_all(store, hybrid, PROMPT)
    assert (False, "queue_full") in results
    assert store.stats()["writer"]["queue_full"]
    gate.set()
    store.flush(600)
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert restored(store, hybrid, PROMPT) == 40
