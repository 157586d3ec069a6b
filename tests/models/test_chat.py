"""Rendered chats: which message each token came from."""

from __future__ import annotations

import pytest

import labkit

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is näive?"}
ANSWER = {"role": "assistant", "content": "thought</think>A kind of trust."}
MORE = {"role": "user", "content": "And 🙂?"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> labkit.models.Tokenizer:
    return labkit.load(checkpoint).tokenizer


def parts(tokenizer, chat) -> list[tuple[str, str, str]]:
    return [(s.role, s.source, tokenizer.decode(chat.tokens[s.start : s.end])) for s in chat.segments]


def test_segments_cover_the_prompt_in_order(tokenizer):
    chat = tokenizer.render_chat([SYSTEM, ASK, ANSWER, MORE], TOOLS)
    assert tokenizer.decode(chat.tokens) == chat.text
    assert chat.segments[0].start == 0
    assert chat.segments[-1].end == len(chat.tokens)
    for before, after in zip(chat.segments, chat.segments[1:], strict=False):
        assert before.end == after.start
    assert "".join(text for *_, text in parts(tokenizer, chat)) == chat.text


def test_every_message_has_its_own_text(tokenizer):
    chat = tokenizer.render_chat([SYSTEM, ASK])
    assert parts(tokenizer, chat) == [
        ("system", "messages[0]", "<|im_start|>system\nBe brief.<|im_end|>\n"),
        ("user", "messages[1]", "<|im_start|>user\nWhat is näive?<|im_end|>\n"),
        ("template", "generation prompt", "<|im_start|>assistant\n"),
    ]


def test_a_message_that_the_template_rewrites_once_others_follow(tokenizer):
    chat = tokenizer.render_chat([ASK, ANSWER, MORE])
    texts = {source: text for _, source, text in parts(tokenizer, chat)}
    assert "thought" not in chat.text
    assert texts["messages[1]"] == "<|im_start|>assistant\nA kind of trust.<|im_end|>\n"
    assert texts["messages[2]"] == "<|im_start|>user\nAnd 🙂?<|im_end|>\n"


def test_tools_are_a_segment_of_their_own(tokenizer):
    chat = tokenizer.render_chat([SYSTEM, ASK], TOOLS)
    found = [text for _, source, text in parts(tokenizer, chat) if source == "tools"]
    assert len(found) == 1
    assert "weather" in found[0]
    assert all("weather" not in text for _, source, text in parts(tokenizer, chat) if source != "tools")


def test_a_system_message_that_nobody_gave_is_the_templates(tokenizer, monkeypatch):
    template = tokenizer.hf._tokenizer.chat_template
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are nice.<|im_end|>\n{% endif %}"
    monkeypatch.setattr(tokenizer.hf._tokenizer, "chat_template", default + template.lstrip())
    chat = tokenizer.render_chat([ASK, ANSWER, MORE], TOOLS)
    assert parts(tokenizer, chat)[0] == ("template", "preamble", "<|im_start|>system\nYou are nice.<|im_end|>\n")
    assert [source for _, source, _ in parts(tokenizer, chat)][1:4] == ["tools", "messages[0]", "messages[1]"]
    assert "".join(text for *_, text in parts(tokenizer, chat)) == chat.text
    assert tokenizer.render_chat([SYSTEM, ASK]).segments[0].source == "messages[0]"


def test_thinking(tokenizer):
    assert tokenizer.render_chat([ASK], thinking=False).text.endswith("assistant\n<think></think>")
    assert tokenizer.render_chat([ASK], thinking=True).text.endswith("assistant\n")


def test_what_cannot_be_rendered(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="at least one message"):
        tokenizer.render_chat([])
    with pytest.raises(ValueError, match="message 1 has no role"):
        tokenizer.render_chat([ASK, {"content": "x"}])
    with pytest.raises(ValueError, match=r"refuses.*nobody speaks here"):
        tokenizer.render_chat([{"role": "nobody", "content": "x"}])
    monkeypatch.setattr(type(tokenizer), "has_chat_template", False)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([ASK])
