"""`live` in a report: drawn once, at the first values, into the cell itself."""

from __future__ import annotations

import time

import IPython.display
import pytest
from ipywidgets import IntSlider, Output, fixed

from labkit.report import live, widgets
from labkit.report.worker import STATIC_VARIABLE


def test_a_report_shows_one_drawing_at_the_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATIC_VARIABLE, "1")
    # An Output widget would make the client send messages on while it waits for the cell's reply.
    monkeypatch.setattr(Output, "__enter__", lambda _: pytest.fail("drawn into a widget that a page cannot show"))
    drawn: list[dict] = []

    def draw(size, kind, own, on, kept, start=7) -> None:
        drawn.append({"size": size, "kind": kind, "own": own, "on": on, "kept": kept, "start": start})

    own = IntSlider(3, 1, 5, description="a title of its own")
    live(draw, size=(1, 9), kind=["a", "b"], own=own, on=True, kept=fixed("x"), start=(1, 20))
    assert drawn == [{"size": 5, "kind": "a", "own": 3, "on": True, "kept": "x", "start": 7}]


@pytest.mark.parametrize(("seconds", "follows"), [(0.0, True), (1.1, False)])
def test_a_slow_drawing_waits_until_a_slider_is_let_go(monkeypatch: pytest.MonkeyPatch, seconds: float, follows: bool):
    monkeypatch.delenv(STATIC_VARIABLE, raising=False)
    monkeypatch.setattr(widgets, "AT_ONCE", 1.0)
    panels: list = []
    monkeypatch.setattr(IPython.display, "display", panels.append)
    drawn: list[int] = []

    def draw(size, kind) -> None:
        time.sleep(seconds)
        drawn.append(size)

    live(draw, size=(1, 9), kind=["a", "b"])
    (panel,) = panels
    assert drawn == [5]
    assert panel.kwargs_widgets[0].continuous_update is follows
