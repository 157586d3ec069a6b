"""Near tie or defect: the grid of bfloat16, both margins, and what is not known."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.parity.near_ties import LARGEST_TIE, bf16_step, is_near_tie, tie_width


@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_step_is_the_spacing_that_mlx_rounds_to(logit):
    """The next bfloat16 above x is one step away, and half a step less is rounded away."""
    below = float(mx.array(logit, dtype=mx.float32).astype(mx.bfloat16).astype(mx.float32).item())
    below = below if below <= logit else below - float(bf16_step(logit)) / 2
    step = float(bf16_step(below))
    rounded = lambda x: float(mx.array(x, dtype=mx.float32).astype(mx.bfloat16).astype(mx.float32).item())
    grid = np.floor(below / step) * step
    assert rounded(grid) == grid
    assert rounded(grid + step) == grid + step
    assert rounded(grid + 0.25 * step) == grid


@pytest.mark.parametrize(
    ("logit", "width"), [(0, 0), (1, 2**-7), (3.9, 2**-6), (8, 2**-4), (15.9, 2**-4), (-16, 0.125), (200, 0.125)]
)
def test_tie_width_grows_with_the_logit_and_stops(logit, width):
    assert tie_width(logit) == width <= LARGEST_TIE


@pytest.mark.parametrize(
    ("reference", "candidate", "magnitude", "tie"),
    [
        (0.0, 0.0, 10.0, True),
        (0.0625, 0.0625, 10.0, True),
        (0.0626, 0.0, 10.0, False),  # the reference was sure
        (0.01, 4.0, 10.0, False),  # the candidate is sure of a token that the reference nearly ties
        (0.125, 0.125, 100.0, True),
        (0.2, 0.2, 100.0, False),  # a bfloat16 step of 0.5 excuses nothing beyond 0.125 nat
        (np.nan, 0.0, 10.0, False),  # beyond the stored tokens: proves nothing
        (0.0, np.nan, 10.0, False),
        (0.0, 0.0, np.nan, False),
    ],
)
def test_a_flip_needs_both_margins_within_a_step(reference, candidate, magnitude, tie):
    assert is_near_tie(np.array([reference]), np.array([candidate]), np.array([magnitude]))[0] == tie
