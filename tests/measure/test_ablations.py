"""Mechanisms taken away: switches that exist, predictions by count, engine against control."""

import pytest

from labkit.measure.end_to_end import Plan, Point


def test_every_ablation_changes_a_switch_that_there_is_and_names_a_figure_that_is_printed():
    from labkit.measure.end_to_end.ablations import ABLATIONS
    from labkit.measure.published import published
    from labkit.models.hybrid import Variants

    printed = published("specialised-engine")
    for ablation in ABLATIONS:
        assert Variants(**ablation.base) != Variants(**ablation.base | ablation.control), ablation.name
        names = {point.name for point in ablation.points}
        assert set(ablation.published) <= names
        assert set(ablation.published.values()) <= set(printed)
    assert len({ablation.name for ablation in ABLATIONS}) == len(ABLATIONS)


def test_predictions_are_bytes_over_rates(costs):
    from labkit.measure.end_to_end import ablations
    from labkit.measure.floors import Floors, Rate

    machine = ablations.Machine(Floors(None, Rate(1e12, ""), Rate(1e14, "")), wait=1e-4, launch=5e-6)
    extra = {a.name: a.extra for a in ablations.ABLATIONS}
    # Sixteen query heads over two KV heads: eight reads instead of one.
    assert extra["query heads share a read"](costs, machine, 32768) == pytest.approx(7 * costs.kv_bytes(32768) / 1e12)
    # The published figure of state traffic: 256 MiB a layer at 2K, less the one read and write that remain.
    state = extra["recurrent state in registers"](costs, machine, 2048) * 1e12 / 30
    assert state == pytest.approx((256 - 4) * 2**20, rel=1e-6)
    assert extra["routing stays on the device"](costs, machine, 512) == pytest.approx(40e-4)
    launches = extra["norms, rotation and the new column in one launch"](costs, machine, 4096)
    assert launches == pytest.approx(5 * 10 * 5e-6)


def test_ablations_compare_the_engine_with_its_control(small):
    from labkit.kernels.targets import use_target
    from labkit.measure import floors
    from labkit.measure.end_to_end import ablations
    from labkit.measure.end_to_end.subject import Subject
    from labkit.models.hybrid import Hybrid

    hybrid = Hybrid.from_module(small.module, small.config)
    subject = Subject("small", "specialised", hybrid, small.module, small.config, "", small.weights_bytes)
    machine = ablations.Machine(floors.Floors(None, floors.Rate(1e10, ""), floors.Rate(1e10, "")), 1e-4, 1e-5)
    heads = ablations.Ablation(
        "heads", {"heads": "unpacked"}, "reads", (Point("decode", 8),), lambda costs, machine, tokens: 0.5
    )
    with use_target("simulator"):
        (record,) = ablations.run(
            subject, machine, Plan.of([], [8], rounds=1, steps=1, warm_up=0), chosen=[heads], skew=0.5
        )
    assert record["predicted_seconds"] == 0.5
    assert record["skew"] == 0.5
    assert record["gain"] == pytest.approx(1 + record["measured_seconds"] / record["engine_seconds"])
    columns, rows = ablations.rows([record])
    assert len(rows[0]) == len(columns)


def test_the_adapter_has_no_switches(small):
    from labkit.measure.end_to_end.subject import Subject
    from labkit.models import LoadError
    from labkit.models.hybrid import Variants

    subject = Subject("small", "adapter", small.model, small.module, small.config, "", small.weights_bytes)
    with pytest.raises(LoadError, match="--graph specialised"):
        subject.with_variants(Variants())
