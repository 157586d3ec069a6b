"""Engines that share a folder: they serve each other, and pins hold against all."""

from __future__ import annotations

import multiprocessing

import pytest

from labkit.engine.prefix import PrefixStore
from tests.engine.prefix.conftest import KINDS, PROMPT, WIDTH, Witness, commit_all, restored


@pytest.mark.parametrize("name", ["store", None], ids=["disk", "memory"])
def test_a_pinned_prefix_outlasts_any_number_of_others(open_store, hybrid, name):
    store = open_store(hybrid, name, memory_bytes=5_000, disk_bytes=20_000)
    commit_all(store, hybrid, PROMPT[:24])
    assert store.pin("row", PROMPT[:20]) == 16
    for start in range(60, 75):
        commit_all(store, hybrid, [start, *PROMPT[:20]])
    store.flush(600)
    assert restored(store, hybrid, PROMPT[:20]) == 16
    assert store.unpin("row")
    assert not store.unpin("row")
    for start in range(100, 115):
        commit_all(store, hybrid, [start, *PROMPT[:20]])
    store.flush(600)
    assert restored(store, hybrid, PROMPT[:20]) == 0
    assert store.stats()["pins"] == {"owners": 0, "records": 0}
    assert store.pin("row", PROMPT[:20]) == 0


def test_an_owners_second_pin_takes_the_place_of_its_first(open_store, hybrid):
    store = open_store(hybrid)
    commit_all(store, hybrid, PROMPT)
    assert store.pin("row", PROMPT) == 40
    held = store.stats()["pins"]["records"]
    assert store.pin("other", PROMPT) == 40
    assert store.pin("row", PROMPT[:16]) == 16
    assert store.stats()["pins"]["records"] > held - 6
    store.unpin("other")
    assert store.stats()["pins"] == {"owners": 1, "records": 3}


def test_two_engines_in_one_folder_serve_each_other(open_store, witness):
    ours, theirs = open_store(witness), open_store(witness)
    commit_all(ours, witness, PROMPT)
    ours.flush(600)
    if witness.kinds != KINDS["rings"] and witness.kinds != KINDS["states"]:
        assert restored(theirs, witness, PROMPT) == 40
    assert open_store(witness).peek(PROMPT) == 40


def _engine(folder: str, seed: int, out) -> None:
    """One of two processes that write, read, pin and evict in one folder."""
    witness = Witness(*KINDS["hybrid"])
    served = 0
    with PrefixStore(witness, folder, width=WIDTH, keep_free_bytes=0, disk_bytes=60_000, memory_bytes=3_000) as store:
        for turn in range(16):
            tokens = [(turn * 5 + seed) % 9, *PROMPT]
            lease = store.lookup(tokens)
            if lease is not None:
                assert witness.same(lease.restore(), tokens[: lease.tokens])
                served += lease.tokens
                lease.release()
            if turn % 4 == 0:
                store.pin("row", tokens)
            commit_all(store, witness, tokens)
        store.unpin("row")
        assert store.flush(600)
        stats = store.stats()
        assert stats["disk"].get("damaged", 0) == stats["disk"].get("misplaced", 0) == 0
    out.put(served)


def test_two_processes_in_one_folder(tmp_path, open_store, hybrid):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    both = [context.Process(target=_engine, args=(str(tmp_path / "store"), seed, out)) for seed in (0, 1)]
    for process in both:
        process.start()
    served = [out.get(timeout=600) for _ in both]
    for process in both:
        process.join(600)
        assert process.exitcode == 0
    assert all(served)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 60_000
    assert not list((tmp_path / "store" / "owners").iterdir())
    store = open_store(hybrid)
    assert store.stats()["disk"].get("swept", 0) == 0
