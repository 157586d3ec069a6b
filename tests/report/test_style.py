"""One style: SVG whose bytes repeat, text that stays text."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from labkit.report import diagram, style


@pytest.fixture(autouse=True)
def restored():
    with mpl.rc_context():
        style.use()
        yield
    plt.close("all")


def draw() -> str:
    figure, axes = plt.subplots()
    axes.plot([0, 1, 2], [2, 1, 3], label="a line")
    axes.fill_between([0, 1], [0, 1], color=style.ORANGE)
    axes.legend()
    axes.set_title("Words that can be searched")
    return style.svg(figure)


def test_equal_drawings_give_equal_bytes() -> None:
    assert draw() == draw()


def test_nothing_in_it_depends_on_the_day() -> None:
    assert "<dc:date>" not in draw()


def test_text_stays_text() -> None:
    assert ">Words that can be searched<" in draw()


@pytest.mark.parametrize(
    "figure",
    [
        lambda: diagram.layer_stack(["Gated DeltaNet", "full attention"], "8 experts", "two layers"),
        lambda: diagram.shares({"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0, "z": 2.0}}, "shares"),
    ],
)
def test_diagrams_repeat(figure) -> None:
    assert style.svg(figure()) == style.svg(figure())


def test_shares_of_a_row_add_up_to_one() -> None:
    axes = diagram.shares({"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0, "z": 2.0}}, "shares").axes[0]
    for row in (0, 1):
        widths = [bars.patches[row].get_width() for bars in axes.containers]
        assert sum(widths) == pytest.approx(1)


def test_a_waterfall_ends_at_what_was_measured_also_where_more_was_predicted() -> None:
    (axes,) = diagram.waterfall({"floor": 60.0, "launches": 70.0, "not predicted": -30.0}, "t", "us").axes
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert spans == [(0, 60), (60, 130), (130, 100), (0, 100)]
    assert [text.get_text() for text in axes.texts] == ["60", "70", "-30", "100"]
    assert axes.get_xlim()[1] > 130
    back, forth = axes.patches[2], axes.patches[1]
    assert back.get_facecolor() != forth.get_facecolor()


def test_large_numbers_on_an_axis_are_grouped_as_beside_its_bars() -> None:
    for figure in (diagram.parts({"a": 4000.0}, "t", "us"), diagram.waterfall({"a": 4000.0}, "t", "us")):
        figure.canvas.draw()
        assert "1,000" in [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
