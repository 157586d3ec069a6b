"""Each kind of fault is found where it is; the correct twin raises no alarm."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from labkit.kernels import simulator

HEAD = """
uint t = thread_position_in_threadgroup.x;
uint i = thread_position_in_grid.x;
uint lane = thread_index_in_simdgroup;
"""


@dataclass(frozen=True)
class Planted:
    """A fault: `bad` contains it at the line marked `// HERE`, `good` is the correct twin.

    The kernels see x [256] float32 (or `dtype`), write y [256], and run 4 threadgroups of 64 threads.
    """

    name: str
    kind: str
    bad: str
    good: str
    header: str = ""
    grid: int = 256
    threadgroup: int = 64
    dtype: mx.Dtype = mx.float32
    output_size: int = 256
    thread: int | None = None
    element: int | None = None
    memory: str | None = None
    options: dict = field(default_factory=dict)

    def line(self) -> int | None:
        """The line that a report must name, in source or header."""
        for text in (HEAD + self.bad, self.header):
            for number, row in enumerate(text.splitlines(), 1):
                if "// HERE" in row:
                    return number
        return None


REVERSE = """
threadgroup float s[64];
s[t] = x[i];
{barrier}
y[i] = s[63 - t];  // HERE
"""

SPIN = """
device atomic<uint>* flag = (device atomic<uint>*)&counter[0];
if (t == 0) {{
  atomic_fetch_add_explicit(flag, 1u, memory_order_relaxed);
  while (atomic_load_explicit(flag, memory_order_relaxed) < {count}u) {{}}
}}
threadgroup_barrier(mem_flags::mem_device);
y[i] = x[i];
"""

PLANTED = [
    Planted(
        "missing barrier",
        "race-between-simdgroups",
        REVERSE.format(barrier=""),
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_threadgroup);"),
        memory="s",
    ),
    Planted(
        "barrier that orders nothing",
        "race-between-simdgroups",
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_none);"),
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_threadgroup);"),
    ),
    Planted(
        "barrier for the other memory",
        "race-between-simdgroups",
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_device);"),
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"),
    ),
    Planted(
        "device memory behind a threadgroup-memory barrier",
        "race-between-simdgroups",
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);\nif (t == 0) y[i] += y[i + 63];  // HERE",
        "y[i] = x[i]; threadgroup_barrier(mem_flags::mem_device);\nif (t == 0) y[i] += y[i + 63];",
        memory="y",
    ),
    Planted(
        "neighbour in the simdgroup",
        "race-in-simdgroup",
        "threadgroup float s[64];\ns[t] = x[i];\ny[i] = s[t ^ 1];  // HERE",
        "threadgroup float s[64];\ns[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[t ^ 1];",
    ),
    Planted(
        "a simdgroup operation orders no memory",
        "race-in-simdgroup",
        "threadgroup float s[64];\ns[t] = x[i];\nfloat a = simd_sum(x[i]);\ny[i] = a + s[t ^ 1];  // HERE",
        "threadgroup float s[64];\ns[t] = x[i];\nfloat a = simd_sum(x[i]);\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = a + s[t ^ 1];",
    ),
    Planted(
        "simdgroup barrier between simdgroups",
        "race-between-simdgroups",
        REVERSE.format(barrier="simdgroup_barrier(mem_flags::mem_threadgroup);"),
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_threadgroup);"),
    ),
    Planted(
        "two threads write one place",
        "race-between-simdgroups",
        "threadgroup float s[32];\ns[t % 32] = x[i];  // HERE\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[0];",
        "threadgroup float s[64];\ns[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[0];",
    ),
    Planted(
        "buffer used again before all have read it",
        "race-between-simdgroups",
        "threadgroup float s[2];\nfloat sum = 0;\nfor (int k = 0; k < 2; k++) {\n"
        "  if (lane == 0) s[t / 32] = x[i] + k;  // HERE\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  sum += s[0] + s[1];\n}\ny[i] = sum;",
        "threadgroup float s[2];\nfloat sum = 0;\nfor (int k = 0; k < 2; k++) {\n"
        "  if (lane == 0) s[t / 32] = x[i] + k;\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "  sum += s[0] + s[1];\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n}\ny[i] = sum;",
    ),
    Planted(
        "lanes write different values to one place",
        "race-in-simdgroup",
        "y[i] = x[i];\nif (lane < 2) y[i - lane] = lane;  // HERE",
        "y[i] = x[i];\ny[i - lane % 2] = 7;\nthreadgroup_barrier(mem_flags::mem_device);\ny[i] = lane;",
        memory="y",
    ),
    Planted(
        "threadgroups write one place",
        "race-between-threadgroups",
        "y[i] = x[i];\ny[t] = x[i];  // HERE",
        "y[i] = x[i];",
        memory="y",
    ),
    Planted(
        "threadgroup reads another's result",
        "race-between-threadgroups",
        "y[i] = x[i];\nif (i >= 64) y[i] += y[i - 64];  // HERE",
        "y[i] = x[i];\nif (i >= 64) y[i] += x[i - 64];",
    ),
    Planted(
        "race inside a helper of the header",
        "race-between-simdgroups",
        "threadgroup float s[64];\ny[i] = swap_ends(x[i], s, t);",
        "threadgroup float s[64];\ns[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[63 - t];",
        header="inline float swap_ends(float v, threadgroup float* s, uint t) {\n"
        "  s[t] = v;\n  return s[63 - t];  // HERE\n}",
    ),
    Planted(
        "read past the end",
        "out-of-bounds-read",
        "y[i] = x[i + 1];  // HERE",
        "y[i] = x[i + 1 < 256 ? i + 1 : 0];",
        memory="x",
        element=256,
        thread=63,
    ),
    Planted(
        "read before the beginning",
        "out-of-bounds-read",
        "y[i] = x[int(i) - 1];  // HERE",
        "y[i] = x[i ? i - 1 : 0];",
        memory="x",
        element=-1,
        thread=0,
    ),
    Planted(
        "bfloat read past the end",
        "out-of-bounds-read",
        "y[i] = static_cast<bfloat16_t>(static_cast<float>(x[i + 8]));  // HERE",
        "y[i] = static_cast<bfloat16_t>(static_cast<float>(x[i]));",
        dtype=mx.bfloat16,
        element=256,
    ),
    Planted(
        "vector read past the end",
        "out-of-bounds-read",
        "float4 v = ((const device float4*)x)[i];  // HERE\ny[i] = v.x + v.w;",
        "float4 v = ((const device float4*)x)[i / 4];\ny[i] = v.x + v.w;",
        element=256,
    ),
    Planted(
        "write past the end",
        "out-of-bounds-write",
        "y[i + 1] = x[i];  // HERE\nif (i == 0) y[0] = 0;",
        "y[i] = x[i];",
        memory="y",
        element=256,
    ),
    Planted(
        "write far away",
        "out-of-bounds-write",
        "y[i == 7 ? 1u << 30 : i] = x[i];  // HERE",
        "y[i] = x[i];",
        memory="y",
        element=1 << 30,
        thread=7,
    ),
    Planted(
        "threadgroup array overrun into the next one",
        "out-of-bounds-write",
        "threadgroup float s[64];\nthreadgroup float u[64];\nu[t] = 0;\ns[t + 1] = x[i];  // HERE\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[t] + u[t];",
        "threadgroup float s[65];\nthreadgroup float u[64];\nu[t] = 0;\ns[t + 1] = x[i];\nif (t == 0) s[0] = 0;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[t] + u[t];",
        memory="s",
        element=256,
    ),
    Planted(
        "threadgroup memory nobody wrote",
        "uninitialised-read",
        "threadgroup float s[64];\nif (t < 63) s[t] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = s[63 - t];  // HERE",
        REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_threadgroup);"),
        memory="s",
        element=252,
        thread=0,
    ),
    Planted(
        "output read before it is written",
        "uninitialised-read",
        "y[i] += x[i];  // HERE",
        "y[i] = x[i];\ny[i] += x[i];",
        memory="y",
    ),
    Planted(
        "output left unwritten",
        "unwritten-output",
        "if (i != 200) y[i] = x[i];",
        "y[i] = x[i];",
        memory="y",
        element=200,
    ),
    Planted(
        "write to an input",
        "write-to-input",
        "y[i] = x[i];\n((device float*)x)[i] = 0;  // HERE",
        "y[i] = x[i];\ny[i] = 0;",
        memory="x",
    ),
    Planted(
        "different barriers",
        "divergent-barrier",
        "if (t < 32) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);  // HERE\n} else {\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n}\ny[i] = x[i];",
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = x[i];",
    ),
    Planted(
        "return before a barrier",
        "barrier-after-exit",
        "y[i] = x[i];\nif (t >= 40) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);  // HERE",
        "y[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nif (t >= 40) return;",
    ),
    Planted(
        "simdgroup operation in divergent flow",
        "divergent-simd",
        "float a = 0;\nif (lane < 16) a = simd_sum(x[i]);  // HERE\ny[i] = a;",
        "float a = simd_sum(lane < 16 ? x[i] : 0.0f);\ny[i] = a;",
    ),
    Planted(
        "shuffle from a lane that has ended",
        "inactive-lane",
        "y[i] = x[i];\nif (lane == 31) return;\ny[i] = simd_shuffle(x[i], 31);  // HERE",
        "float last = simd_shuffle(x[i], 31);\ny[i] = x[i];\nif (lane == 31) return;\ny[i] = last;",
    ),
    Planted(
        "vector at an odd address",
        "misaligned",
        "float4 v = *(const device float4*)(x + 1);  // HERE\ny[i] = v.x + v.w;",
        "float4 v = *(const device float4*)(x + 4);\ny[i] = v.x + v.w;",
    ),
    Planted(
        "waiting for threadgroups that do not run",
        "deadlock",
        SPIN.format(count=4),
        SPIN.format(count=1),
        options={"counter": True},
    ),
    Planted(
        "integer division by zero",
        "crash",
        "y[i] = 100 / (int(i) - 9);",
        "y[i] = 100 / (int(i) + 9);",
    ),
    Planted(
        "a pointer from nowhere",
        "out-of-bounds-read",
        "y[i] = *(const device float*)(ulong)0x1234560;  // HERE",
        "y[i] = *(const device float*)x;",
    ),
]

LIMITS = [
    Planted(
        "too much threadgroup memory",
        "threadgroup-memory",
        "threadgroup float s[8193];\ns[t] = x[i];\ny[i] = s[t];",
        "threadgroup float s[8192];\ns[t] = x[i];\ny[i] = s[t];",
    ),
    Planted(
        "too many threads", "too-many-threads", "y[i] = x[i % 256];", "y[i] = x[i % 256];", grid=1056, threadgroup=1056
    ),
]


def run(planted, body, **options):
    outputs = ["y", "counter"] if planted.options.get("counter") else ["y"]
    kernel = simulator.metal_kernel("planted", ["x"], outputs, HEAD + body, planted.header)
    return kernel.run(
        check=True,
        inputs=[mx.random.normal((256,)).astype(planted.dtype)],
        grid=(planted.grid, 1, 1),
        threadgroup=(planted.threadgroup, 1, 1),
        output_shapes=[(planted.output_size,), (4096,)][: len(outputs)],
        output_dtypes=[planted.dtype, mx.uint32][: len(outputs)],
        init_value=0 if len(outputs) == 2 else None,
        **options,
    )


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_fault_is_found(planted):
    found = [fault for fault in run(planted, planted.bad).faults if fault.kind == planted.kind]
    assert found, f"no {planted.kind} reported"
    fault = found[0]
    assert fault.kernel == "planted"
    if planted.line() is not None:
        assert planted.line() in [f.line for f in found]
        assert "// HERE" in next(f for f in found if f.line == planted.line()).text
        assert all(f.in_header == bool(planted.header) for f in found)
    for name in ("thread", "element", "memory"):
        if getattr(planted, name) is not None:
            assert getattr(fault, name) == getattr(planted, name), str(fault)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_correct_twin_is_clean(planted):
    result = run(planted, planted.good)
    assert result.clean, str(result)
    assert len(result.outputs) >= 1


@pytest.mark.parametrize("planted", LIMITS, ids=lambda planted: planted.name)
def test_metal_limits(planted):
    with pytest.raises(simulator.KernelFault) as caught:
        run(planted, planted.bad)
    assert caught.value.faults[0].kind == planted.kind
    if planted.bad != planted.good:
        assert run(planted, planted.good).clean


def test_race_names_both_threads_and_lines():
    planted = next(p for p in PLANTED if p.name == "missing barrier")
    races = [f for f in run(planted, planted.bad).faults if f.kind == planted.kind]
    assert races[0].other_thread is not None
    assert races[0].thread // 32 != races[0].other_thread // 32
    assert {f.other_line for f in races} <= {planted.line(), planted.line() - 2}
    assert "nothing orders them" in str(races[0])


def test_both_parties_of_a_race_in_the_header_are_named_by_its_lines():
    header = """
    METAL_FUNC void turn(threadgroup float* s, uint t, float value, device float* to) {
      s[t] = value;
      *to = s[63 - t];
    }
    """
    kernel = simulator.metal_kernel(
        "k", ["x"], ["y"], f"threadgroup float s[64];{HEAD}turn(s, t, x[i], y + i);", header
    )
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    faults = kernel.run(check=True, inputs=[mx.zeros((64,))], **call).faults
    races = [fault for fault in faults if fault.kind.startswith("race")]
    assert races
    for race in races:
        assert race.in_header
        assert race.other_in_header
        assert {race.line, race.other_line} == {3, 4}
        assert f"at header line {race.other_line} " in race.message
