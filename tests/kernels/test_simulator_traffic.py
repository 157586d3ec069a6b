"""Traffic that the simulator counts: bytes, lines a request, re-reads, by buffer and by line of the text."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.simulator import symbols
from tests.kernels.bodies import launch, norm_runs

N = 4096
PATTERNS = {
    "coalesced": ("y[i] = x[i];", 1.0, 1.0),
    "strided": ("y[i] = x[(i % 32) * 128 + i / 32];", 32.0, 0.125),
    "misaligned by one": ("y[i] = x[i + 1 < 4096 ? i + 1 : 4095];", 2.0, None),
    "broadcast": ("y[i] = x[i / 32];", 1.0, None),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lines_per_request(pattern):
    body, lines, use = PATTERNS[pattern]
    run = launch(body, [mx.zeros((N,))], (N,), grid=N, check=True)
    read = next(flow for flow in run.traffic.buffers if flow.direction == "read")
    write = next(flow for flow in run.traffic.buffers if flow.direction == "write")
    assert read.requests == write.requests == N // 32
    assert abs(read.lines_per_request - lines) < 0.05
    if use:
        assert read.sector_use == use
    assert write.lines_per_request == 1
    assert write.footprint == 4 * N
    assert read.line is None
    assert [flow.line for flow in run.traffic.by_line] == [2, 2]


def test_debug_information_is_read_when_somebody_asks_for_lines(monkeypatch):
    asked, lines = [], symbols.SymbolTable.lines
    monkeypatch.setattr(symbols.SymbolTable, "lines", lambda self, at: asked.append(at := list(at)) or lines(self, at))
    run = launch("y[i] = x[i] + 1;", [mx.ones((64,))], (64,), check=True)
    assert run.clean
    assert not any(asked)
    assert [flow.line for flow in run.traffic.by_line] == [2, 2]
    assert any(asked)


@pytest.mark.parametrize("body", ["((device float4*)y)[i] = v;", "((device float4*)y)[i] = v * dot(v, float4(v.w));"])
def test_a_vector_moves_in_one_request(body):
    run = launch(f"float4 v = ((const device float4*)x)[i]; {body}", [mx.zeros((N,))], (N,), grid=N // 4, check=True)
    for flow in run.traffic.buffers:
        assert (flow.requests, flow.bytes, flow.lines_per_request) == (N // 4 // 32, 4 * N, 4)


def test_lanes_that_read_different_buffers_at_one_instruction_make_a_request_to_each():
    source = """
    uint i = thread_position_in_grid.x;
    const device float* from = i % 2 == 0 ? a : b;
    y[i] = from[i];
    """
    kernel = simulator.metal_kernel("k", ["a", "b"], ["y"], source)
    a, b = mx.zeros((64,)), mx.ones((64,))
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    traffic = kernel.run(check=True, inputs=[a, b], **call).raise_for_faults().traffic
    reads = {flow.memory: flow for flow in traffic.buffers if flow.direction == "read"}
    for name in "ab":
        flow = reads[name]
        assert (flow.bytes, flow.requests, flow.lines, flow.sectors, flow.footprint) == (128, 2, 2, 8, 256)
    by_line = {flow.memory: flow for flow in traffic.by_line if flow.direction == "read"}
    assert {name: flow.lines for name, flow in by_line.items()} == {"a": 2, "b": 2}


def test_lanes_that_take_different_ways_are_lined_up_by_execution():
    """The n-th execution of a load in each lane is one request, however often the other lanes get there."""
    body = """
    float sum = 0;
    for (uint k = 0; k <= lane % 5; k++) sum += x[32 * k + lane];
    if (lane % 2) sum += x[lane];
    y[i] = sum;
    """
    run = launch(body, [mx.ones((256,))], (32,), check=True, grid=32, threadgroup=32).raise_for_faults()
    reads = {flow.line: flow for flow in run.traffic.by_line if flow.direction == "read"}
    walked = sum(lane % 5 + 1 for lane in range(32))
    assert {line: (r.requests, r.lines, r.bytes) for line, r in reads.items()} == {
        4: (5, 5, 4 * walked),
        5: (1, 1, 4 * 16),
    }


def test_re_reads_barriers_and_threadgroup_memory_are_counted():
    body = (
        "threadgroup float s[64]; s[t] = x[t]; threadgroup_barrier(mem_flags::mem_threadgroup); "
        "y[i] = simd_sum(s[63 - t]);"
    )
    traffic = launch(body, [mx.zeros((64,))], (256,), grid=256, check=True).traffic
    read = traffic.buffers[0]
    assert (read.memory, read.bytes, read.footprint, read.repeats) == ("x", 1024, 256, 4)
    assert (traffic.barriers, traffic.simd_operations, traffic.threadgroup_bytes) == (4, 8, 256)
    assert (traffic.threadgroup_read, traffic.threadgroup_written) == (1024, 1024)
    assert traffic.summary()["device_bytes"] == 2048


def test_traffic_as_table_and_picture():
    traffic = norm_runs(check=True).traffic
    assert "lines/req" in str(traffic)
    assert "<table>" in traffic._repr_html_()
    picture, by_line = traffic.picture(), traffic.source_picture()
    assert len(picture.axes) == 2
    assert any("rounded" in label.get_text() for label in by_line.axes[0].get_yticklabels())


def test_the_example_in_the_documentation_runs(capsys):
    lines = simulator.__doc__.splitlines()
    example = "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))
    names = {"x": mx.arange(100, dtype=mx.float32)}
    exec(example, names)
    assert mx.array_equal(names["y"], 2 * names["x"])
    assert "scale: clean" in capsys.readouterr().out
