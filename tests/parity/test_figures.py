"""Pictures show what the report says."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest

from labkit.parity import figures
from labkit.parity.forms import Form
from labkit.parity.predictions import FullLogits
from labkit.parity.teacher_forcing import teacher_forced


class Noisy:
    """A side with noise enough for flips of both kinds."""

    name, arithmetic, form, vocab_size = "noisy", "bfloat16", Form(), 30

    def __init__(self, noise):
        self.noise = noise

    def predict(self, window):
        exact = np.random.default_rng(1).normal(0, 3, (len(window) - 1, 30))
        yield FullLogits((exact + self.noise * np.random.default_rng(2).normal(size=exact.shape)).astype(np.float32))


@pytest.fixture(autouse=True)
def no_window():
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")
    matplotlib.use(before)


@pytest.fixture(scope="module")
def report():
    return teacher_forced(Noisy(0.0), Noisy(0.08), [np.zeros(301, dtype=np.int32)])


def _texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def _legend(figure):
    legend = figure.axes[0].get_legend() or figure.legends[0]
    return [text.get_text() for text in legend.get_texts()]


def test_marked_tokens_are_the_wrong_ones():
    figure = figures.prefixes(
        {"exact": ["a", "b\n"], "mistaken": ["a", ""]}, {"exact": [False] * 2, "mistaken": [False, True]}, "title"
    )
    assert _texts(figure) == ["exact", "a", "b⏎", "mistaken", "a", "·"]
    assert [patch.get_facecolor()[:3] for patch in figure.axes[0].patches].count(matplotlib.colors.to_rgb("C5")) == 1


def test_every_position_and_the_bound_are_drawn(report):
    figure = figures.along({"one": report}, "title")
    (points,) = [line for line in figure.axes[0].lines if len(line.get_xdata()) == report.positions]
    np.testing.assert_allclose(points.get_ydata(), report.comparison.max_difference)


def test_ties_are_counted_in_the_legend(report):
    assert report.near_ties
    assert report.defects
    drawn = figures.ties(report, "title")
    named = [f"near tie ({report.near_ties})", f"defect ({report.defects})", "as wide as a tie"]
    assert _legend(drawn) == named
    assert len(drawn.axes[0].patches) == len({item.tie_width for item in report.disagreements})


def test_bars_beyond_the_bound_stand_out():
    figure = figures.bars({"caught": 1.0, "hidden": 1e-5, "nothing": 0.0}, 5e-4, 1e-5, "title")
    red = matplotlib.colors.to_rgba("C5")
    assert sum(patch.get_facecolor() == red for patch in figure.axes[0].patches) == 1


def test_widths_show_the_levels_to_compare():
    figure = figures.widths([48, 192], [0.004, 0.002], {"published": 0.0004}, "title")
    assert "published" in _legend(figure)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [0.4, 0.2])
