"""The comparison of whole engines: both sides compute the same, points resume, ratios mean what they say."""

import json
import time

import mlx.core as mx
import numpy as np
import pytest

from labkit.measure import model_costs
from labkit.measure.end_to_end import LabkitSide, MlxLmSide, Plan, Point, measure, sides_for
from labkit.measure.end_to_end.fair_line import own_deltanet
from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.parts import Parts, PartsError
from labkit.measure.end_to_end.plan import LENGTHS
from labkit.models import Rows
from labkit.resources import data_folder
from tests.measure.conftest import Clock

QUICK = {"rounds": 2, "steps": 2, "warm_up": 1}


def tokens_of(generator, count):
    return [next(generator) for _ in range(count)]


# -- sides -----------------------------------------------------------------------------------------------------------


def test_both_sides_decode_the_same_tokens_from_the_same_filled_caches(small):
    ours, theirs = sides_for(small.module, small.model, ["mlx-lm"])
    filled = Filled(small.model.layouts, 40)
    mine = ours._tokens(filled.into(small.model.make_caches()), 1, 40)
    other = theirs._tokens(mx.array([1], dtype=mx.int32), filled.into_mlx_lm(theirs._caches()), 12)
    assert tokens_of(mine, 8) == tokens_of(other, 8)


def test_both_sides_read_prompts_to_the_same_first_token(small, monkeypatch):
    tokens = mx.random.randint(0, 256, (21,), key=mx.random.key(3))
    ours, theirs = sides_for(small.module, small.model, ["mlx-lm"])
    caches = small.model.make_caches()
    small.model(tokens[None, :20], caches, Rows.single(0), logits=None)
    assert next(ours._tokens(caches, tokens[20].item(), 20)) == next(theirs._tokens(tokens, theirs._caches(), 1))


