"""Fitted costs: growth that the model's terms explain, and growth that they do not; the tables of both."""

import json

import pytest

from labkit.measure import model_costs
from labkit.measure.end_to_end import Plan, measure, sides_for, table
from labkit.measure.end_to_end.curves import decode_curve, prefill_curve
from labkit.measure.end_to_end.plan import LENGTHS
from tests.measure.conftest import Clock


def prefill_seconds(costs, length, matrices=1e13, attention=5e12, constant=0.002):
    scores = costs.prefill_by_part(length)["attention scores"]
    return constant + (costs.prefill_operations(length) - scores) / matrices + scores / attention


def test_a_cost_that_grows_as_the_model_says_is_recognised(costs):
    curve = prefill_curve(costs, LENGTHS, [prefill_seconds(costs, n) for n in LENGTHS])
    assert curve.as_predicted
    assert [term.rate for term in curve.terms[1:]] == pytest.approx([1e13, 5e12], rel=1e-3)
    assert curve.fitted() == pytest.approx(curve.seconds, rel=1e-6)


def test_attention_in_all_layers_is_too_much(costs):
    """Forty layers that look back, instead of ten."""
    curve = prefill_curve(costs, LENGTHS, [prefill_seconds(costs, n, attention=1e13 / 4) for n in LENGTHS])
    assert not curve.as_predicted
    assert "more grows than is counted" in curve.reasons[0]


def test_growth_that_no_term_has_is_off_the_curve(costs):
    seconds = [prefill_seconds(costs, n) * (1 + (n / 32768) ** 2) for n in LENGTHS]
    assert any("miss the measured time" in reason for reason in prefill_curve(costs, LENGTHS, seconds).reasons)


def test_decode_grows_with_keys_and_values_alone(costs):
    step = costs.decode(1)
    seconds = [0.001 + (step.weights + step.state + costs.kv_bytes(n)) / 2e12 for n in LENGTHS]
    curve = decode_curve(costs, LENGTHS, seconds)
    assert curve.as_predicted
    assert curve.terms[1].rate == pytest.approx(2e12, rel=1e-3)
    copied = [0.001 + (step.weights + step.state + 10 * costs.kv_bytes(n)) / 2e12 for n in LENGTHS]
    assert not decode_curve(costs, LENGTHS, copied).as_predicted
    with pytest.raises(ValueError, match="three"):
        decode_curve(costs, LENGTHS[:2], seconds[:2])


def test_caches_grow_by_the_counted_bytes_a_token(small):
    sides = sides_for(small.module, small.model, ["mlx-lm"])
    own = model_costs.of(small.config, dtype="float32")
    records = measure(sides, small.model, Plan.of([], [256, 1024], rounds=1, steps=1, warm_up=0))
    for side in sides:
        short, long = (record["sides"][side.name]["cache_bytes"] for record in records)
        assert long - short == own.kv_bytes(1024 - 256)
        assert short >= own.kv_bytes(256) + own.state_bytes
    columns, rows = table.byte_rows(records, own)
    assert [row[0] for row in rows] == ["256", "1K"]
    assert all(len(row) == len(columns) for row in rows)


def test_tables_name_what_is_missing_and_what_was_one_round(small):
    sides = [Clock("ours", 1e-3), Clock("theirs", 50.0), Clock("broken", ValueError("no"))]
    records = measure(sides, small.model, Plan.of([], [1024, 16], rounds=2))
    columns, rows = table.rows(records, "decode")
    assert [row[0] for row in rows] == ["16", "1K"]
    assert all(len(row) == len(columns) for row in rows)
    assert "50000.00 (one round)" in rows[0]
    fitted = table.curves(records, model_costs.of(small.config))
    assert fitted == {}
    assert json.dumps(records)
