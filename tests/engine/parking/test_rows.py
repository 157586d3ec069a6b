"""What a paused row takes with it, and what happens when its bytes cannot be written or read."""

from __future__ import annotations

import mlx.core as mx
import pytest

import labkit
from labkit.engine import Request, SamplingParams
from labkit.engine.parking import PausedRow
from labkit.engine.parking.policy import MARGIN_STEPS
from labkit.models.chat import Segment
from tests.engine.parking.conftest import GRID, ask
from tests.engine.parking.pressing import EAGER, SAMPLED, calm, list_private, pause_at, press
from tests.tiny_models import write_checkpoint


class Scripted:
    """Forces these tokens, one after the other."""

    def __init__(self, tokens):
        self.tokens, self.accepted = list(tokens), []

    def mask(self):
        token, words = self.tokens[min(len(self.accepted), len(self.tokens) - 1)], [0] * 9
        words[token // 32] = 1 << (token % 32)
        return mx.array(words, dtype=mx.uint32)

    def accept(self, token):
        self.accepted.append(token)


def scripted(run, text, **options):
    run.engine.submit(ask("r", 9, 40, **options), constraint=Scripted(text.encode()))
    return run


@pytest.mark.parametrize("offset", range(1, 14))
def test_trap_64_a_stop_string_is_found_across_a_pause_wherever_it_is_cut(rig, hybrid, offset):
    text = "an alpha beta gamma delta"
    plain = scripted(rig(hybrid), text, stop=["beta gamma", "ta del"]).all()
    run = scripted(rig(hybrid, 10_000_000, policy=EAGER), text, stop=["beta gamma", "ta del"])
    pause_at(run, "r", offset)
    run.all()
    assert run.kinds("paused", "resumed") == ["paused", "resumed"]
    assert run.text("r") == plain.text("r") == "an alpha "
    assert run.events[-1].stop == "beta gamma"


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5])
def test_half_a_character_waits_for_its_other_half_across_a_pause(rig, hybrid, offset):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 9, 9), constraint=Scripted("é🙂né".encode()))
    pause_at(run, "r", offset)
    run.all()
    assert run.text("r") == "é🙂né"


def test_the_pending_token_is_told_before_the_pause_even_if_it_is_the_last(rig, hybrid):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 9, 6))
    run.until(lambda run: len(run.tokens("r")) == 5)
    press(run)
    run.step()
    assert run.reasons() == {"r": "length"}
    assert not run.kinds("paused")
    assert run.engine.idle
    assert run.engine.prefixes.stats()["pins"]["owners"] == 0


def test_usage_counts_every_token_once(rig, hybrid):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 30, 8))
    run.until(lambda run: run.of("r", "prefill") and run.of("r", "prefill")[-1].done >= 16)
    press(run)
    run.until(lambda run: run.of("r", "parked"), limit=3)
    calm(run)
    run.until(lambda run: len(run.tokens("r")) == 3)
    pause_at(run, "r", 3)
    run.all()
    usage = run.of("r", "finished")[0].usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (30, 0, 8)


@pytest.mark.parametrize("cancel_when", ["parked", "paused"])
def test_a_cancel_while_put_aside_leaves_nothing_behind(rig, hybrid, cancel_when):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 40, 20))
    if cancel_when == "parked":
        run.until(lambda run: run.of("r", "prefill"))
    else:
        run.until(lambda run: len(run.tokens("r")) >= 4)
    press(run)
    run.until(lambda run: run.of("r", cancel_when), limit=3)
    assert run.engine.prefixes.stats()["pins"]["owners"] > 0
    run.engine.cancel("r")
    run.step()
    assert run.reasons() == {"r": "cancelled"}
    assert run.engine.idle
    assert run.engine.prefixes.stats()["pins"] == {"owners": 0, "records": 0}
    assert list_private(run) == []
    calm(run)
    run.engine.submit(ask("again", 40, 2))
    assert run.all().of("again", "finished")[0].usage.cached_tokens >= GRID


def test_a_row_that_is_put_away_before_its_first_token_comes_back(rig, hybrid):
    plain = rig(hybrid)
    plain.engine.submit(ask("r", 17, 5))
    plain.all()
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 17, 5))
    run.until(lambda run: run.of("r", "prefill") and run.of("r", "prefill")[-1].done == 16)
    press(run)
    run.until(lambda run: run.kinds("paused"), limit=3)
    calm(run)
    run.all()
    assert run.tokens("r") == plain.tokens("r")


