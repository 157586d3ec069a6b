"""`labkit kernels`: results as a table or as JSON on standard output, exit codes, and gates that can fail."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from labkit.kernels import bench, commands, registry
from labkit.kernels.artefacts import ArtefactCache
from labkit.kernels.check import check_on_cpu, compare
from labkit.kernels.device_clock import DeviceTime
from labkit.kernels.registry import Tolerance, all_entries, find_entries
from labkit.kernels.targets import run_on
from labkit.kernels.traffic import over_budget

runner = CliRunner()
ENTRY = next(entry for entry in all_entries() if entry.name == "residual_rms_norm")


def invoke(*arguments):
    result = runner.invoke(commands.app, list(arguments))
    return result, json.loads(result.stdout) if "--json" in arguments and result.stdout.startswith("{") else None


def gates_of(entry, dtype=mx.float32) -> dict[str, str]:
    """The failed gates and what they say."""
    return {result.gate: result.detail for result in check_on_cpu(entry, dtype, seed=1) if not result.passed}


def broken(**changes):
    """The entry with another kernel text; its folder and budget stay."""
    kernel = object.__new__(type(ENTRY.kernel))
    kernel.__dict__.update(ENTRY.kernel.__dict__, text=replace(ENTRY.kernel.text, **changes))
    return replace(ENTRY, kernel=kernel, cases=tuple(replace(case, make=case.make) for case in ENTRY.cases[:1]))


SOURCE = ENTRY.kernel.text.source


@pytest.mark.parametrize(
    ("gate", "old", "new"),
    [
        ("reference", "sum / D", "sum / (D - 1)"),
        ("check mode", "normed[row + d]", "normed[row + d + 1]"),
        ("schedules", "float scale =", "if (t == 0) partial[0] = 0; float scale = 1e-3f * partial[0] +"),
        ("traffic budget", "float scale =", "float again = x[row]; sum += again * 0.0f; float scale ="),
        ("address spaces", "float scale =", "device float* wrong = partial; sum += 0.0f * wrong[0]; float scale ="),
    ],
)
def test_each_gate_fails_for_its_fault(gate, old, new):
    assert old in SOURCE
    entry = broken(source=SOURCE.replace(old, new))
    assert gate in gates_of(entry)


def test_the_unbroken_kernel_passes():
    assert gates_of(broken()) == {}


def test_a_kernel_without_a_budget_fails():
    assert "no budget stored" in gates_of(replace(broken(), folder=ENTRY.folder.parent))["traffic budget"]


def test_compare_knows_nan_infinity_and_integers():
    exact = Tolerance(0, 0)
    odd = mx.array([mx.nan, mx.inf, -mx.inf, 1.0])
    assert compare(odd, odd, exact) == ""
    assert "off by" in compare(odd, mx.array([mx.nan, mx.inf, -mx.inf, 1.5]), Tolerance(0.1, 0.1))
    assert compare(odd, mx.array([0.0, mx.inf, -mx.inf, 1.0]), Tolerance(9, 9)) != ""
    assert "differs in 1 of 2" in compare(mx.array([1, 2]), mx.array([1, 3]), Tolerance(9, 9))
    assert "is (2,)" in compare(mx.array([1, 2]), mx.array([1]), exact)


def test_budgets_allow_their_slack_only():
    assert over_budget({"lines": 102}, {"lines": 100}, 0.02) == []
    assert over_budget({"lines": 103}, {"lines": 100}, 0.02) == ["lines 103 > 100"]


def test_list_gives_every_kernel():
    result, record = invoke("list", "--json")
    assert result.exit_code == 0
    assert {row["kernel"] for row in record["kernels"]} == {entry.name for entry in all_entries()}
    assert all("simulator" in row["targets"] for row in record["kernels"])
    table, _ = invoke("list", "fused")
    assert "residual_rms_norm" in table.stdout


def test_check_reports_and_exits_with_zero():
    result, record = invoke("check", "argmax_rows", "--json", "--seed", "3")
    assert result.exit_code == 0
    assert record["passed"]
    assert {gate["dtype"] for gate in record["gates"]} == {"float32", "float16", "bfloat16"}
    assert "checking argmax_rows float32" in result.stderr


def test_check_exits_with_one_when_a_gate_fails(monkeypatch):
    entry = broken(source=SOURCE.replace("sum / D", "sum / (D - 1)"))
    monkeypatch.setattr(commands, "find_entries", lambda names: [replace(entry, dtypes=(mx.float32,))])
    result, record = invoke("check", "--json")
    assert result.exit_code == 1
    assert not record["passed"]
    assert "gates failed" in result.stderr


def test_trace_counts_by_buffer_and_line(tmp_path):
    result, record = invoke("trace", "residual_rms_norm", "--json", "--picture", str(tmp_path))
    assert result.exit_code == 0
    (traced,) = record["kernels"]
    assert traced["over_budget"] == []
    assert {flow["memory"] for flow in traced["buffers"]} >= {"x", "residual", "weight", "hidden", "normed"}
    assert any("rounded" in flow["text"] for flow in traced["by_line"])
    assert (tmp_path / "residual_rms_norm.svg").read_text().startswith("<?xml")


def test_bench_measures_both_sides():
    result, record = invoke("bench", "argmax_rows", "--rounds", "1", "--json")
    assert result.exit_code == 0
    (measured,) = record["results"]
    assert measured["seconds"] > 0
    assert measured["baseline_seconds"] > 0
    assert (measured["device_seconds"], measured["baseline_device_seconds"], measured["device_ratio"]) == (None,) * 3


def test_bench_shows_the_device_s_own_time_and_its_rates(monkeypatch):
    """A GPU's clock that is known: 4 us of the kernel, 10 of MLX's; what it has to say leaves the JSON whole."""
    entry = next(entry for entry in all_entries() if entry.name == "argmax_rows")
    problem = replace(entry.benches[0], bytes=8000, operations=4000)
    monkeypatch.setattr(commands, "find_entries", lambda names: [replace(entry, benches=(problem,))])

    def clock(sides):
        print("a side without a time")
        assert all(len(calls) == 1 and len(calls[0]()) == 1 for calls in sides.values())
        return {"kernel": DeviceTime(4, 1, 1), "baseline": DeviceTime(10, 1, 1)}

    monkeypatch.setattr(bench, "device_times", clock)
    monkeypatch.setattr(bench, "run_on", lambda target, kernel, launch: run_on("reference", kernel, launch))
    result, record = invoke("bench", "--rounds", "1", "--target", "cuda", "--json")
    assert result.exit_code == 0
    (measured,) = record["results"]
    assert (measured["device_seconds"], measured["baseline_device_seconds"], measured["device_ratio"]) == (
        *(pytest.approx(4e-6), pytest.approx(10e-6), pytest.approx(2.5)),
    )
    assert (measured["gigabytes_per_second"], measured["gigaflops"]) == (pytest.approx(2), pytest.approx(1))
    assert "a side without a time" in result.stderr
    table, _ = invoke("bench", "--rounds", "1", "--target", "cuda")
    assert "alone" in table.stdout
    monkeypatch.setattr(bench, "device_times", lambda sides: pytest.fail("only a GPU's time is taken so"))
    assert invoke("bench", "--rounds", "1", "--target", "reference")[0].exit_code == 0


@pytest.fixture
def nothing_built(monkeypatch, tmp_path):
    """A simulator that has built nothing yet, and keeps what it builds in a folder of its own."""
    run = importlib.import_module("labkit.kernels.simulator.run")
    monkeypatch.setattr(run, "_loaded", {})
    monkeypatch.setattr(run, "_cache", lambda: ArtefactCache(tmp_path))
    return tmp_path


@pytest.mark.parametrize("compiler", ["/no/such/c++", "false", "c++ 'of one quote"])
def test_a_compiler_that_is_none_is_a_line_that_says_so(compiler, monkeypatch, nothing_built):
    monkeypatch.setenv("LABKIT_CXX", compiler)
    result, record = invoke("trace", "argmax_rows", "--json")
    assert result.exit_code == 1
    assert compiler.split()[0] in record["error"]["message"]
    assert not [path for path in nothing_built.rglob("*") if path.suffix in (".o", ".so")]


def test_no_gate_passes_where_nothing_ran(monkeypatch, nothing_built):
    monkeypatch.setenv("LABKIT_CXX", "false")
    failed = gates_of(ENTRY)
    assert set(failed) == {"check mode", "reference", "schedules", "plain build", "traffic budget"}
    assert "no case ran" in failed["schedules"]


def test_unknown_names_are_refused():
    result, _ = invoke("check", "no_such_kernel")
    assert result.exit_code == 2
    assert "no kernel or mechanism no_such_kernel; there are" in result.stderr
    assert invoke("trace", "argmax_rows", "--dtype", "int8")[0].exit_code == 2
    assert invoke("bench", "argmax_rows", "--target", "fpga")[0].exit_code == 2
    with pytest.raises(ValueError, match="no kernel or mechanism x"):
        find_entries(["x"])


def test_budgets_are_written_beside_the_kernel(tmp_path):
    entry = replace(ENTRY, folder=tmp_path)
    registry.write_budget(entry, mx.float32, {"lines": 3})
    registry.write_budget(entry, mx.float16, {"lines": 2})
    assert entry.budget(mx.float32) == {"lines": 3}
    assert entry.budget(mx.float16) == {"lines": 2}
    assert entry.budget(mx.bfloat16) is None
