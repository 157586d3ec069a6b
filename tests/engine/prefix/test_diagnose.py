"""Where two prompts part, and whose fault it is."""

from __future__ import annotations

import pytest

from labkit.engine import Request
from labkit.engine.prefix.diagnose import parting
from labkit.models.chat import Segment

SYSTEM = {"role": "system", "content": "You help. It is a fine day."}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
TURNS = [
    {"role": "user", "content": "Where does the river end?"},
    {"role": "assistant", "content": "In the sea."},
    {"role": "user", "content": "And then?"},
]


@pytest.fixture(scope="module")
def render(loaded):
    tokenizer = loaded("llama").tokenizer
    return lambda messages, tools=None: tokenizer.render_chat(messages, tools)


def test_trap_69_whatever_changes_in_front_is_named(render):
    """A clock or a counter in the system prompt, tools in another order, a rewritten answer."""
    before = render([SYSTEM, *TURNS], TOOLS)

    def change(index: int, text: str):
        messages = [dict(message) for message in (SYSTEM, *TURNS)]
        messages[index]["content"] = text
        return render(messages, TOOLS)

    cases = {
        "messages[0]": change(0, "You help. It is 12:31 now."),
        "tools": render([SYSTEM, *TURNS], TOOLS[::-1]),
        "messages[1]": change(1, "Where does the river begin?"),
        "messages[2]": change(2, "In the lake."),
    }
    for source, after in cases.items():
        found = parting(before, after, 8)
        assert (found.kind, found.before.source, found.after.source) == ("changed", source, source)
        assert before.tokens[: found.common] == after.tokens[: found.common]
        assert before.tokens[found.common] != after.tokens[found.common]
        assert found.reused == found.common // 8 * 8
        assert found.computed == len(after.tokens) - found.reused
        assert found.lost > 0
        assert source in str(found)


def test_a_conversation_that_goes_on_parts_nowhere(render):
    before = render([SYSTEM, TURNS[0]])
    answered = [*before.tokens, *render([SYSTEM, *TURNS]).tokens[len(before.tokens) :]]
    found = parting(before, Request(answered, segments=render([SYSTEM, *TURNS]).segments), 8)
    assert (found.kind, found.common, found.lost) == ("appended", len(before.tokens), 0)
    assert "appended" in str(found)


def test_a_memory_block_that_comes_late_is_named(render):
    late = [SYSTEM, {"role": "system", "content": "The reader is a sailor."}, *TURNS]
    found = parting(render([SYSTEM, *TURNS]), render(late), 8)
    assert (found.before.source, found.after.source) == ("messages[1]", "messages[1]")
    assert (found.before.role, found.after.role) == ("user", "system")
    assert "became" in str(found)


def test_equal_and_shortened_prompts():
    prompt = Request(range(20), segments=[Segment("user", "messages[0]", 0, 20)])
    same = parting(prompt, prompt, 4)
    assert (same.kind, same.reused, same.computed) == ("same", 16, 4)
    cut = parting(prompt, Request(range(16)), 4)
    assert (cut.kind, cut.reused, cut.computed, cut.lost) == ("cut", 12, 4, 0)
    assert cut.before.source == "messages[0]"
    bare = parting(Request([1, 2]), Request([1, 3]), 4)
    assert (bare.kind, bare.before, bare.into) == ("changed", None, 1)
    assert "no segment" in str(bare)
