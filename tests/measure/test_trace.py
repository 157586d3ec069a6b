"""Launches, stages and bytes of a step: planted graphs whose counts are known, and a model's against each other."""

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from labkit.kernels.fused import embedding_rows
from labkit.kernels.quantized_matmul import Packed
from labkit.measure import model_costs
from labkit.measure.trace import StepTrace, capture, pictures
from labkit.measure.trace.capture import record
from labkit.measure.trace.step import as_record


def trace_of(function, *arrays, **options):
    return StepTrace(record(function, *arrays), **options)


# -- planted graphs --------------------------------------------------------------------------------------------------


def test_a_chain_has_as_many_stages_as_launches():
    def chain(x):
        return mx.exp(mx.sin(mx.exp(x)))

    trace = trace_of(chain, mx.ones((8,)))
    assert (trace.launch_count, trace.stages, trace.widths()) == (3, 3, [1, 1, 1])
    assert [launch.name for launch in trace.longest_chain()] == ["Exp", "Sin", "Exp"]
    assert trace.bytes == 3 * 2 * 8 * 4


def test_a_diamond_runs_its_arms_side_by_side():
    def diamond(x):
        y = mx.exp(x)
        return mx.sin(y) + mx.cos(mx.sin(y * y))

    trace = trace_of(diamond, mx.ones((8,)))
    names = [launch.name for launch in trace.longest_chain()]
    assert names[0] == "Exp"
    assert names[-1] == "Add"
    assert trace.launch_count == 6
    assert trace.stages == 5
    assert trace.widths() == [1, 2, 1, 1, 1]


def test_views_launch_nothing_and_dependencies_go_through_them():
    def viewed(x):
        return mx.exp(mx.sin(x).reshape(2, 4).T[:, None])

    trace = trace_of(viewed, mx.ones((8,)))
    assert [launch.name for launch in trace.launches] == ["Sin", "Exp"]
    assert trace.launches[1].before == (0,)
    assert trace.stages == 2


def test_a_broadcast_is_read_at_its_own_size():
    def add(x, row):
        return x + row

    trace = trace_of(add, mx.ones((64, 8)), mx.ones((8,)))
    assert trace.launches[0].reads == (64 * 8 + 8) * 4
    assert trace.launches[0].writes == 64 * 8 * 4


def test_a_matrix_counts_once_and_a_square_reads_its_input_once():
    weight = mx.ones((8, 16))

    trace = trace_of(lambda x: x @ weight, mx.ones((1, 8)))
    (product,) = [launch for launch in trace.launches if launch.name == "Matmul"]
    assert product.bytes == (8 + 8 * 16 + 16) * 4
    square = trace_of(lambda x: x * x, mx.ones((8,)))
    assert square.bytes == 2 * 8 * 4


def test_joining_copies_each_part():
    trace = trace_of(lambda x, y, z: mx.concatenate([x, y, z]), *[mx.ones((4,))] * 3)
    assert (trace.launch_count, trace.stages) == (3, 1)


def test_an_update_in_place_moves_the_update_alone_and_a_copy_the_whole():
    def update(buffer, row):
        return mx.slice_update(buffer, row, mx.array([3]), axes=(0,))

    arrays = mx.zeros((100, 8)), mx.ones((1, 8))
    moved = lambda **options: sum(i.bytes for i in trace_of(update, *arrays, **options).launches if "Update" in i.name)
    assert moved() == 2 * 8 * 4
    assert moved(copies_updates=True) >= 2 * 100 * 8 * 4


def test_a_bank_of_experts_counts_for_the_chosen_ones():
    bank, row = mx.ones((16, 8, 32)), mx.ones((1, 1, 32))
    chosen = mx.array([[0, 3]], dtype=mx.uint32)
    mx.eval(bank, chosen)
    function = lambda x: mx.gather_mm(x, bank.swapaxes(-1, -2), rhs_indices=chosen)
    whole = sum(i.reads for i in trace_of(function, row).launches)
    share = sum(i.reads for i in trace_of(function, row, experts=(16, 2)).launches)
    assert whole - share == 14 * 8 * 32 * 4