def test_filled_caches_hold_the_context_and_the_counted_bytes(small):
    filled = Filled(small.model.layouts, 300)
    caches = filled.into(small.model.make_caches())
    assert [cache.offset for cache in caches if hasattr(cache, "offset")] == [300]
    costs = model_costs.of(small.config, dtype="float32")
    assert sum(array.nbytes for layer in filled.layers for array in layer) == costs.kv_bytes(300) + costs.state_bytes
    again = Filled(small.model.layouts, 300)
    assert all(
        mx.array_equal(a, b)
        for x, y in zip(filled.layers, again.layers, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_decoding_leaves_the_filled_arrays_as_they_were(small):
    filled = Filled(small.model.layouts, 33)
    before = [[np.array(array) for array in layer] for layer in filled.layers]
    for side in sides_for(small.module, small.model, ["mlx-lm"]):
        side.decode(filled, 3, 1)
    for layer, saved in zip(filled.layers, before, strict=True):
        assert all(np.array_equal(np.array(a), b) for a, b in zip(layer, saved, strict=True))


def test_a_side_is_timed_over_all_its_steps(small, monkeypatch):
    clock = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow:
        def __getattr__(self, name):
            return getattr(small.model, name)

        def __call__(self, *args, **kwargs):
            clock[0] += 0.02
            return small.model(*args, **kwargs)

    seconds, _ = LabkitSide(Slow()).decode(Filled(small.model.layouts, 8), 5, 1)
    assert seconds == pytest.approx(0.02)
    # Four forwards for twelve tokens and the last one, and the one that is launched before its token is read.
    assert LabkitSide(Slow(), chunk=4).prefill(mx.arange(13)) == pytest.approx(0.02 * 5)


def test_the_module_is_in_evaluation_mode(small):
    small.module.train()
    MlxLmSide(small.module)
    assert not small.module.training


# -- the fair line ---------------------------------------------------------------------------------------------------


def test_mlx_lm_runs_its_own_deltanet_text_and_gets_the_same(small):
    from mlx_lm.models import gated_delta

    tokens = mx.arange(6)[None]
    before = small.module(tokens)
    seen = gated_delta.mx
    with own_deltanet("simulator"):
        assert gated_delta.mx is not seen
        inside = small.module(tokens)
        mx.eval(inside)
    assert gated_delta.mx is seen
    assert gated_delta._gated_delta_kernel is None or mx.metal.is_available()
    assert mx.allclose(inside, before, atol=1e-4).item()


def test_the_fair_line_really_launches_mlx_lms_kernel(small, monkeypatch):
    from labkit.measure.end_to_end import fair_line

    launched, run = [], fair_line.Kernel.__call__

    def spy(self, **call):
        launched.append(self.name)
        return run(self, **call)

    monkeypatch.setattr(fair_line.Kernel, "__call__", spy)
    with own_deltanet("simulator"):
        mx.eval(small.module(mx.arange(3)[None]))
    assert launched == ["mlx_lm_gated_delta_step"] * 3


def test_mlx_lm_is_put_back_after_an_error(small):
    from mlx_lm.models import gated_delta

    with pytest.raises(ZeroDivisionError), own_deltanet("simulator"):
        _ = 1 / 0
    assert gated_delta.mx is mx


# -- points ----------------------------------------------------------------------------------------------------------


def test_a_real_comparison_has_every_number(small):
    plan = Plan.of([24], [40], **QUICK)
    costs = model_costs.of(small.config, dtype="float32")
    records = measure(sides_for(small.module, small.model, ["mlx-lm"]), small.model, plan, costs=costs)
    assert [(r["kind"], r["length"]) for r in records] == [("decode", 40), ("prefill", 24)]
    for record in records:
        assert set(record["sides"]) == {"labkit", "mlx-lm as released"}
        ratio = record["ratios"]["mlx-lm as released"]
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
        assert all(len(side["seconds"]) == 2 and side["peak_bytes"] > 0 for side in record["sides"].values())
    cached = {side["cache_bytes"] for side in records[0]["sides"].values()}
    assert all(size >= costs.kv_bytes(40) + costs.state_bytes for size in cached)


def test_ratio_is_the_opponents_time_over_ours(small):
    sides = [Clock("ours", 0.0625), Clock("theirs", 0.1875)]
    (record,) = measure(sides, small.model, Plan.of([], [16], rounds=3))
    assert record["ratios"]["theirs"] == {"ratio": 3.0, "low": 3.0, "high": 3.0, "rounds": 3}
    assert record["sides"]["ours"]["tokens_per_second"] == 16.0


def test_prefill_rates_count_the_whole_prompt(small):
    (record,) = measure([Clock("ours", 0.5)], small.model, Plan.of([32], [], rounds=1))
    assert record["sides"]["ours"]["tokens_per_second"] == 2.0


def test_order_alternates(small):
    order = []

    class Noted(Clock):
        def decode(self, *arguments):
            order.append(self.name)
            return super().decode(*arguments)

    measure([Noted("a", 1e-3), Noted("b", 1e-3)], small.model, Plan.of([], [16], rounds=3))
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_slow_side_is_measured_once_and_says_so(small):
    slow = Clock("slow", 50.0)
    (record,) = measure([Clock("fast", 0.01), slow], small.model, Plan.of([], [16], rounds=4, once_above=10.0))
    assert len(record["sides"]["slow"]["seconds"]) == 1
    assert len(record["sides"]["fast"]["seconds"]) == 4
    assert record["ratios"]["slow"] == {"ratio": 5000.0, "low": None, "high": None, "rounds": 1}


def test_an_opponent_that_fails_costs_nobody_else_a_point(small):
    sides = [Clock("ours", 1.0), Clock("broken", MemoryError("no room")), Clock("theirs", 2.0)]
    (record,) = measure(sides, small.model, Plan.of([], [16], rounds=2))
    assert record["failed"] == {"broken": "no room"}
    assert set(record["ratios"]) == {"theirs"}
    with pytest.raises(MemoryError):
        measure([Clock("ours", MemoryError("mine"))], small.model, Plan.of([], [16]))


def test_the_released_line_stays_short_where_there_is_a_fair_one(small):
    names = ("ours", "mlx-lm as released", "mlx-lm, own kernels")
    sides = [Clock(name, 1e-3) for name in names]
    plan = Plan.of([], [16, 64], rounds=1, released_up_to=16)
    short, long = measure(sides, small.model, plan)
    assert set(short["sides"]) == set(names)
    assert set(long["sides"]) == {names[0], names[2]}
    _, alone = measure(sides[:2], small.model, plan)
    assert set(alone["sides"]) == set(names[:2])


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_second_run_measures_only_what_is_missing(small, tmp_path):
    plan = Plan.of([16], [16, 32], rounds=1)
    first = Clock("ours", 1e-3)
    before = measure([first], small.model, plan, parts=Parts(tmp_path, {"model": "m"}))
    (tmp_path / "decode-32.json").unlink()
    (tmp_path / "prefill-16.json").write_text('{"kind": "pref')  # the machine went down
    second = Clock("ours", 1e-3)
    after = measure([second], small.model, plan, parts=Parts(tmp_path, {"model": "m"}))
    assert [kind for kind, _ in second.asked] == ["decode", "prefill", "prefill"]
    assert [r["length"] for r in after] == [r["length"] for r in before]


def test_parts_of_another_comparison_are_refused(small, tmp_path):
    Parts(tmp_path, {"model": "m", "device": "a"}).store("decode-16", {"length": 16})
    with pytest.raises(PartsError, match="device = 'a'"):
        Parts(tmp_path, {"model": "m", "device": "b"})
    fresh = Parts(tmp_path, {"model": "m", "device": "b"}, fresh=True)
    assert fresh.load("decode-16") is None


def test_a_fresh_start_deletes_nothing_that_is_no_part(tmp_path):
    note = tmp_path / "package.json"
    note.write_text("{}")
    with pytest.raises(PartsError, match=r"package\.json and no conditions\.json"):
        Parts(tmp_path, {}, fresh=True)
    assert note.exists()


def test_the_time_limit_leaves_points_for_the_next_run(small, tmp_path, monkeypatch):
    clock = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Late(Clock):
        def decode(self, *arguments):
            clock[0] += 50
            return super().decode(*arguments)

    plan = Plan.of([], [16, 32, 64], rounds=1, seconds=20)
    told = []
    records = measure([Late("ours", 1.0)], small.model, plan, parts=Parts(tmp_path, {}), progress=told.append)
    assert [r["length"] for r in records] == [16]
    assert sum("left out" in text for text in told) == 2
    rest = measure([Late("ours", 1.0)], small.model, Plan.of([], [16, 32, 64], rounds=1), parts=Parts(tmp_path, {}))
    assert [r["length"] for r in rest] == [16, 32, 64]


def test_plans_without_sense_are_refused():
    with pytest.raises(ValueError, match="measures nothing"):
        Plan.of([], [])
    with pytest.raises(ValueError, match="at least 2"):
        Plan.of([1], [])
    with pytest.raises(ValueError, match="rounds"):
        Plan.of([4], [], rounds=0)
    assert [p.length for p in Plan.full().points] == [*LENGTHS, *LENGTHS]
    assert Point("decode", 4096).name == "decode-4096"


# -- torch -----------------------------------------------------------------------------------------------------------


def test_torch_is_refused_with_the_remedy_where_it_is_not(small, monkeypatch):
    import importlib.util

    from labkit.measure.end_to_end.subject import Subject
    from labkit.measure.end_to_end.torch_side import TorchSide

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    subject = Subject("small", "adapter", small.model, small.module, small.config, "", small.weights_bytes)
    with pytest.raises(RuntimeError, match="pip install torch transformers"):
        TorchSide.open(subject)


def test_torch_reads_and_decodes_a_model_of_the_same_shape(small):
    pytest.importorskip("torch")
    from labkit.measure.end_to_end.subject import Subject
    from labkit.measure.end_to_end.torch_side import TorchSide

    subject = Subject("small", "adapter", small.model, small.module, small.config, "", small.weights_bytes)
    side = TorchSide.open(subject)
    (decode, prefill) = measure([side], small.model, Plan.of([16], [24], **QUICK))
    assert decode["sides"]["torch"]["tokens_per_second"] > 0
    assert len(prefill["sides"]["torch"]["seconds"]) == 2
    with pytest.raises(ValueError, match="not read for torch"):
        side.decode(Filled([], 1 << 20), 1, 1)


# -- commands --------------------------------------------------------------------------------------------------------


def test_the_command_measures_keeps_and_goes_on(tmp_path):
    from typer.testing import CliRunner

    from labkit.measure.end_to_end.commands import app
    from tests.measure.conftest import SMALL

    config = json.loads((data_folder() / "configs" / "qwen3.6-35b-a3b.json").read_text())
    config["text_config"] |= {k: v for k, v in SMALL.items() if k != "layers"} | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["end-to-end", str(tmp_path), "--graph", "adapter", "--decode", "16", "--prefill", "16,32"]
    arguments += ["--rounds", "1"]
    arguments += ["--steps", "2", "--out", str(tmp_path / "parts"), "--json", "--plot", str(tmp_path / "speeds.svg")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    record = json.loads(first.stdout)
    assert [(p["kind"], p["length"]) for p in record["points"]] == [("decode", 16), ("prefill", 16), ("prefill", 32)]
    assert record["missing"] == []
    assert (tmp_path / "speeds.svg").stat().st_size > 1000
    again = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert again["points"] == record["points"]
    refused = CliRunner().invoke(app, [*arguments, "--steps", "3"])
    assert refused.exit_code == 2
    assert "--fresh" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-hybrid", "--against", "vllm"], "mlx-lm, torch"),
        (["tiny-hybrid", "--decode", "4q"], "256,4K"),
        (["tiny-hybrid", "--prefill", "none", "--decode", "none"], "measures nothing"),
        (["no-such-model"], "no model"),
        (["tiny-hybrid", "--layers", "2"], "shape without weights"),
    ],
)
def test_the_command_refuses_in_a_line(arguments, message):
    from typer.testing import CliRunner

    from labkit.measure.end_to_end.commands import app

    result = CliRunner().invoke(app, ["end-to-end", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
