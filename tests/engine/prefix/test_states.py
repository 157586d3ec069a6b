"""Which recurrent states a store keeps, and how bytes leave the caches where memory is shared."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.caches import Contiguous
from labkit.engine.prefix import Retention
from labkit.engine.prefix.codec import Codec
from labkit.engine.prefix.record import Record
from tests.engine.prefix.conftest import PROMPT, WIDTH, Witness, commit_all, restored
from tests.engine.prefix.faults import FULL, Failing


def state_bytes(witness: Witness) -> int:
    return sum(witness.layouts[i].bytes_fixed for i, kind in enumerate(witness.kinds) if kind == "recurrent")


def test_states_stay_under_their_budget_and_their_price_is_counted(open_store, hybrid):
    one = state_bytes(hybrid)
    store = open_store(hybrid, retention=Retention(budget_bytes=3 * one))
    prompt = [i % 200 for i in range(20 * WIDTH)]
    commit_all(store, hybrid, prompt)
    store.flush(600)
    stats = store.stats()
    assert stats["states"] == {"kept": 3, "bytes": 3 * one}
    assert stats["states_thinned"] == 17
    assert len(list(store._tiers.disk.folder.path.rglob("*.state.safetensors"))) == 3
    assert restored(store, hybrid, prompt) == 160, "the newest"
    assert restored(store, hybrid, [*prompt[:132], 9, 9, 9]) == 128, "16 blocks: the coarsest lattice"
    before = store.stats().get("recomputed_tokens", 0)
    assert restored(store, hybrid, [*prompt[:52], *[9] * 9]) == 0
    assert store.stats()["recomputed_tokens"] - before == 48
    branch = [*prompt[:52], *[9] * 9]
    commit_all(store, hybrid, branch)
    store.flush(600)
    assert restored(store, hybrid, branch) == 56
    assert store.stats()["states"]["kept"] == 3


def test_a_boundary_behind_which_prompts_part_gets_its_state_back(open_store, hybrid):
    store = open_store(hybrid, retention=Retention(budget_bytes=4 * state_bytes(hybrid), interval=100))
    system, turns = [i % 200 for i in range(5 * WIDTH)], [[50 + turn] * 11 for turn in range(4)]
    found = []
    for turn in turns:
        prompt = [*system, *turn]
        found.append(restored(store, hybrid, prompt))
        commit_all(store, hybrid, prompt)
        store.commit(prompt[:48], hybrid.after(prompt[:48]), last=True)
    assert found[0] == found[1] == 0, "nobody knew yet"
    assert found[2:] == [40, 40], "where the second prompt parted, a state was taken"


def test_a_budget_below_one_state_is_said(open_store, hybrid):
    store = open_store(hybrid, retention=Retention(budget_bytes=10))
    assert commit_all(store, hybrid, PROMPT)[0] == (False, "state_over_budget")
    assert store.stats()["commit_state_over_budget"] == 5
    assert restored(store, hybrid, PROMPT) == 0


def test_a_state_goes_only_when_its_successor_is_on_the_disk(open_store, hybrid):
    system = Failing()
    store = open_store(hybrid, system=system, memory_bytes=0, retention=Retention(budget_bytes=state_bytes(hybrid)))
    commit_all(store, hybrid, PROMPT[:8])
    store.flush(600)
    system.failing = {"write": FULL}
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    system.failing = {}
    assert restored(store, hybrid, PROMPT) == 8, "killed now, the engine would go on from there"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_bytes_leave_a_buffer_in_one_copy_that_takes_no_memory_of_the_devices(dtype):
    # A copy on the device first would take memory exactly when there is none.
    cache = Contiguous()
    cache.update_and_fetch(*[mx.random.normal((1, 2, 3000, 64)).astype(dtype) for _ in range(2)])
    mx.eval(cache.state)
    layout = cache.layout
    codec = Codec(lambda: [Contiguous(layout)], [layout])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tensors = codec.columns([cache], 5, 2900)
    assert mx.get_peak_memory() - before < 0.01 * cache.nbytes
    back = codec.assemble([Record(tensors)], None, 2895)[0]
    for name in ("keys", "values"):
        assert mx.array_equal(getattr(back, name)[..., :2895, :], getattr(cache, name)[..., 5:2900, :])
