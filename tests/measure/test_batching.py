"""Both engines behind one face: what is timed, and that each does all of what it is told."""

from __future__ import annotations

import json

import pytest

import labkit
from labkit.measure import tables
from labkit.measure.batching import BatchGeneratorSide, EngineSide, Run, Workload, live_bytes, sweep_point, table
from labkit.measure.batching.sides import Contexts, Read
from labkit.models import LoadedModel
from tests import tiny_models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return labkit.load(tiny_models.write_checkpoint(folder / "hybrid", "hybrid"), graph="adapter")


def test_a_run_counts_from_when_all_rows_decode_until_the_first_ends():
    """Two rows; the second starts late, the first ends early. Steps of 1 s, the last but one takes 3 s."""
    first = [Read(float(t), 0, t / 2) for t in (1, 2, 3, 4, 5, 6, 9)]
    second = [Read(float(t), 1, t / 2) for t in (4, 5, 6, 9, 10, 11)]
    run = Run.of(sorted(first + second), 2, peak_bytes=7)
    assert run.throughput == 2 / 3  # between 6 s, the second row's third token, and 9 s
    assert (run.gap_median, run.gap_worst) == (3.0, 3.0)
    assert run.processor == (9 - 6) / 2 / 2
    assert (run.first_mean, run.first_last, run.seconds, run.peak_bytes) == (2.5, 4.0, 11.0, 7)


def test_unequal_contexts_are_one_geometric_row_in_a_fixed_order():
    workload = Workload.unequal(5, 512, 4)
    assert sorted(workload.contexts) == [32, 64, 128, 256, 512]
    assert workload == Workload.unequal(5, 512, 4)
    assert [len(prompt) for prompt in workload.prompts(100)] == [n + 1 for n in workload.contexts]
    assert workload.sampling == {}
    assert workload.sampled().sampling == {"temperature": 0.8, "top_p": 0.95}


@pytest.mark.parametrize(
    "workload",
    [
        Workload.unequal(3, 64, 4),
        Workload("unequal", (9, 4, 17), 4, prefilled=False),
        Workload.equal(2, 16, 4).sampled(),
    ],
    ids=["contexts that are there", "prompts", "sampled"],
)
def test_both_sides_read_every_token_of_every_row(loaded, monkeypatch, workload):
    contexts, read = Contexts(loaded.model.layouts), []
    sides = [
        EngineSide(loaded, contexts),
        BatchGeneratorSide(loaded.model.module, contexts, "mlx-lm", vocabulary=loaded.model.vocab_size),
    ]
    of = Run.of.__func__
    monkeypatch.setattr(
        Run, "of", classmethod(lambda cls, reads, *rest: (read.append(reads), of(cls, reads, *rest))[1])
    )
    point = sweep_point(sides, workload, rounds=1)
    for reads in read:
        assert sorted(read.row for read in reads) == sorted(list(range(workload.rows)) * workload.answer)
        assert [read.when for read in reads] == sorted(read.when for read in reads)
    assert len(read) == 2
    rows = point.as_rows()
    assert [row["side"] for row in rows] == ["labkit", "mlx-lm"]
    assert all(
        row["throughput"] > 0 and row["processor"] > 0 and row["gap_worst"] >= row["gap_median"] > 0 for row in rows
    )
    assert rows[1]["ratio_least"] <= rows[1]["labkit_over_this"] <= rows[1]["ratio_most"]


def test_answers_that_are_over_before_all_rows_decode_are_refused():
    class Late:
        name = "late"

        def run(self, workload):
            return Run.of([Read(1.0, 0), Read(2.0, 0), Read(3.0, 1), Read(4.0, 1)], 2, peak_bytes=0)

    with pytest.raises(ValueError, match="late never decoded all 2 rows together: 2 tokens a row are over"):
        sweep_point([Late()], Workload.equal(2, 8, 2))


def test_a_quick_side_runs_again_within_its_turn_and_a_slow_point_ends_early(monkeypatch):
    """A side of 0.1 s beside one of 1 s: the clock moves by what they say."""
    now, told = [0.0], {"quick": [], "slow": []}
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Timed:
        def __init__(self, name: str, seconds: float):
            self.name, self.seconds = name, seconds

        def run(self, workload):
            now[0] += self.seconds
            told[self.name].append(len(told[self.name]) + 1)
            return Run(10.0 * (len(told[self.name]) % 3 + 1), 0, 0, 0, 0, 0, self.seconds, 0, 0)

    sides = [Timed("quick", 0.1), Timed("slow", 1.0)]
    point = sweep_point(sides, Workload.equal(1, 8, 2), rounds=9, turn=0.25, seconds=3.0)
    assert {name: len(runs) for name, runs in told.items()} == {"quick": 9, "slow": 3}
    assert [run.throughput for run in point.runs["quick"]] == [20.0] * 3  # of 20, 30 and 10
    assert [run.throughput for run in point.runs["slow"]] == [20.0, 30.0, 10.0]


def test_bytes_are_those_of_what_lives():
    """bfloat16 keys and values of two heads of 256: 2,048 bytes a token and layer."""
    lengths = [256 + 4 * n for n in range(8)]
    rectangle, paged = live_bytes(lengths, shared=256), live_bytes(lengths, shared=256, block_tokens=16)
    assert rectangle >= 8 * max(lengths) * 2048
    assert 256 * 2048 <= paged <= rectangle / 2
    assert live_bytes(lengths, block_tokens=16) >= sum(lengths) * 2048


def test_a_kept_run_reads_as_curves(tmp_path):
    point = {"name": "batched decode", "lengths": "equal", "choice": "greedy", "throughput": 10.0, "processor": 0.05}
    point |= {
        "gap_median": 0.1,
        "gap_worst": 0.2,
        "first_mean": 1.0,
        "peak_bytes": 3_000_000,
        "floor_tokens_a_second": 20.0,
    }
    ratio = {"labkit_over_this": 2.0, "ratio_least": 1.5, "ratio_most": 2.5}
    rows = [point | {"rows": n, "side": "labkit"} for n in (8, 1)] + [point | {"rows": 8, "side": "other"} | ratio]
    path = tmp_path / "cpu_batching.json"
    path.write_text(json.dumps({"device": "x", "commit": "y", "date": "z", "rows": rows}))
    found = table.curves(tables.read(path), "batched decode")
    assert {side: [row["rows"] for row in points] for side, points in found.items()} == {"labkit": [1, 8], "other": [8]}
    shown = table.lines(found)
    assert [line[:2] for line in shown] == [[1, "labkit"], [8, "labkit"], [8, "other"]]
    assert shown[-1][2:] == ["10.0", "50.00", "100.0", "200.0", "1.00", "3.0", "2.0 (1.5 to 2.5)"]
    assert table.curves(None, "batched decode") == {}
