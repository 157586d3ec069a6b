"""The store: what it gives back is what was committed, to the last bit, or nothing."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from types import SimpleNamespace

import mlx.core as mx
import pytest

from labkit.caches import Foreign, Unsupported
from labkit.engine.prefix import PrefixStore
from tests.engine.prefix.conftest import KINDS, PROMPT, WIDTH, Witness, commit_all, restored
from tests.engine.prefix.faults import BROKEN, FULL, Failing


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


# -- traps -------------------------------------------------------------------------------------------------------------


def test_trap_16_no_tail_of_another_request_leaves_with_a_block(open_store):
    """A trimmed cache only lowered its offset; its buffer leaked another request's tail."""
    witness = Witness(*KINDS["full"])
    store = open_store(witness)
    caches = witness.after([*PROMPT[:16], *[250] * 9])
    secret = caches[0].keys[0, 0, 16:25, 0].tolist()
    for cache in caches:
        cache.trim(9)
    assert store.commit(PROMPT[:16], caches).stored
    lease = store.lookup(PROMPT[:16])
    for cache in lease.restore():
        assert [array.shape[2] for array in cache.keys_and_values()] == [16, 16]
        assert not cache.keys[..., 16:, :].any(), "the room behind them is new"
        assert not set(cache.keys.reshape(-1).tolist()) & set(secret)
    store.flush(600)
    for path in store._tiers.disk.folder.path.rglob("*.safetensors"):
        assert not any(_bytes(value) in path.read_bytes() for value in secret)


def _bytes(value: float) -> bytes:
    return bytes(memoryview(mx.array([value]).view(mx.uint8)))


def test_trap_17_what_is_served_is_never_live(open_store, witness):
    """A fetch returned the stored objects; generation changed them."""
    store = open_store(witness)
    commit_all(store, witness, PROMPT)
    lease = store.lookup(PROMPT)
    first, second = lease.restore(), lease.restore()
    witness.extend(first, [*PROMPT[:40], *[9] * 8], 40, 48)
    assert witness.same(second, PROMPT[:40])
    witness.extend(second, PROMPT, 40, 45)
    assert witness.same(second, PROMPT)
    assert restored(store, witness, PROMPT) == 40
    lease.release()
    with pytest.raises(RuntimeError, match="released"):
        lease.restore()
    lease.release()
    assert store.stats()["leases"] == 0


@pytest.mark.parametrize("name", ["store", None], ids=["disk", "memory"])
@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
def test_what_a_lookup_found_cannot_be_lost_any_more(open_store, witness, name, hot):
    """Between a lookup and its use another request's blocks took the room."""
    store = open_store(witness, name)
    commit_all(store, witness, PROMPT)
    store.flush(600)
    if not hot and name:
        store.release_memory()
    lease = store.lookup(PROMPT)
    if name:
        for path in store._tiers.disk.folder.path.rglob("*.safetensors"):
            path.write_bytes(b"another's")
            path.unlink()
    store.release_memory()
    assert restored(store, witness, PROMPT) == 0
    assert witness.same(lease.restore(), PROMPT[:40])
    lease.release()


def test_a_commit_copies(open_store, witness):
    store = open_store(witness)
    caches = witness.after(PROMPT[:16])
    store.commit(PROMPT[:16], caches)
    witness.extend(caches, [*PROMPT[:16], *[9] * 8], 16, 24)
    for cache in caches:
        if cache.kind != "recurrent":
            cache.keys[...] = 0
    assert restored(store, witness, PROMPT) == 16


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


@pytest.mark.parametrize("blocks", [4, 32])
def test_trap_25_blocks_are_put_together_once(open_store, monkeypatch, blocks):
    """Every block was joined to those before it: quadratic."""
    witness = Witness(*KINDS["all"])
    store = open_store(witness)
    tokens = [i % 200 for i in range(blocks * WIDTH)]
    commit_all(store, witness, tokens)
    joined = []
    original = mx.concatenate
    monkeypatch.setattr(mx, "concatenate", lambda *a, **k: (joined.append(1), original(*a, **k))[1])
    store.lookup(tokens).restore()
    assert joined == [], "each block is written into its place"


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


# -- pins --------------------------------------------------------------------------------------------------------------


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


# -- memory, queue, end ------------------------------------------------------------------------------------------------


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


def test_what_is_committed_after_the_end_is_refused(open_store, hybrid):
    store = open_store(hybrid, memory_bytes=0)
    store.close()
    assert store.commit(PROMPT[:8], hybrid.after(PROMPT[:8])) == (False, "closed")


def test_a_store_that_nobody_closed_ends_when_nobody_holds_it(open_store, hybrid, tmp_path):
    store = PrefixStore(hybrid, tmp_path / "store", width=WIDTH, keep_free_bytes=0)
    commit_all(store, hybrid, PROMPT)
    thread = store._tiers.writer._thread
    del store

    gc.collect()
    thread.join(600)
    assert not thread.is_alive()
    assert restored(open_store(hybrid), hybrid, PROMPT) == 40


# -- two engines -------------------------------------------------------------------------------------------------------


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
