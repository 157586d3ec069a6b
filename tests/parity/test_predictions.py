"""Two sides at the same positions: full against full, and the bounds that stored best tokens still give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.parity import predictions
from labkit.parity.predictions import BestLogits, FullLogits, aligned, compare


def _pair(n=40, vocabulary=97, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    reference = rng.normal(0, 3, (n, vocabulary)).astype(np.float32)
    candidate = (reference + rng.normal(0, noise, reference.shape)).astype(np.float32)
    return FullLogits(reference), FullLogits(candidate), rng.integers(0, vocabulary, n)


def _log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_full_comparison_is_the_textbook():
    reference, candidate, labels = _pair()
    found = compare(reference, candidate, labels)
    p, q = _log_softmax(reference.logits), _log_softmax(candidate.logits)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-9)
    np.testing.assert_allclose(found.nll_reference, -p[np.arange(40), labels], rtol=1e-12)
    np.testing.assert_allclose(found.nll_candidate, -q[np.arange(40), labels], rtol=1e-12)
    np.testing.assert_allclose(found.max_difference, np.abs(reference.logits - candidate.logits).max(-1), rtol=1e-5)
    assert found.whole.all()
    np.testing.assert_array_equal(found.agrees, p.argmax(-1) == q.argmax(-1))


def test_rows_are_compared_in_pieces_whatever_the_vocabulary(monkeypatch):
    reference, candidate, labels = _pair()
    at_once = compare(reference, candidate, labels)
    monkeypatch.setattr(predictions, "ROWS_TIMES_VOCABULARY", 300)
    in_pieces = compare(reference, candidate, labels)
    np.testing.assert_array_equal(at_once.kl, in_pieces.kl)
    assert len(in_pieces) == 40


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), best=st.integers(1, 97), noise=st.sampled_from([0.0, 0.01, 0.5, 3.0]))
def test_best_tokens_bound_the_full_comparison_from_below(seed, best, noise):
    reference, candidate, labels = _pair(12, noise=noise, seed=seed)
    whole = compare(reference, candidate, labels)
    stored = BestLogits.of(reference, labels, best)
    for found in (
        compare(stored, candidate, labels),
        compare(reference, BestLogits.of(candidate, labels, best), labels),
        compare(stored, BestLogits.of(candidate, labels, best), labels),
    ):
        assert np.all(found.kl <= whole.kl + 1e-9)
        assert np.all(found.max_difference <= whole.max_difference + 1e-6)
        np.testing.assert_allclose(found.nll_reference, whole.nll_reference, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found.nll_candidate, whole.nll_candidate, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found.agrees, whole.agrees)
        known = ~np.isnan(found.margin_reference)
        np.testing.assert_allclose(found.margin_reference[known], whole.margin_reference[known], rtol=1e-6, atol=1e-6)
        assert not found.whole.any()


def test_all_tokens_stored_lose_nothing():
    reference, candidate, labels = _pair()
    found = compare(BestLogits.of(reference, labels, 97), candidate, labels)
    np.testing.assert_allclose(found.kl, compare(reference, candidate, labels).kl, rtol=1e-6, atol=1e-12)


def test_equal_sides_have_no_divergence_even_from_a_few_stored_tokens():
    """The remainder comes from 1 - sum: its rounding must stay far below the float32 tolerance on KL."""
    reference, _, labels = _pair(200)
    found = compare(BestLogits.of(reference, labels, 8), reference, labels)
    assert found.kl.max() < 1e-12
    assert found.max_difference.max() == 0


def test_equal_logits_name_the_lowest_id_on_every_side():
    logits = FullLogits(np.array([[1.0, 3.0, 3.0, 0.0]], dtype=np.float32))
    assert logits.best()[0] == BestLogits.of(logits, np.array([0]), 2).best()[0] == 1


def test_top_gives_probabilities_on_every_side():
    reference, _, labels = _pair(9)
    stored = BestLogits.of(reference, labels, 5)
    for ids, probabilities in (reference.top(3), stored.top(3)):
        np.testing.assert_array_equal(ids, np.argsort(-reference.logits, axis=-1)[:, :3])
        expected = np.take_along_axis(np.exp(_log_softmax(reference.logits)), ids, axis=1)
        np.testing.assert_allclose(probabilities, expected, rtol=1e-6)


def test_a_nan_never_agrees_silently():
    reference, candidate, labels = _pair(2)
    candidate.logits[0, 5] = np.nan
    found = compare(reference, candidate, labels)
    assert np.isnan(found.max_difference[0])
    assert np.isnan(found.kl[0])
    assert np.isnan(found.nll_candidate[0])
    assert np.isfinite(found.kl[1])


@given(
    left=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    right=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_streams_of_any_cut_line_up(left, right):
    total = min(sum(left), sum(right))

    def stream(widths):
        position = 0
        for width in widths:
            width = min(width, total - position)
            if width:
                yield FullLogits(np.arange(position, position + width, dtype=np.float32)[:, None])
            position += width

    seen = []
    for a, b in aligned(stream(left), stream(right)):
        np.testing.assert_array_equal(a.logits, b.logits)
        seen += a.logits[:, 0].tolist()
    assert seen == list(range(total))


@pytest.mark.parametrize(("left", "right", "short"), [(3, 5, "reference"), (5, 3, "candidate")])
def test_a_side_that_falls_silent_is_an_error(left, right, short):
    block = lambda n: iter([FullLogits(np.zeros((n, 2), dtype=np.float32))])
    with pytest.raises(ValueError, match=f"the {short} predicts fewer"):
        list(aligned(block(left), block(right)))
