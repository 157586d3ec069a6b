"""Rows whose bytes cannot be written or read: they run on, or are computed again."""

from __future__ import annotations

import errno

import pytest

from tests.engine.parking.conftest import ask
from tests.engine.parking.pressing import EAGER, SAMPLED, calm, list_private, press


def test_a_row_that_cannot_be_written_runs_on_and_another_goes(rig, hybrid, monkeypatch):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    store = run.engine.prefixes
    for one in (ask("large", 50, 30), ask("small", 20, 30, start=1)):
        run.engine.submit(one)
    run.until(lambda run: run.tokens("large") and run.tokens("small"))
    save = store.save_private

    def full(id, *arguments, **options):
        if id == "large":
            return type(save("probe", *arguments, **options))(False, errno.errorcode[errno.ENOSPC])
        return save(id, *arguments, **options)

    monkeypatch.setattr(store, "save_private", full)
    press(run)
    run.until(lambda run: run.kinds("paused"), limit=4)
    assert [event.request for event in run.events if event.kind == "paused"] == ["small"]
    calm(run)
    run.all()
    assert run.reasons() == {"large": "length", "small": "length"}
    assert len(run.tokens("large")) == len(run.tokens("small")) == 30
    assert run.engine.memory()["moves"]["store failed"] == 1


@pytest.mark.parametrize("sampling", [{"seed": 5}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("harm", ["flipped", "truncated", "gone"])
def test_a_row_whose_bytes_are_damaged_is_computed_again(rig, hybrid, harm, sampling):
    """Nothing wrong is served and no token is lost: prompt and answer so far are computed anew."""
    plain = rig(hybrid)
    plain.engine.submit(ask("r", 30, 20, **sampling))
    plain.all()
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 30, 20, **sampling))
    run.until(lambda run: len(run.tokens("r")) >= 7)
    press(run)
    run.until(lambda run: run.of("r", "paused"), limit=3)
    (path,) = list_private(run)
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x10
    for name in (path, *run.engine.prefixes._tiers.disk.folder.own.glob("pins/*private*")):
        name.unlink()
        if harm != "gone":
            name.write_bytes(data if harm == "flipped" else data[: len(data) // 2])
    calm(run)
    run.all()
    assert run.reasons() == {"r": "length"}
    assert run.tokens("r") == plain.tokens("r")
    assert run.text("r") == plain.text("r")
    resumed = run.of("r", "resumed")[0]
    assert resumed.done < resumed.total - 1
    assert list_private(run) == []


def test_without_a_store_a_parked_prompt_starts_over(rig, hybrid):
    run = rig(hybrid, 10_000_000, policy=EAGER, store=False)
    run.engine.submit(ask("r", 40, 5))
    run.until(lambda run: run.of("r", "prefill") and run.of("r", "prefill")[-1].done >= 24)
    press(run)
    run.until(lambda run: run.of("r", "parked"), limit=3)
    assert run.of("r", "parked")[0].done == 0
    calm(run)
    run.all()
    assert run.reasons() == {"r": "length"}
    assert run.of("r", "resumed")[0].done == 0


def test_a_callback_that_raises_at_its_pause_ends_its_request_alone(rig, hybrid):
    run = rig(hybrid, 10_000_000, policy=EAGER)

    def on_event(event):
        if event.kind == "paused":
            raise KeyError("broken callback")

    run.engine.submit(ask("bad", 50, 30), on_event=on_event)
    run.engine.submit(ask("good", 20, 30, start=1))
    run.until(lambda run: run.tokens("bad") and run.tokens("good"))
    press(run)
    run.meter.outside = run.meter.outside(0)
    run.step()
    calm(run)
    run.all()
    assert run.reasons() == {"bad": "error", "good": "length"}
    assert run.engine.prefixes.stats()["pins"] == {"owners": 0, "records": 0}
    assert list_private(run) == []
