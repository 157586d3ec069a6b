"""Text as it may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.text import StopStrings, TextStream
from labkit.models.detokenizer import ByteLevelDetokenizer, WindowDetokenizer


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def by_letters(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself: the first place where a stop string is complete; the longest that ends there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "wanted"),
    [
        (["be", "ta ga", "mma"], ["beta gamma"], ("", "beta gamma")),
        (["alpha be", "ta ga", "mma!"], ["beta gamma"], ("alpha ", "beta gamma")),
        (["beta ga", "lore"], ["beta gamma"], ("beta galore", None)),
        (["aab", "aabaaac"], ["aabaaac"], ("aab", "aabaaac")),
        (["ab", "cd"], ["bcd", "abcd"], ("", "abcd")),
        (["ab", "cd"], ["abcd", "bc"], ("a", "bc")),
        (["x", "", "y"], ["z"], ("xy", None)),
        (["end"], ["end"], ("", "end")),
        (["en"], ["end"], ("en", None)),
    ],
)
def test_stop_strings_across_pieces(pieces, stops, wanted):
    assert run(pieces, stops) == wanted


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_how_text_is_cut_changes_nothing(pieces, stops):
    assert run(pieces, stops) == by_letters("".join(pieces), stops)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_shown(pieces, stops):
    matcher, shown, whole = StopStrings(stops), "", "".join(pieces)
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            break
    final, _ = by_letters(whole, stops)
    assert final.startswith(shown)


@given(text=st.text(max_size=30), cuts=st.data())
def test_bytes_come_as_whole_characters(text, cuts):
    data = text.encode()
    pieces, at = [], 0
    while at < len(data):
        n = cuts.draw(st.integers(1, 3))
        pieces.append(data[at : at + n])
        at += n
    detokenizer = ByteLevelDetokenizer(lambda token: pieces[token])
    shown = [detokenizer.add(i) for i in range(len(pieces))]
    assert "".join(shown) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=10))
def test_bytes_that_are_no_text_decode_as_a_whole_decodes(pieces):
    detokenizer = ByteLevelDetokenizer(lambda token: pieces[token])
    shown = "".join(detokenizer.add(i) for i in range(len(pieces))) + detokenizer.finish()
    assert shown == b"".join(pieces).decode("utf-8", "replace")


def test_the_window_form_with_a_decoder_that_drops_the_first_space():
    words = ["▁I", "▁am", "▁na", "ïve", "\xf0", "\x9f", "\x99", "\x82", "▁ok"]

    def decode(tokens: list[int]) -> str:
        raw = b"".join(
            words[t].encode("latin-1") if len(words[t]) == 1 and ord(words[t]) > 127 else words[t].encode()
            for t in tokens
        )
        return raw.decode("utf-8", "replace").replace("▁", " ").removeprefix(" ")

    detokenizer = WindowDetokenizer(decode)
    pieces = [detokenizer.add(i) for i in range(len(words))]
    assert "".join(pieces) + detokenizer.finish() == "I am naïve🙂 ok"
    assert pieces[4:8] == ["", "", "", "🙂"]


def test_what_is_held_comes_at_the_end():
    pieces = [b"caf\xc3", b"\xa9 be", b"ta", b"\xf0\x9f"]
    stream = TextStream(ByteLevelDetokenizer(lambda token: pieces[token]), ["beta gamma"])
    shown = [stream.add(i)[0] for i in range(4)]
    assert shown == ["caf", "é ", "", ""]
    assert stream.finish() == ("beta\ufffd", None)
