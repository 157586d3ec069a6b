"""Films of memory pressure, drawn."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from labkit.measure.pressure_film import Film
from labkit.report import pressure_pictures


@pytest.mark.parametrize(("steps", "end"), [(None, 3), (9, 9)])
def test_films_of_several_lengths_can_have_one_scale(steps: int | None, end: int) -> None:
    run = Film(("a",), "park", 5_000_000, 4_000_000)
    run.places += [("prefill",), ("decode",), ("decode",)]
    run.bytes += [1_000_000] * 3
    run.outside += [0] * 3
    figure = pressure_pictures.film(run, "title", steps=steps)
    assert {axes.get_xlim() for axes in figure.axes} == {(0, end)}
    plt.close(figure)
