"""Rendering a conversation: tokens, and which message every token came from.

The map of segments lets a later reader say what changed between two prompts ("the system message", "tools") instead of
"token 1312 differs".
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """Tokens start to end (end excluded) of a prompt.

    Attributes:
        role: "system", "user", "assistant", "tool", or "template" for what the template adds.
        source: "messages[3]", "tools", "generation prompt", or "preamble" for a system message that the template adds.
    """

    role: str
    source: str
    start: int
    end: int


class RenderedChat(NamedTuple):
    """A prompt: its tokens, segments that cover them in order, and its text."""

    tokens: list[int]
    segments: list[Segment]
    text: str


def render(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: bool
) -> RenderedChat:
    """See `Tokenizer.render_chat`."""
    if not tokenizer.has_chat_template:
        raise ValueError("this model has no chat template: give the prompt as text or as tokens")
    if not messages:
        raise ValueError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role: {message!r}")

    def template(part: list[dict[str, Any]], *, prompt: bool = False, with_tools: bool = True) -> str:
        return tokenizer.hf.apply_chat_template(
            part,
            tools=tools if with_tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
            enable_thinking=thinking,
        )

    try:
        text = template(messages, prompt=True)
    except Exception as error:  # templates raise whatever jinja or their authors chose
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    if tools:
        without = template(messages, prompt=True, with_tools=False)
        plain = _message_spans(without, messages, lambda part: template(part, with_tools=False))
        spans = _with_tools(text, without, plain)
    else:
        spans = _message_spans(text, messages, template)
    tokens, starts = _tokens_with_offsets(tokenizer, text)
    segments = []
    for role, source, start, end in spans:
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        if last > first:
            segments.append(Segment(role, source, first, last))
    return RenderedChat(tokens, segments, text)


def _message_spans(text: str, messages: list[dict[str, Any]], template: Any) -> list[tuple[str, str, int, int]]:
    """(role, source, first character, end) of each message and of the generation prompt."""
    begin = _preamble(text, template) if messages[0]["role"] != "system" else 0
    spans = [("template", "preamble", 0, begin)]
    for index, message in enumerate(messages):
        end = _end_of_message(text, begin, messages[: index + 1], template)
        spans.append((message["role"], f"messages[{index}]", begin, end))
        begin = end
    spans.append(("template", "generation prompt", begin, len(text)))
    return spans


_QUESTION = {"role": "user", "content": "x"}


def _preamble(text: str, template: Any) -> int:
    """Characters that the template puts before a first question: a default system message, for one."""
    try:
        one, two = template([_QUESTION]), template([_QUESTION, _QUESTION])
    except Exception:  # a template may insist on turns
        return 0
    length = 2 * len(one) - len(two)
    return length if length > 0 and text.startswith(one[:length]) else 0


def _end_of_message(text: str, begin: int, messages: list[dict[str, Any]], template: Any) -> int:
    """Where the last of `messages` ends in `text`, in which others follow it."""

    def rendered(part: list[dict[str, Any]]) -> str:
        try:
            return template(part)
        except Exception:  # a template may refuse a conversation that ends like this
            return ""

    prefix = rendered(messages)
    if len(prefix) >= begin and text.startswith(prefix):
        return len(prefix)
    # The template writes this message differently once others follow (it drops old thinking, for one). Let others
    # follow: one question more makes the text longer by one question, so the message ends that much before the first.
    one, two = rendered([*messages, _QUESTION]), rendered([*messages, _QUESTION, _QUESTION])
    end = 2 * len(one) - len(two)
    if one and two and end >= begin and text.startswith(one[:end]):
        return end
    content = messages[-1].get("content")
    content = content.strip() if isinstance(content, str) else ""
    found = text.find(content, begin) if content else -1
    return found + len(content) if found >= 0 else max(begin, _common(text, prefix))


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_tools(text: str, without: str, spans: list[tuple[str, str, int, int]]) -> list[tuple[str, str, int, int]]:
    """The spans of the text `without` tools -> spans of `text`, where what only tools put there has one of its own."""
    start = _common(text, without)
    shared = min(_common(text[::-1], without[::-1]), len(without) - start, len(text) - start)
    end, end_without = len(text) - shared, len(without) - shared
    if end <= start:
        return spans
    # Where the block's end repeats what stands before it, it may as well begin earlier: best where a message ends.
    slack = _common(text[:start][::-1], text[:end][::-1])
    for boundary in sorted({last for *_, last in spans} | {0}, reverse=True):
        if start - slack <= boundary <= start:
            start, end, end_without = boundary, end - (start - boundary), end_without - (start - boundary)
            break

    def moved(at: int) -> int:
        return at if at <= start else max(end, at - end_without + end)

    result = []
    for role, source, first, last in spans:
        if first < start:
            result.append((role, source, first, min(last, start)))
        if first <= start <= last and not any(source == "tools" for _, source, *_ in result):
            result.append(("template", "tools", start, end))
        if last > start:
            result.append((role, source, max(end, moved(first)), moved(last)))
    return result


def _tokens_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Tokens, and the character at which each begins."""
    if getattr(tokenizer.hf, "is_fast", False):
        encoded = tokenizer.hf._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, starts, length = tokenizer.detokenizer(), [], 0
    for token in tokens:
        starts.append(length)
        length += len(detokenizer.add(token))
    return tokens, starts
