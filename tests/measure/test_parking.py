"""Requests below a ceiling of memory: what pressure costs under each policy, and that it changes no answer."""

from __future__ import annotations

import pytest

import labkit
from labkit.engine import Policy
from labkit.engine.capacity import Budget
from labkit.engine.memory import Estimates, Lines
from labkit.measure import parking
from tests.settled import settled_memory
from tests.tiny_models import write_checkpoint

WIDTH, PROMPTS, ANSWER = 64, (513, 385, 257), 40


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama"))


def below(loaded, folder, pressure=None, ballast=0):
    """Below no ceiling, or with room for the longest and a fifth more until the ballast takes most of it. The lines
    stand as far above what other tests have left in memory, however much that is."""
    options = {"gap_seconds": 0.0, "ballast_bytes": ballast, "ceiling_bytes": None}
    if pressure is not None:
        need = Estimates(loaded, Budget(loaded)).need(PROMPTS[0], ANSWER, chunk=WIDTH)
        held = settled_memory()
        ceiling = held + 1.25 * need
        share = need / ceiling
        soft, hard = (held + 1.05 * need) / ceiling, (held + 1.2 * need) / ceiling
        lines = Lines(soft, hard, emergency=1 + 0.5 * share, hysteresis=0.05 * share)
        options |= {"ceiling_bytes": int(ceiling), "lines": lines, "policy": Policy(pressure, reserve="nothing")}
    return parking.under_pressure(loaded, folder, PROMPTS, ANSWER, width=WIDTH, **options)


def test_parks_lose_nothing_where_ends_lose_what_was_computed(loaded, tmp_path):
    free, events = below(loaded, tmp_path / "free")
    assert (free.policy, free.finished, free.aborted, free.parks + free.pauses) == ("none", 3, 0, 0)
    assert sum(event.kind == "finished" for event in events) == 3
    assert set(free.away_seconds.values()) == {0.0}
    parked, _ = below(loaded, tmp_path / "parked", "park", ballast=750_000)
    assert (parked.finished, parked.aborted, parked.lost_tokens) == (3, 0, 0)
    assert parked.parks + parked.pauses > 0
    assert max(parked.away_seconds.values()) > 0
    assert parked.tokens == free.tokens
    ended, _ = below(loaded, tmp_path / "ended", "abort-all", ballast=750_000)
    assert ended.aborted > 0
    assert ended.lost_tokens > 0
    assert "tokens" not in ended.as_record()
