"""Both engines behind one face: what is timed, and that each does all of what it is told."""

from __future__ import annotations

import pytest

import labkit
from labkit.measure.batching import BatchGeneratorSide, EngineSide, Run, Workload, sweep_point
from labkit.measure.batching.sides import Contexts
from labkit.models import LoadedModel
from tests import tiny_models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return labkit.load(tiny_models.write_checkpoint(folder / "hybrid", "hybrid"), graph="adapter")


def test_a_run_counts_from_when_all_rows_decode_until_the_first_ends():
    """Two rows; the second starts late, the first ends early. Steps of 1 s, the last but one takes 3 s."""
    first = [(float(t), 0) for t in (1, 2, 3, 4, 5, 6, 9)]
    second = [(float(t), 1) for t in (4, 5, 6, 9, 10, 11)]
    run = Run.of(sorted(first + second), 2, peak_bytes=7)
    assert run.throughput == 2 / 3  # between 6 s, the second row's third token, and 9 s
    assert (run.gap_median, run.gap_worst) == (3.0, 3.0)
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
        assert sorted(row for _, row in reads) == sorted(list(range(workload.rows)) * workload.answer)
        assert [when for when, _ in reads] == sorted(when for when, _ in reads)
    assert len(read) == 2
    rows = point.as_rows()
    assert [row["side"] for row in rows] == ["labkit", "mlx-lm"]
    assert all(row["throughput"] > 0 and row["gap_worst"] >= row["gap_median"] > 0 for row in rows)
    assert rows[1]["ratio_least"] <= rows[1]["labkit_over_this"] <= rows[1]["ratio_most"]


def test_answers_that_are_over_before_all_rows_decode_are_refused():
    class Late:
        name = "late"

        def run(self, workload):
            return Run.of([(1.0, 0), (2.0, 0), (3.0, 1), (4.0, 1)], 2, peak_bytes=0)

    with pytest.raises(ValueError, match="late never decoded all 2 rows together: 2 tokens a row are over"):
        sweep_point([Late()], Workload.equal(2, 8, 2))
