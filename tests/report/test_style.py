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
