"""What a store serves: copies, its own, that nobody can lose or change any more."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.engine.prefix.conftest import KINDS, PROMPT, WIDTH, Witness, commit_all, restored


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
