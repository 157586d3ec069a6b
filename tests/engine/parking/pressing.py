"""Requests under pressure that a test makes: press, calm, pause one at its token."""

from __future__ import annotations

from labkit.engine import Policy

EAGER = Policy(reserve="nothing", patience=0)
"""Lets everybody in who fits at that moment, so that pressure comes; puts the only row aside at once."""


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.1}


def alone(rig, loaded, *requests):
    """What each request answers by itself, nobody watching."""
    answers = {}
    for request in requests:
        run = rig(loaded)
        run.engine.submit(request)
        answers[request.id] = run.all().tokens(request.id)
    return answers


def pause_at(run, id, offset):
    """Let memory be tight once so many tokens were given, and calm again once the row is gone."""
    run.until(lambda run: len(run.tokens(id)) >= offset)
    press(run)
    count = len(run.of(id, "paused"))
    run.until(lambda run: len(run.of(id, "paused")) > count, limit=3)
    calm(run)


def press(run, share=0.97):
    """Memory at this share of the ceiling, whatever the engine does."""
    live, wanted = run.meter.live, int(share * run.engine.guard.ceiling_bytes)
    run.meter.outside = lambda _: max(0, wanted - live())


def calm(run):
    run.meter.outside = 0


def len_before(run, event):
    return sum(e.kind == "token" and e.request == event.request for e in run.events[: run.events.index(event)])


def assert_same_but_for_near_ties(run, expected):
    """Batches of other sizes round differently; on this model no two best tokens are so close that it shows."""
    for id, tokens in expected.items():
        assert run.tokens(id) == tokens, id


def list_private(run):
    run.engine.prefixes.flush()
    return list((run.engine.prefixes._tiers.disk.folder.path / "private").glob("*"))
