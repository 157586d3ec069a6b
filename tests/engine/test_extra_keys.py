"""Requests with extra keys (an image's digest, an adapter's name): equal keys share what is computed, other keys never
do, in whichever way beginnings are shared."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import labkit
from labkit.engine import Request
from labkit.engine.memory import FakeMeter
from labkit.engine.parking import PausedRow
from labkit.engine.prefix import PrefixStore
from tests.engine.test_batching import prompt

WIDTH = 8
LENGTH = 33  # four whole cells before the last token
KEYS = [(), ("a",), ("b",), ((20, "a"),), ("a", (WIDTH, "b"))]


def shared(one, other):
    """Tokens that two prompts of the same tokens may have in common."""
    one, other = (Request([0], extra=keys).extra for keys in (one, other))
    cells = range(WIDTH, LENGTH, WIDTH)
    differ = [end for end in cells if {k for k in one if k[0] < end} != {k for k in other if k[0] < end}]
    return (min(differ) if differ else LENGTH - 1 + WIDTH) - WIDTH


def cached(engine, *requests):
    """How many tokens each of them did not compute, run together."""
    for request in requests:
        engine.submit(request)
    return by_request(list(engine.run()), requests)


def by_request(events, requests):
    found = {event.request: event.usage.cached_tokens for event in events if event.kind == "finished"}
    return [found[request.id] for request in requests]


def asking(engine, extra):
    return engine.request(prompt(1, LENGTH), max_tokens=6, ignore_eos=True, extra=extra)


@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(KEYS, 2)], ids=str)
def test_what_two_prompts_share(loaded, one, other):
    model, wanted = loaded("llama"), shared(one, other)
    store = PrefixStore(model, width=WIDTH)
    plain = labkit.Engine(model, prefill_chunk=WIDTH)
    stored = labkit.Engine(model, prefixes=store)
    paged = labkit.Engine(model, prefill_chunk=WIDTH, kv="paged", block_tokens=WIDTH)
    assert cached(plain, asking(plain, one), asking(plain, other)) == [0, wanted], "one follows the other"
    cached(stored, asking(stored, one))
    assert cached(stored, asking(stored, other)) == [wanted], "a stored prefix"
    first, second = (asking(paged, keys) for keys in (one, other))
    paged.submit(first)
    while not any(event.kind == "token" for event in paged.step()):
        pass
    paged.submit(second)
    saved, events = 0, []
    while not paged.idle:
        events += paged.step()
        saved = max(saved, paged.paged.snapshot()["saved"])
    (found,) = by_request(events, [second])
    assert found == wanted, "a live row's blocks"
    assert saved == wanted * sum(layout.bytes_per_token for layout in model.model.layouts)


def test_equal_blocks_of_states_that_were_computed_apart_are_joined_only_with_equal_keys(loaded):
    # Hybrids compute every prompt in pages, and share the memory of equal blocks afterwards; a store's are adopted.
    model = loaded("hybrid", "adapter")
    for other, joined in ((("a",), True), (("b",), False)):
        engine = labkit.Engine(
            model, prefixes=PrefixStore(model, width=WIDTH), kv="paged", block_tokens=WIDTH, pool_bytes=1 << 20
        )
        for keys in (("a",), other, other):
            engine.submit(engine.request(prompt(1, LENGTH), max_tokens=9, ignore_eos=True, extra=keys))
        saved = 0
        while not engine.idle:
            engine.step()
            saved = max(saved, engine.paged.snapshot()["saved"])
        block = 4 * WIDTH * model.model.layouts[1].bytes_per_token * 2
        assert saved == (2 if joined else 1) * block


def test_a_row_that_was_put_aside_comes_back_under_its_own_keys(loaded):
    model, meter = loaded("hybrid"), FakeMeter(1 << 30)
    guard = labkit.engine.MemoryGuard(1 << 30, meter=meter, interval=0)
    store = PrefixStore(model, width=WIDTH)
    engine = labkit.Engine(model, guard=guard, prefixes=store)
    alone = labkit.Engine(model, prefill_chunk=WIDTH).generate(prompt(1, LENGTH), max_tokens=9, ignore_eos=True)
    requests = [
        engine.request(prompt(1, LENGTH), max_tokens=9, ignore_eos=True, extra=keys) for keys in ((), ("a",), ("b",))
    ]
    for request in requests:
        engine.submit(request)
    events = [event for _ in range(3) for event in engine.step()]
    meter.live = int(0.97 * guard.ceiling_bytes)
    events += engine.step()
    meter.live = 0
    parked = [event for event in events if event.kind == "parked"]
    assert len(parked) == 2
    events += list(engine.run())
    back = {event.request: event.done for event in events if event.kind == "resumed"}
    assert back == {event.request: event.done for event in parked}, "exactly its own committed blocks"
    for request in requests:
        assert tuple(e.token for e in events if e.request == request.id and e.kind == "token") == alone.tokens


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=3), st.tuples(st.integers(0, 9), st.text(max_size=3))), max_size=4))
def test_a_paused_row_keeps_its_keys_and_their_order_says_nothing(extra):
    request = Request([1, 2, 3], extra=extra)
    record = PausedRow(request, 1, (4,)).as_record(2)
    assert PausedRow.from_record(record, (1, 2)).request.extra == request.extra
    assert Request([1], extra=extra[::-1]).extra == request.extra


@pytest.mark.parametrize("extra", [3, [4], [("a", 1)], [(-1, "a")], [(1, "a", 2)], [(True, "a")], [b"a"], [(0, None)]])
def test_keys_of_another_form_are_refused_at_the_door(engine, extra):
    with pytest.raises(ValueError, match="extra key"):
        engine.generate([1], extra=extra)
