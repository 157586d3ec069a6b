"""Rows in pages that decode by a recording."""

from __future__ import annotations

from typing import Any

from tests.engine.replay.playing import (
    DRAWN,
    PAGED,
    both,
    submit,
)


def test_rows_in_pages(small, roomy):
    """Alone and together, of several lengths, one prompt twice: blocks are filled, taken and shared; rows join and
    leave."""
    first = submit(("a", 1, {"max_tokens": 50}), ("b", 2, {**DRAWN, "max_tokens": 16, "length": 40}))
    later = submit(("twin", 2, {"max_tokens": 26, "length": 40}))
    _, replayed = both(small, {0: first, 9: later}, at_least=25, prefill_chunk=16, **PAGED)
    shapes = {record.shape[0] for record in replayed.engine.log if record.index in replayed.where}
    assert shapes == {1, 2, 3}
    assert not replayed.replays.refused
    assert not replayed.engine.paged.faults()
    assert replayed.engine.paged.used == 0


def test_rows_in_pages_of_another_length_than_those_that_were_recorded(small, roomy):
    """Their own tables, finished blocks and places in the tails, not those of the one that was recorded."""
    script = {0: submit(("a", 1, {"max_tokens": 12})), 16: submit(("b", 2, {**DRAWN, "length": 27, "max_tokens": 12}))}
    _, replayed = both(small, script, at_least=14, **{**PAGED, "pool_bytes": 1 << 18})
    assert replayed.replays.recorded <= 2


def test_rows_in_pages_taken_out_and_put_back(small, roomy):
    kept = []
    out = lambda engine: kept.append(engine._executor.pause(engine._register.live["a"], []))
    script = {
        0: submit(("a", 1, {**DRAWN, "max_tokens": 24}), ("c", 3, {"max_tokens": 26})),
        8: out,
        14: lambda engine: engine._executor.resume(kept.pop()),
    }
    both(small, script, at_least=12, **PAGED)


def test_pools_are_not_kept_while_a_prompt_writes_new_ones(small, roomy):
    seen = []

    def look(engine: Any) -> None:
        recording = engine.replays._recording
        seen.append((bool(engine._executor.prefill.sessions), recording is not None and bool(recording._given)))

    script = {0: submit(("a", 1, {"max_tokens": 40})), 8: submit(("b", 2, {"length": 40, "max_tokens": 8}))}
    script |= dict.fromkeys(range(9, 30), look)
    both(small, script, at_least=10, prefill_chunk=8, **PAGED)
    replayed = seen[len(seen) // 2 :]
    assert (False, True) in replayed, "it was replayed"
    assert (True, False) in replayed, "and the prompt was computed beside it"
    assert (True, True) not in replayed
