"""Temporary memory of planted graphs, the waterfall's sum, a layer in words."""

import mlx.core as mx
import pytest

from labkit.measure import floors, model_costs
from labkit.measure.trace import StepTrace, capture, temporary_bytes, walk, waterfall
from labkit.measure.trace.capture import record
from labkit.measure.trace.walk import COLUMNS
from labkit.measure.trace.waterfall import FLOOR, LAUNCHED, MOVED, REST
from tests.settled import settled_memory

ROW = 1000 * 4


def test_arrays_live_from_their_maker_to_their_last_reader():
    """a and b are alive together; their product is the result, and not temporary."""

    def two(x):
        a, b = mx.sin(x), mx.cos(x)
        return mx.matmul(a[None], b[:, None])

    assert temporary_bytes(record(two, mx.ones((1000,)))) == 2 * ROW


def test_a_chain_of_elementwise_operations_needs_one_buffer():
    chain = lambda x: mx.sum(mx.exp(mx.sqrt(mx.exp(mx.exp(x)))))
    assert temporary_bytes(record(chain, mx.ones((1000,)))) == ROW


def test_what_is_read_late_stays_and_views_hold_their_memory():
    def late(x):
        early = mx.sin(x)
        view = early.reshape(10, 100)
        other = mx.cumsum(mx.cumsum(x))
        return mx.sum(view) + mx.sum(other)

    assert temporary_bytes(record(late, mx.ones((1000,)))) >= 2 * ROW


def test_a_longer_chunk_needs_more_in_proportion(small):
    sizes = [temporary_bytes(capture(small.model, context=64, length=length)) for length in (16, 32, 64)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.1)


def test_a_prediction_of_memory_is_near_what_mlx_counts(small):
    from labkit.models import Rows

    costs = model_costs.of(small.config, dtype="float32")
    length = 128
    predicted = temporary_bytes(capture(small.model, context=0, length=length, target="here"))
    caches, tokens = small.model.make_caches(), mx.arange(length)[None]
    mx.eval(tokens)
    mx.clear_cache()
    before = settled_memory()
    mx.reset_peak_memory()
    small.model(tokens, caches, Rows.single(0), logits=None)
    mx.eval([cache.state for cache in caches])
    kept = costs.state_bytes + costs.kv_bytes(256)
    assert mx.get_peak_memory() - before == pytest.approx(predicted + kept, rel=0.3)


def test_the_waterfall_adds_up_and_a_step_below_its_floor_is_refused(small):
    costs = model_costs.of(small.config, dtype="float32")
    trace = StepTrace.of(capture(small.model, context=64), costs)
    rates = floors.Floors(None, floors.Rate(1e9, ""), floors.Rate(1e12, ""))
    parts = waterfall(costs, trace, rates, 1e-6, 64, 0.5)
    assert list(parts) == [FLOOR, MOVED, LAUNCHED, REST]
    assert sum(parts.values()) == pytest.approx(0.5)
    assert parts[LAUNCHED] == pytest.approx(trace.stages * 1e-6)
    tight = waterfall(costs, trace, rates, 1.0, 64, 1.1 * parts[FLOOR])
    assert sum(tight.values()) == pytest.approx(1.1 * parts[FLOOR])
    assert tight[REST] == 0
    with pytest.raises(ValueError, match="faster than its floor"):
        waterfall(costs, trace, rates, 1e-6, 64, parts[FLOOR] / 2)


def test_a_layer_in_words_names_parameters_without_their_layer(small):
    trace = StepTrace.of(capture(small.model), model_costs.of(small.config, dtype="float32"))
    rows = walk(trace, 0)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0][0] == 1
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    parameters = {row[2] for row in rows}
    assert {"linear_attn.in_proj_qkv", "mlp.switch_mlp.down_proj"} <= parameters
    assert walk(trace, 99) == []
