"""The graph that rounds where one says: exact without roundings, the specialised graph's bits with them; the costs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import labkit
from labkit.kernels import use_target
from labkit.kernels.targets import watched
from labkit.measure.tables import measured
from labkit.models import Rows
from labkit.models.hybrid import Hybrid
from labkit.parity import rounded_graph
from labkit.parity.goldens import open_golden
from labkit.parity.rounded_graph import POINTS, RoundedGraph, rounded
from labkit.parity.roundings import (
    CASES,
    PROMPTS,
    Remembered,
    RoundedSide,
    cost,
    predicted_kl_of_rounded_logits,
)
from labkit.parity.teacher_forcing import teacher_forced
from tests.models.hybrid.small import DENSE, TEXT, config, prompt, random_module

POSITIONS = 96


@pytest.fixture(scope="module")
def graph() -> RoundedGraph:
    return RoundedGraph(labkit.load("tiny-hybrid", graph="specialised", dtype=mx.float32).model)


@pytest.fixture(scope="module")
def golden():
    return open_golden("tiny-hybrid/torch-whole")


@pytest.fixture(scope="module")
def exact(graph) -> Remembered:
    return Remembered(RoundedSide(graph, (), "exact"))


@pytest.fixture(scope="module")
def costs(exact, golden):
    windows, known = golden.first(POSITIONS), {}

    def of(case: str) -> dict:
        if case not in known:
            known[case] = cost(exact, case, windows)
        return known[case]

    return of


def test_rounding_is_mlxs():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    ties = (bits[:4000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate([bits, ties]).view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) > 1e-30) & (np.abs(x) < 1e38)]
    np.testing.assert_array_equal(rounded(x), np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_without_roundings_it_is_torchs_model(golden, exact):
    report = teacher_forced(golden, exact, golden.first(POSITIONS))
    assert report.agrees, report.reasons
    assert report.tolerance.max_logit_difference == 5e-4


def test_with_them_a_block_has_the_specialised_graphs_bits(monkeypatch):
    """Up to a sum in another order here and there, which rounds another way; deeper that spreads. Attention's points
    are not held so: where references run, it is MLX's own, with roundings of its own."""
    settings = config(TEXT, num_hidden_layers=2)
    tokens, streams = prompt(24, 5), []
    model = Hybrid.from_module(random_module(settings, seed=3), settings, mx.bfloat16)
    graph, kind = RoundedGraph(model), rounded_graph._Rounding

    def watch(kernel, launch, outputs):
        if kernel.name == "residual_rms_norm" and dict(launch.template)["ADDS"]:
            streams.append(np.array(outputs[0].astype(mx.float32)).reshape(24, -1))

    with use_target("reference"), watched(watch):
        model(tokens, model.make_caches(), Rows.single(), logits="all")

    def share_of_other_bits(points: frozenset[str]) -> float:
        found = []

        class Recording(kind):
            def __call__(self, point, x):
                x = super().__call__(point, x)
                return found.append(x) or x if point == "stream" else x

        monkeypatch.setattr(rounded_graph, "_Rounding", Recording)
        graph.logits(np.array(tokens[0]), points)
        first_block = zip(found[:2], streams[:2], strict=True)
        return float(np.mean([np.mean(mine != theirs) for mine, theirs in first_block]))

    points = PROMPTS - {"weights", "head weights"}  # references use weights exactly
    share = share_of_other_bits(points)
    assert share < 0.1
    for point in points - {"heads", "probabilities", "attention"}:
        assert share_of_other_bits(points - {point}) > 1.5 * share, point
    assert share_of_other_bits(points | {"router"}) > 1.5 * share


def test_every_point_moves_the_logits(graph, golden):
    tokens = golden.windows[0][:24]
    exact = graph.logits(tokens, ())[0]
    for point in POINTS:
        assert np.abs(graph.logits(tokens, {point})[0] - exact).max() > 1e-4, point


def test_rounded_logits_cost_what_was_predicted(exact, golden, costs):
    logits = np.concatenate([part.logits for window in golden.first(POSITIONS) for part in exact.predict(window)])
    assert predicted_kl_of_rounded_logits(logits) == pytest.approx(costs("logits")["mean_kl"], rel=0.2)


def test_float32_logits_and_scores_bring_a_prompt_nearer(costs):
    assert costs("prompts")["mean_kl"] < costs("everything")["mean_kl"]
    assert costs("prompts")["moved"] < costs("everything")["moved"]


def test_most_of_the_distance_is_experts_chosen_otherwise(costs):
    told, own = costs("everything, experts told"), costs("everything")
    assert (told["moved"], told["mean_kl_moved"]) == (0, None)
    assert own["moved"] > 0
    assert own["mean_kl_moved"] > 3 * own["mean_kl_others"]
    assert told["mean_kl"] < own["mean_kl"] / 1.5


def test_the_kept_table_says_what_was_built():
    kept = measured("cpu_bf16_roundings")
    assert [row["case"] for row in kept.rows] == list(CASES)
    row = {case: kept.find(case=case) for case in CASES}
    assert row["prompts"]["flips"] < row["everything"]["flips"] / 2
    assert row["steps"]["flips"] < row["steps, logits rounded"]["flips"] / 1.5
    assert row["steps, stream exact"]["mean_kl"] < 0.75 * row["steps"]["mean_kl"]
    alone = {point: row[point]["mean_kl"] for point in POINTS}
    assert sorted(alone, key=alone.get)[-3:] == ["logits", "stream", "router"]
    for of in row.values():
        assert len(of["beyond"]) == of["flips_beyond_a_near_tie"]


def test_what_is_not_there_is_named(graph):
    with pytest.raises(ValueError, match="no point 'softmax'"):
        graph.logits(np.array([1, 2]), {"softmax"})
    settings = config(DENSE, num_hidden_layers=1)
    with pytest.raises(ValueError, match="sparse hybrids"):
        RoundedGraph(Hybrid.from_module(random_module(settings), settings, mx.float32))
