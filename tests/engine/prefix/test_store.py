"""The store: what it gives back is what was committed, to the last bit, or nothing."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from labkit.caches import Foreign, Unsupported
from labkit.engine.prefix import PrefixStore
from tests.engine.prefix.conftest import PROMPT, WIDTH, Witness, commit_all, restored


@pytest.mark.parametrize("name", ["store", None], ids=["disk", "memory"])
def test_what_was_committed_comes_back(open_store, witness, name):
    store = open_store(witness, name)
    assert {result.reason for result in commit_all(store, witness, PROMPT)} == {"stored"}
    assert [restored(store, witness, PROMPT[:n]) for n in (45, 44, 41, 40, 39, 8, 7, 1, 0)] == [
        40, 40, 40, 40, 32, 8, 0, 0, 0,
    ]  # fmt: skip
    assert store.stats()["leases"] == 0


def test_it_comes_back_in_another_process_life(open_store, witness):
    first = open_store(witness)
    commit_all(first, witness, PROMPT)
    assert first.close()
    second = open_store(witness)
    assert restored(second, witness, PROMPT) == 40
    assert second.stats()["disk"]["read"]
    assert second.stats()["blocks_known"] == 5


def test_it_comes_back_from_the_disk_when_memory_lets_go(open_store, witness):
    store = open_store(witness)
    commit_all(store, witness, PROMPT)
    store.flush(600)
    assert store.release_memory()
    assert store.stats()["memory"]["bytes"] == 0
    assert restored(store, witness, PROMPT) == 40


def test_a_diverging_prompt_gets_what_is_common(open_store, witness):
    store = open_store(witness)
    commit_all(store, witness, PROMPT)
    for changed in range(40):
        other = [*PROMPT]
        other[changed] += 1
        assert restored(store, witness, other) == changed // WIDTH * WIDTH


def test_what_else_a_prefix_depends_on_keeps_chains_apart(open_store, hybrid):
    store = open_store(hybrid)
    commit_all(store, hybrid, PROMPT)
    commit_all(store, hybrid, PROMPT[:20], extra=[(10, "image 1")])
    assert restored(store, hybrid, PROMPT, extra=["adapter"]) == 0
    assert restored(store, hybrid, PROMPT, extra=[(10, "image 2")]) == 8
    assert restored(store, hybrid, PROMPT, extra=[(10, "image 1")]) == 16
    assert restored(store, hybrid, PROMPT, extra=[(40, "image")]) == 40


@pytest.mark.parametrize("other", ["fingerprint", "layout", "width", "numerics", "invariant"])
def test_another_model_reads_nothing_of_it(open_store, hybrid, other):
    commit_all(open_store(hybrid), hybrid, PROMPT)
    loaded, options = hybrid, {}
    if other == "fingerprint":
        loaded = Witness(*hybrid.kinds, fingerprint="another")
    elif other == "layout":
        loaded = Witness(*reversed(hybrid.kinds))
    elif other == "invariant":
        loaded = Witness(*hybrid.kinds)
        loaded.invariant = True
    elif other == "width":
        options = {"width": 4}
    else:
        options = {"numerics": "batch-invariant"}
    store = open_store(loaded, **options)
    assert restored(store, loaded, PROMPT) == 0
    commit_all(store, loaded, PROMPT)
    assert restored(store, loaded, PROMPT) >= 40


def test_chunks_cut_short_are_another_chain(open_store, hybrid):
    """Pressure cuts chunks; they round differently, so only who names the same chunks goes on from them."""
    store = open_store(hybrid)
    caches = hybrid.make_caches()
    for start, end in ((0, 8), (8, 13), (13, 16), (16, 24)):
        hybrid.extend(caches, PROMPT, start, end)
    assert store.commit(PROMPT[:24], caches, chunks=[8, 5, 3, 8]).stored
    assert restored(store, hybrid, PROMPT) == 0, "the first block alone has no state here"
    assert restored(store, hybrid, PROMPT, chunks=[8, 5, 3]) == 24
    assert restored(store, hybrid, PROMPT, chunks=[8, 3, 5]) == 0
    assert restored(store, hybrid, PROMPT, chunks=[8, 5, 3, 8]) == 24
    with pytest.raises(ValueError, match="crosses"):
        store.lookup(PROMPT, chunks=[9])


def test_a_refused_commit_says_why_and_is_counted(open_store, hybrid):
    store = open_store(hybrid)
    good = hybrid.after(PROMPT[:16])
    other = Witness("contiguous", "recurrent")
    rows = [type(cache).merge([cache, cache]) for cache in good]
    cases = {
        "off_boundary": (PROMPT[:15], good),
        "other_length": (PROMPT[:8], good),
        "other_kind": (PROMPT[:16], other.after(PROMPT[:16])),
        "other_layout": (PROMPT[:16], hybrid.make_caches()),
    }
    for reason, (tokens, caches) in cases.items():
        assert store.commit(tokens, caches) == (False, reason)
        assert store.stats()[f"commit_{reason}"] == 1
    assert not store.commit(PROMPT[:16], rows).stored
    assert store.commit([], good) == (False, "off_boundary")
    assert store.stats()["writer"]["waiting"] == 0
    assert restored(store, hybrid, PROMPT) == 0


def test_a_cache_that_is_no_bytes_is_refused_at_the_door(open_store):
    class Unknown:
        def is_trimmable(self) -> bool:
            return False

    model = SimpleNamespace(make_caches=lambda: [Foreign(Unknown())], layouts=[None], dtype=mx.float32)
    with pytest.raises(Unsupported, match="prefix store"):
        open_store(SimpleNamespace(model=model, fingerprint="x"))


@pytest.mark.parametrize(
    "options",
    [
        *({name: -1} for name in ("memory_bytes", "disk_bytes", "queue_bytes", "keep_free_bytes", "queue_seconds")),
        *({"width": value} for value in (0, 2.5, "8", True)),
        {"queue_seconds": float("nan")},
        {"queue_seconds": "long"},
        {"retention": 5},
    ],
    ids=str,
)
def test_options_that_are_none_are_refused_at_the_door(hybrid, tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PrefixStore(hybrid, tmp_path / "store", **options)
    assert not (tmp_path / "store").exists(), "nothing was begun"


@pytest.mark.parametrize("model", [None, "tiny-hybrid"])
def test_a_store_is_for_a_loaded_model(tmp_path, model):
    with pytest.raises(ValueError, match=r"labkit\.load"):
        PrefixStore(model, tmp_path / "store")


def test_trap_8_the_same_prompt_again_stores_nothing_new(open_store, witness):
    """Entries stored each time and never served."""
    store, sizes = open_store(witness), []
    for turn in range(6):
        assert restored(store, witness, PROMPT) == (40 if turn else 0)
        commit_all(store, witness, PROMPT)
        store.flush(600)
        sizes.append(store.stats()["disk"]["written"])
    assert len(set(sizes)) == 1


def test_trap_11_a_block_that_all_prompts_share_is_served_after_a_restart(open_store, witness):
    """A shared, aligned block was dropped at reload for its placeholder."""
    store = open_store(witness)
    commit_all(store, witness, PROMPT[:32])
    store.close()
    again = open_store(witness)
    assert restored(again, witness, [*PROMPT[:32], *[5] * 20]) == 32


# -- tails -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 8, 45])
def test_trap_21_with_tails_the_same_prompt_again_computes_one_token(open_store, witness, length):
    """The trailing part of a block was computed again in every turn."""
    store, prompt = open_store(witness, tail=True), PROMPT[:length]
    skippable = prompt[:-1]
    commit_all(store, witness, skippable)
    assert restored(store, witness, skippable) == len(skippable) // WIDTH * WIDTH
    assert store.commit(skippable, witness.after(skippable)).stored
    assert restored(store, witness, skippable) == length - 1
    longer = [*skippable, 7, 7]
    assert restored(store, witness, longer) == len(skippable) // WIDTH * WIDTH, "it would be cut elsewhere there"
    store.close()
    assert restored(open_store(witness, tail=True), witness, skippable) == length - 1