def test_a_record_comes_back_as_it_was_and_others_are_refused():
    params = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, stop=["a", "b"], stop_token_ids=[7], seed=11, logprobs=2, max_tokens=9
    )
    segments = [Segment("user", "messages[0]", 0, 2), Segment("template", "generation prompt", 2, 3)]
    row = PausedRow(Request((1, 2, 3), params, id="x/y z", priority=2, segments=segments), 99, (4, 5), 2)
    for stored in (2, 3, 4):
        back = PausedRow.from_record(row.as_record(stored), row.known[:stored])
        assert (back.known, back.seed, back.answer, back.cached) == (row.known, 99, (4, 5), 2)
        assert back.request.params == params
        assert (back.request.id, back.request.priority, back.request.segments) == ("x/y z", 2, tuple(segments))
    record = row.as_record(3)
    for broken in ({}, {**record, "format": 0}, {**record, "params": {"heat": 1}}, {**record, "rest": None}, None):
        with pytest.raises(ValueError, match=r"record|format"):
            PausedRow.from_record(broken, (1, 2, 3))


def test_events_and_log_tell_of_it_as_plain_data(rig, hybrid):
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 30, 12))
    run.until(lambda run: run.of("r", "prefill"))
    press(run)
    run.until(lambda run: run.of("r", "parked"), limit=3)
    calm(run)
    pause_at(run, "r", 4)
    run.all()
    assert run.kinds("submitted", "parked", "paused", "resumed", "finished") == [
        "submitted",
        "parked",
        "resumed",
        "paused",
        "resumed",
        "finished",
    ]
    operations = [operation[0] for record in run.engine.log for operation in record.operations]
    assert operations[:5] == ["new", "park", "restore", "pause", "resume"]
    assert [record.leaves for record in run.engine.log if record.leaves] == [("r",)], "putting aside is no leaving"


def test_rows_in_pages_pause_and_come_back_with_the_same_tokens(rig, hybrid):
    """Their blocks go back to the pool, and what is stored is what a row without pages would store."""
    requests = [ask("long", 45, 20), ask("short", 20, 24, start=3, seed=5, temperature=0.8)]
    plain = rig(hybrid, kv="paged", block_tokens=GRID)
    for one in requests:
        plain.engine.submit(one)
    plain.all()
    run = rig(hybrid, 10_000_000, policy=EAGER, kv="paged", block_tokens=GRID, pool_bytes=2_000_000)
    for one in requests:
        run.engine.submit(one)
    run.until(lambda run: len(run.tokens("long")) >= 5 and len(run.tokens("short")) >= 5)
    press(run)
    run.until(lambda run: len(run.kinds("paused")) == 2, limit=6)
    assert run.engine._executor.cache_bytes == 0
    assert run.engine.paged.used == 0
    calm(run)
    run.all()
    assert run.reasons() == {"long": "length", "short": "length"}
    for id in ("long", "short"):
        assert run.tokens(id) == plain.tokens(id)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a CPU's graph")
@pytest.mark.parametrize("sampling", [{"seed": 5}, SAMPLED], ids=["greedy", "seeded"])
def test_a_row_of_compiled_loops_goes_on_in_the_memory_that_it_was_read_to(rig, tmp_path, sampling):
    """Two come back, one after the other, and write where they lie: same tokens, and nobody else's."""
    loaded = labkit.load(write_checkpoint(tmp_path / "model", "hybrid"), graph="native")
    requests = [ask("a", 21, 24, **sampling), ask("b", 13, 24, start=1, **sampling)]
    expected = {}
    for one in requests:
        plain = rig(loaded)
        plain.engine.submit(one)
        expected[one.id] = plain.all().tokens(one.id)
    run = rig(loaded, 10_000_000, policy=EAGER)
    for one in requests:
        run.engine.submit(one)
    for tokens in (3, 9, 16):
        run.until(lambda run, tokens=tokens: all(len(run.tokens(id)) >= tokens for id in "ab"))
        before = len(run.kinds("paused"))
        press(run)
        run.until(lambda run, before=before: len(run.kinds("paused")) == before + 2, limit=6)
        calm(run)
    run.all()
    assert run.kinds("paused") == ["paused"] * 6
    assert {id: run.tokens(id) for id in "ab"} == expected


def test_room_counts_what_rows_come_to_and_the_costlier_step(rig, hybrid):
    """A short request beside long rows takes part in steps that hold more than its own prompt's."""
    run = rig(hybrid, 100_000_000)
    for id in "abc":
        run.engine.submit(ask(id, 40, 600, start=ord(id)))
    run.until(lambda run: all(len(run.tokens(id)) >= 3 for id in "abc"))
    run.engine.submit(ask("short", 4, 8))
    hands, session = run.engine._parking._hands, run.engine._register.live["short"]
    rows, together = hands._executor.sessions(), hands._admission.projected
    room, held = hands.room("short"), together([row.fed for row in rows])
    decoding = hands._estimates.transient(1, max(row.fed for row in rows), rows=4)
    assert decoding > hands._estimates.prompt_step(4, GRID)
    assert room.nothing == together([*(row.fed for row in rows), session.total]) - held + decoding
    assert room.growing == together([*(row.fed + MARGIN_STEPS for row in rows), session.total]) - held + decoding
    assert room.nothing < room.growing < room.answers
