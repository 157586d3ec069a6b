"""The slider: whole in itself, accessible, equal bytes for equal data, and honest about bad frames."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from labkit.report.axes import CHARACTER, WIDTH, Axis, Canvas
from labkit.report.frames import Frame, plot_html

X, Y = Axis("context", 1, 64, log=2), Axis("GB", 0, 6)
FRAMES = [
    Frame("4 <tokens>", {"a": ([1, 8, 64], [1, 2, 3]), "b": ([1, 64], [5, 6])}, "first & last"),
    Frame("8 tokens", {"a": ([1, 8, 64], [3, 2, 1]), "b": ([1, 64], [0, 1])}),
]


def html(frames=FRAMES, **kwargs) -> str:
    return plot_html(frames, title="Bytes </script> read", slider="context", x=X, y=Y, **kwargs)


def parse(text: str) -> ET.Element:
    """The block as XML, once its attributes without a value are written out."""
    text = re.sub(r"<(input|img)([^>]*?)>", r"<\1\2/>", text).replace("data-mark ", 'data-mark="" ')
    return ET.fromstring(re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", text, flags=re.DOTALL))


def test_nothing_is_fetched() -> None:
    assert not re.search(r"https?:|//|@import|url\(", html())
    assert "<link" not in html()
    assert "src=" not in html()


def test_is_accessible_and_shows_its_first_position_without_a_script() -> None:
    root = parse(html())
    slider, label = root.find(".//input"), root.find(".//label")
    assert slider.attrib["type"] == "range"
    assert label.attrib["for"] == slider.attrib["id"]
    assert slider.attrib["aria-valuetext"] == root.find(".//output").text == "4 <tokens>"
    assert root.find(".//svg").attrib["role"] == "img"
    assert root.find(".//svg").attrib["aria-label"] == "Bytes </script> read"
    marks = [path.attrib["d"] for path in root.iter("path") if "data-mark" in path.attrib]
    assert marks == frames_data()[0]["d"]


def frames_data() -> list[dict]:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html()).group(1))


def test_text_cannot_end_the_script_early() -> None:
    assert html().count("</script>") == 2
    assert frames_data()[0]["label"] == "4 <tokens>"


def test_equal_data_gives_equal_bytes_and_other_data_another_id() -> None:
    ids = re.compile(r'id="(labkit-\w+)"')
    assert html() == html()
    assert ids.search(html()).group(1) != ids.search(html(FRAMES[:1])).group(1)


def test_colours_follow_the_page() -> None:
    assert "currentColor" in html()
    assert "white" not in html()
    assert "black" not in html()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "at least one frame"),
        ([FRAMES[0], Frame("other", {"a": ([1], [1])})], "frame 'other' has the series"),
        ([Frame("odd", {"a": ([1, 2], [1])})], "2 x values but 1 y"),
    ],
)
def test_bad_frames_are_refused(frames: list[Frame], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        html(frames)


@pytest.mark.parametrize("names", [["one", "two"], [f"a name of a series, {n}" for n in range(7)]])
def test_no_mark_can_lie_below_the_legend(names: list[str]) -> None:
    """Every entry stands above the plot area, whole, and beside or below the entry before it."""
    canvas = Canvas(X, Y, names)
    text = canvas.document("title", "", ["#000000"] * len(names))
    boxes = [
        (float(x), float(y), float(x) + CHARACTER * len(name))
        for x, y, name in re.findall(r'<text x="([\d.]+)" y="([\d.]+)">(.*?)</text>', text)
    ]
    assert len(boxes) == len(names)
    highest = canvas.at(1, Y.high)[1]
    assert all(y < highest and end <= WIDTH for _, y, end in boxes)
    for (_, above, end), (start, y, _) in pairwise(boxes):
        assert (y == above and start > end) or (y > above and start == boxes[0][0])


def test_a_point_beyond_the_axis_is_not_drawn_at_its_edge() -> None:
    beyond = Frame("more", {"a": ([1, 64], [1, 12]), "b": ([1, 64], [5, 6])})
    assert html([beyond]) == plot_html(
        [beyond], title="Bytes </script> read", slider="context", x=X, y=Axis("GB", 0, 12)
    )


class TestAxis:
    def test_log_axis_places_powers_evenly(self) -> None:
        assert [X.share(value) for value in (1, 8, 64)] == pytest.approx([0, 0.5, 1])
        assert [text for _, text in X.tick_marks()] == ["1", "2", "4", "8", "16", "32", "64"]

    def test_linear_ticks_are_round_and_inside(self) -> None:
        for low, high in ((0, 6), (0, 1), (-3, 17), (0.02, 0.09), (0, 12_345)):
            ticks = [value for value, _ in Axis("y", low, high).tick_marks()]
            assert 3 <= len(ticks) <= 8
            assert low - 1e-9 <= ticks[0] <= ticks[-1] <= high + 1e-9

    def test_values_beyond_the_range_stay_at_its_edge(self) -> None:
        assert (Y.share(-5), Y.share(99)) == (0, 1)

    @pytest.mark.parametrize(("low", "high", "log"), [(2, 1, None), (1, 1, None), (0, 5, 10)])
    def test_impossible_ranges_are_refused(self, low: float, high: float, log: int | None) -> None:
        with pytest.raises(ValueError, match="axis 'y'"):
            Axis("y", low, high, log=log)

    def test_a_longer_axis_holds_what_lies_beyond_it(self) -> None:
        longer = Y.holding([3, 8, -1])
        assert (longer.low, longer.high) == (-1, 8)
        assert Y.holding([1, 5]) == Y
        logarithmic = Axis("s", 1e-3, 1, log=10).holding([0, 1e-4])
        assert (logarithmic.low, logarithmic.high) == (1e-4, 1)

    def test_small_powers_are_written_as_powers(self) -> None:
        ticks = [text for _, text in Axis("nat", 1e-7, 1, log=10).tick_marks()]
        assert ticks == ["10⁻⁷", "10⁻⁶", "10⁻⁵", "0.0001", "0.001", "0.01", "0.1", "1"]

    def test_the_last_tick_is_written_whole(self) -> None:
        wide = Canvas(Axis("tokens", 1024, 131072, log=2), Y).document("t", "", [])
        across = float(re.search(r'x="([\d.]+)"[^>]*>131,072<', wide).group(1))
        assert across + CHARACTER * len("131,072") / 2 <= WIDTH

    def test_bars_of_two_series_do_not_overlap(self) -> None:
        canvas = Canvas(Axis("", -0.5, 2.5), Y)
        first, second = (canvas.bars([0], [6], slot=slot, slots=2) for slot in (0, 1))
        left, width = (float(re.search(pattern, first).group(1)) for pattern in (r"M([\d.]+)", r"h([\d.]+)"))
        assert float(re.search(r"M([\d.]+)", second).group(1)) >= left + width
