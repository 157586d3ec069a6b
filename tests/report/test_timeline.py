"""Schedules from logs: the text, the figures, the picture, the command."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import pytest
from typer.testing import CliRunner

from labkit.engine import StepRecord
from labkit.report import timeline


def step(index, kind, rows, leaves=(), cache_bytes=10):
    count = len(rows)
    return StepRecord(
        index, kind, rows, (count, 1), (0,) * count, (1,) * count, ((0,),) * count, (), (), leaves, None, cache_bytes,
        float(index), 1.0,
    )  # fmt: skip


LOG = [
    step(0, "prefill", ("a",)),
    step(1, "decode", ("a",)),
    step(2, "prefill", ("b",)),
    step(3, "decode", ("a", "b"), cache_bytes=30),
    step(4, "decode", ("b",), leaves=("a",)),
    step(5, "read", ("b",), leaves=("b",)),
]


def test_the_text_has_a_line_a_request_and_a_letter_a_step():
    assert timeline.text(LOG, names={"a": "first"}, width=40).splitlines() == [
        "       0",
        "first  Pd.dr",
        "b        Pddr",
    ]


def test_a_long_log_goes_on_below():
    long = [step(i, "decode", ("a",)) for i in range(25)]
    blocks = timeline.text(long, width=13).split("\n\n")
    assert [block.count("d") for block in blocks] == [10, 10, 5]


def test_the_facts_are_counted():
    facts = timeline.facts(LOG)
    assert facts == {
        "steps": 6,
        "chunks": 2,
        "decode_steps": 3,
        "tokens_decoded": 4,
        "most_rows": 2,
        "mean_rows": pytest.approx(4 / 3),
        "chunks_between_two_tokens_of_a_row": 1,
        "peak_cache_bytes": 30,
    }


@pytest.mark.parametrize("against", ["steps", "seconds"])
def test_the_picture_has_a_bar_for_every_cell(against):
    figure = timeline.draw(LOG, "A title", against=against)
    above, below = figure.axes
    assert len(above.patches) == 8, "seven cells of rows, and the last token of a"
    assert [label.get_text() for label in above.get_yticklabels()] == ["a", "b"]
    assert "MB" in below.get_ylabel()
    plt.close(figure)


def test_an_empty_log_is_an_empty_schedule():
    assert timeline.text([]) == ""
    assert timeline.facts([])["steps"] == 0


def test_the_command(tmp_path_factory):
    import typer

    from labkit.report.schedule_command import schedule
    from tests.tiny_models import write_checkpoint

    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder / "hybrid", "hybrid")
    app = typer.Typer()
    app.command()(schedule)
    options = ["--requests", "3", "--longest", "20", "--answer", "4", "--chunk", "8"]
    picture = folder / "schedule.svg"
    shown = CliRunner().invoke(app, [str(folder / "hybrid"), *options, "--svg", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "P" in shown.stdout
    assert picture.read_text().lstrip().startswith("<?xml")
    told = CliRunner().invoke(app, [str(folder / "hybrid"), *options, "--json"])
    record = json.loads(told.stdout)
    assert record["facts"]["steps"] == len(record["steps"]) > 3
    assert record["facts"]["chunks_between_two_tokens_of_a_row"] <= 1
    assert CliRunner().invoke(app, [str(folder / "nothing")]).exit_code == 2
