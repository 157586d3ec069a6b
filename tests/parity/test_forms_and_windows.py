"""How a text is cut: into windows, and a window into forwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.parity.forms import LOGITS_BYTES, Form
from labkit.parity.windows import windows_across, windows_of


@given(
    length=st.integers(1, 3000),
    prefill=st.integers(0, 700),
    chunk=st.none() | st.integers(1, 600),
    vocabulary=st.sampled_from([256, 8192, 248_320, 10**9]),
    kind=st.sampled_from(["whole", "incremental"]),
)
def test_forwards_read_everything_once_within_bounds(length, prefill, chunk, vocabulary, kind):
    widths = Form(kind, prefill, chunk).widths(length, vocabulary)
    assert sum(widths) == length
    assert all(width > 0 for width in widths)
    bound = chunk or max(1, LOGITS_BYTES // (4 * vocabulary))
    assert max(widths) <= max(1, bound)
    if kind == "incremental":
        assert widths.count(1) >= length - prefill
        assert sum(widths[: len(widths) - max(0, length - prefill)]) == min(prefill, length)


def test_a_whole_sequence_is_one_forward_if_it_fits():
    assert Form().widths(512, 8192) == [512]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("sideways",), "whole, incremental"), (("whole", -1), "prefill"), (("whole", 0, 0), "at least one token")],
)
def test_a_form_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Form(*arguments)


@given(st.integers(1, 400), st.integers(1, 90))
def test_windows_predict_every_position_once(positions, length):
    tokens = np.arange(500)
    windows = windows_of(tokens, positions, length)
    assert all(2 <= len(window) <= length + 1 for window in windows)
    np.testing.assert_array_equal(np.concatenate([window[1:] for window in windows]), tokens[1 : positions + 1])


@given(positions=st.integers(1, 250), length=st.integers(1, 60))
def test_windows_across_texts_take_each_in_turn(positions, length):
    texts = ["a" * 100, "b" * 31, "c" * 130]
    windows = windows_across(texts, lambda text: [ord(c) for c in text], positions, length)
    assert sum(len(window) - 1 for window in windows) == positions
    assert all(len(set(window.tolist())) == 1 for window in windows)
    if positions >= 3 * length and length <= 30:
        assert [chr(window[0]) for window in windows[:3]] == ["a", "b", "c"]


@pytest.mark.parametrize(("positions", "length"), [(0, 5), (5, 0), (-1, 3)])
def test_windows_need_positive_sizes(positions, length):
    with pytest.raises(ValueError, match="at least 1"):
        windows_of(range(10), positions, length)
    with pytest.raises(ValueError, match="at least 1"):
        windows_across(["abc"], list, positions, length)


def test_a_short_text_says_how_much_is_missing():
    with pytest.raises(ValueError, match="20 predictions need 21 tokens; the text has 20"):
        windows_of(range(20), 20)
    with pytest.raises(ValueError, match="4 positions were asked for; the texts have 3"):
        windows_across(["abcd", ""], lambda text: [ord(c) for c in text], 4)