def test_a_lookup_counts_for_its_rows():
    packed = Packed.quantize(mx.ones((64, 256)))
    mx.eval(packed.arrays)
    captured = record(lambda tokens: embedding_rows(tokens, packed, mx.float32), mx.array([3, 5]), target="metal")
    (lookup,) = StepTrace(captured).launches
    assert lookup.reads == 2 * (4 + 256 // 2 + 2 * 4 * 4)
    assert lookup.writes == 2 * 256 * 4


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_step_moves_its_floor_and_little_more(small):
    costs = model_costs.of(small.config, dtype="float32")
    trace = StepTrace.of(capture(small.model, context=200), costs)
    floor = costs.decode(200)
    weights = {
        v.name: v for launch in trace.launches for v in launch.inputs if v.origin.endswith((".weight", ".scales"))
    }
    assert len(weights) > 4 * 10
    assert floor.bytes < trace.bytes < 2.5 * floor.bytes


def test_every_parameter_is_read_in_its_own_layer(small):
    trace = StepTrace.of(capture(small.model), model_costs.of(small.config, dtype="float32"))
    labels = {launch.label for launch in trace.launches}
    for index in range(4):
        mixer = "self_attn.q_proj" if index == 3 else "linear_attn.in_proj_qkv"
        assert f"language_model.model.layers.{index}.{mixer}" in labels
    layers = trace.by_layer()
    assert {0, 1, 2, 3} <= set(layers)
    for layer, launches in layers.items():
        assert all(f".layers.{layer}." in i.label for i in launches if ".layers." in i.label)


def test_layers_add_the_same_launches_each(small):
    from labkit.models import synthetic
    from tests.measure.conftest import SMALL

    traces = []
    for layers in (4, 8):
        model = small if layers == 4 else synthetic("qwen3.6-35b-a3b", **SMALL | {"layers": layers})
        traces.append(StepTrace.of(capture(model.model), model_costs.of(model.config, dtype="float32")))
    four, eight = ({layer: sum(i.count for i in found) for layer, found in t.by_layer().items()} for t in traces)
    assert four[1] == four[2] == eight[1] == eight[5]
    # Also the last layer ends where the head begins.
    assert eight[7] == four[3] == eight[3]
    # What reads nothing (indices that are made anew) belongs to no layer.
    added = sum(eight[layer] for layer in (4, 5, 6, 7)) + eight[None] - four[None]
    assert traces[1].launch_count - traces[0].launch_count == added
    assert traces[0].stages < traces[1].stages < 2 * traces[0].stages


@pytest.mark.parametrize("graph", ["mlx-lm's", "labkit's"])
def test_what_stands_before_and_behind_the_layers_is_in_none(small, graph):
    from labkit.models.hybrid import Hybrid

    model = small.model if graph == "mlx-lm's" else Hybrid.from_module(small.module, small.config)
    trace = StepTrace.of(capture(model), model_costs.of(small.config, dtype="float32"))
    layers = trace.by_layer()
    outside = [launch for launch in layers.pop(None) if launch.inputs]
    last = max(launch.stage for found in layers.values() for launch in found)
    assert [i.stage for i in outside if i.stage > last] == list(range(last + 1, trace.stages + 1))
    head = next(i for i in outside if i.name == "QuantizedMatmul")
    assert head.stage > last
    assert all(".layers." in f".{i.label}" for found in layers.values() for i in found if i.label)


def test_a_gpu_gets_fewer_launches_than_this_machine_spells_out(small):
    costs = model_costs.of(small.config, dtype="float32")
    gpu, here = (StepTrace.of(capture(small.model, target=t), costs) for t in ("metal", "here"))
    assert gpu.launch_count < here.launch_count
    assert {"rms_norm", "rope", "scaled_dot_product_attention"} <= {launch.name for launch in gpu.launches}
    assert any(launch.name == "mlx_lm_gated_delta_step" for launch in gpu.launches)


def test_capturing_computes_nothing_and_leaves_everything_as_it_was(small):
    fast, compute = mx.fast.rms_norm, np.array(small.module(mx.arange(4)[None]))
    capture(small.model)
    assert mx.fast.rms_norm is fast
    assert np.array_equal(np.array(small.module(mx.arange(4)[None])), compute)


def test_the_specialised_graph_needs_fewer_launches_and_stages(small):
    from labkit.models.hybrid import Hybrid

    costs = model_costs.of(small.config, dtype="float32")
    ours = StepTrace.of(capture(Hybrid.from_module(small.module, small.config)), costs)
    theirs = StepTrace.of(capture(small.model), costs)
    assert ours.launch_count < theirs.launch_count
    assert ours.stages < theirs.stages


def test_a_step_of_the_specialised_graph_has_hardly_an_operation_that_launches_nothing(small):
    """Each costs its host time too: kernels take and return the shapes of their neighbours."""
    from labkit.measure.trace.step import VIEWS
    from labkit.models.hybrid import Hybrid

    captured = capture(Hybrid.from_module(small.module, small.config))
    views = [operation.name for operation in captured.operations if operation.name in VIEWS]
    # Tokens without their rows, and back: 2. A new cache's first tail: 1. Columns: 1. Sampling: 4.
    assert len(views) <= 8, views
    inside = [o for o in captured.operations if any(v.origin.startswith("layers.") for v in o.inputs)]
    assert not [operation.name for operation in inside if operation.name in VIEWS]


def test_a_layer_of_the_specialised_graph_is_six_launches_or_eight(small):
    """Where the projections are our own kernel, as on CUDA."""
    from labkit.models.hybrid import Hybrid, Variants

    model = Hybrid.from_module(small.module, small.config, variants=Variants(decode_rows="own"))
    trace = StepTrace.of(capture(model), model_costs.of(small.config, dtype="float32"))
    names = {layer: [launch.name for launch in found] for layer, found in trace.by_layer().items()}
    half = ["few_rows_plain", "norm_router", "choose_gate_up_plain", "decode_down_plain"]
    assert names[0] == names[1] == names[2] == ["norm_project_plain", "gated_delta_step", *half]
    attention = ["append_heads", "decode_attention_lanes", "merge_attention_parts"]
    assert [name for name in names[3] if name not in ("Full", "GatherAxis", "Add")] == [
        "norm_project_plain", *attention, *half,
    ]  # fmt: skip


def test_records_and_pictures_hold_the_counts(small, tmp_path):
    costs = model_costs.of(small.config, dtype="float32")
    trace = StepTrace.of(capture(small.model), costs)
    counted = as_record(trace, costs, 64)
    assert counted["launches"] == sum(row["launches"] for row in counted["by_name"]) == sum(trace.widths())
    assert len(counted["longest_chain"]) == counted["stages"]
    pictures.draw(trace, "a step").savefig(tmp_path / "step.svg")
    pictures.draw(trace, "stages", first=5, last=12, names=True).savefig(tmp_path / "part.svg")
    pictures.widths({"a": trace, "b": trace}, "widths").savefig(tmp_path / "widths.svg")
    assert all((tmp_path / f"{name}.svg").stat().st_size > 1000 for name in ("step", "part", "widths"))


def test_a_context_that_fits_no_machine_is_refused(small):
    with pytest.raises(ValueError, match="caches of 1,000,000,000,000 tokens take"):
        capture(small.model, context=10**12)


def test_unknown_targets_are_refused(small):
    with pytest.raises(ValueError, match="target"):
        capture(small.model, target="cuda")


def test_the_command_prints_counts_and_json(tmp_path):
    import json

    from labkit.measure.trace.commands import app

    run = lambda *arguments: CliRunner().invoke(app, ["decode", "tiny-hybrid", "--context", "32", *arguments])
    shown = run("--graph", "adapter", "--chain", "--picture", str(tmp_path / "g.svg"))
    assert shown.exit_code == 0
    assert "Longest chain" in shown.output
    assert (tmp_path / "g.svg").is_file()
    assert json.loads(run("--json").stdout)["graph"] == "specialised"
    counted = json.loads(run("--graph", "adapter", "--json").stdout)
    assert counted["stages"] <= counted["launches"]
    assert counted["bytes_over_floor"] > 1
    refused = CliRunner().invoke(app, ["decode", "no-such-model"])
    assert refused.exit_code == 2
