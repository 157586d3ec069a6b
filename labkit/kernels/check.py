"""The gates that every kernel must pass, as functions that say what they found.

1. clang accepts the text with real address spaces, and it breaks no rule of Metal's that clang does not know.
2. The simulator agrees with the reference, on fresh random inputs, in every dtype.
3. Check mode is clean: no race, nothing out of bounds or read unwritten, nothing divergent.
4. Two schedules give the same bits.
5. Traffic stays within the stored budget.
6. The plain build gives the bits of the checked one.
7. Where it may rewrite an input in place, check mode is clean and the bits are the same when it does.
8. Where NVIDIA's run-time compiler is installed, it compiles the CUDA text. No GPU is needed.
9. Where there is a GPU, it agrees with the reference too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import mlx.core as mx

from labkit.kernels import address_spaces, cuda_build, metal_rules, simulator
from labkit.kernels.registry import Case, Entry, Tolerance, dtype_name
from labkit.kernels.signature import Launch, threadgroup_size
from labkit.kernels.targets import device_target, run_on, targets_for
from labkit.kernels.traffic import over_budget


@dataclass(frozen=True)
class GateResult:
    """One gate of one kernel in one dtype.

    Attributes:
        gate: its name. detail: what was seen; on failure, what is wrong.
    """

    kernel: str
    gate: str
    dtype: str
    passed: bool
    detail: str
    seconds: float


def check_kernel(
    entry: Entry, seed: int | None = None, progress: Callable[[str], None] | None = None
) -> list[GateResult]:
    """All gates of a kernel on this machine.

    Args:
        seed: of the random inputs; fresh ones by default, and the seed is in each failure's detail.
        progress: told what runs next.
    """
    seed = time.time_ns() % (1 << 31) if seed is None else seed
    results = []
    for dtype in entry.dtypes:
        if progress:
            progress(f"{entry.name} {dtype_name(dtype)}")
        results += check_on_cpu(entry, dtype, seed)
        if not cuda_build.unavailable():
            results.append(check_cuda_text(entry, dtype, seed))
        if device_target() in targets_for(entry.kernel):
            results.append(check_on_device(entry, dtype, seed))
    return results


def check_on_cpu(entry: Entry, dtype: mx.Dtype, seed: int, *, plain: bool = True) -> list[GateResult]:
    """The gates that need no GPU and no compiler of NVIDIA's, in one dtype. `plain`: the plain build too."""
    launches = _launches(entry, dtype, seed)
    gates = _Gates(entry, dtype, seed)
    gates.run("address spaces", lambda: _address_spaces(entry, launches))
    runs = {}

    def simulate() -> Iterator[str]:
        for case, launch in launches:
            runs[case.label] = simulator.run(entry.kernel.text, launch, check=True, resident=entry.resident)
            yield from (f"{case.label}: {fault}" for fault in runs[case.label].faults)

    gates.run("check mode", simulate)
    finished = [(case, launch) for case, launch in launches if case.label in runs and runs[case.label].outputs]
    if not finished:  # gates over no case would all be passed
        gates.fail("reference", "schedules", *["plain build"] * plain, why="no case ran to its end")
    else:
        gates.run(
            "reference", lambda: _against_reference(entry, dtype, finished, lambda case, _: runs[case.label].outputs)
        )
        gates.run("schedules", lambda: _schedules(entry, finished, runs))
        if plain:
            gates.run("plain build", lambda: _plain_build(entry, finished[:1], runs))
        if entry.kernel.in_place:
            gates.run("in place", lambda: _in_place(entry, finished, runs))
    gates.run("traffic budget", lambda: _traffic(entry, dtype, runs))
    return gates.results


def check_cuda_text(entry: Entry, dtype: mx.Dtype, seed: int) -> GateResult:
    """The CUDA text of the first case compiles for an H100 or H200, in one dtype.

    Raises:
        CudaMissing: the compiler is not installed (`labkit.kernels.cuda_build.unavailable` says so).
    """
    gates = _Gates(entry, dtype, seed)
    launches = _launches(replace(entry, cases=entry.cases[:1]), dtype, seed)
    gates.run("CUDA text", lambda: _cuda_text(entry, launches))
    return gates.results[0]


def check_on_device(entry: Entry, dtype: mx.Dtype, seed: int, target: str | None = None) -> GateResult:
    """The GPU against the reference, in one dtype. `target`: "metal" or "cuda"; by default the machine's own."""
    target = target or device_target()
    gates = _Gates(entry, dtype, seed)
    launches = _launches(entry, dtype, seed)
    gates.run(
        f"{target} device",
        lambda: _against_reference(entry, dtype, launches, lambda _, launch: run_on(target, entry.kernel, launch)),
    )
    return gates.results[0]


class _Gates:
    """Runs gates, each a function that yields what is wrong, and keeps their results."""

    def __init__(self, entry: Entry, dtype: mx.Dtype, seed: int):
        self.entry, self.dtype, self.seed = entry, dtype, seed
        self.results: list[GateResult] = []

    def run(self, gate: str, find: Callable[[], Iterator[str]]) -> None:
        begin = time.perf_counter()
        try:
            wrong = list(find())
        except (
            simulator.KernelFault,
            simulator.CompileError,
            simulator.CompilerMissing,
            address_spaces.ClangMissing,
        ) as error:
            wrong = [str(error)]
        detail = f"seed {self.seed}: " + "; ".join(wrong[:5]) if wrong else "ok"
        seconds = time.perf_counter() - begin
        name = dtype_name(self.dtype)
        self.results.append(GateResult(self.entry.name, gate, name, not wrong, detail, seconds))

    def fail(self, *names: str, why: str) -> None:
        """Gates that could not be tried."""
        for gate in names:
            self.run(gate, lambda: iter([why]))


def _launches(entry: Entry, dtype: mx.Dtype, seed: int) -> list[tuple[Case, Launch]]:
    mx.random.seed(seed)
    return [(case, case.make(dtype)) for case in entry.cases]


def _address_spaces(entry: Entry, launches: list[tuple[Case, Launch]]) -> Iterator[str]:
    # One case suffices unless others put an input on the other side of MLX's `constant` limit.
    seen = set()
    for _, launch in launches:
        small = tuple(array.size < 8 for array in launch.inputs)
        if small not in seen:
            seen.add(small)
            yield from address_spaces.check(entry.kernel.text, launch)
            if not entry.resident:  # which Metal is not offered
                yield from metal_rules.broken(entry.kernel.text, launch)


def _cuda_text(entry: Entry, launches: list[tuple[Case, Launch]]) -> Iterator[str]:
    for case, launch in launches:
        try:
            unit = cuda_build.translation_unit(entry.kernel.text, launch, entry.kernel.cuda)
            used = cuda_build.usage(cuda_build.compile_cuda(unit).log)
        except cuda_build.CudaError as error:
            yield f"{case.label}: {error}"
            continue
        if not used.groups(threads := prod(threadgroup_size(launch))):
            yield f"{case.label}: {threads} threads of {used.registers} registers each do not fit a multiprocessor"


def _against_reference(
    entry: Entry,
    dtype: mx.Dtype,
    launches: list[tuple[Case, Launch]],
    outputs_of: Callable[[Case, Launch], Sequence[mx.array]],
) -> Iterator[str]:
    if not launches:
        yield "no case ran to its end"
    for case, launch in launches:
        # On the CPU: MLX's products on an NVIDIA GPU round fp32 operands to tf32, which would be no reference.
        with mx.stream(mx.cpu):
            wanted = run_on("reference", entry.kernel, launch)
            mx.eval(wanted)
        wanted = entry.parts(launch, wanted)
        for name, got in entry.parts(launch, outputs_of(case, launch)).items():
            if problem := compare(got, wanted[name], entry.tolerance[dtype]):
                yield f"{case.label}: output {name} {problem}"


def compare(got: mx.array, want: mx.array, tolerance: Tolerance) -> str:
    """What is wrong with an output, or "". Integers and booleans must be equal; NaN and infinities must match."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"is {got.shape} {got.dtype}, expected {want.shape} {want.dtype}"
    if not mx.issubdtype(got.dtype, mx.floating):
        wrong = got != want
        return f"differs in {int(wrong.sum())} of {wrong.size} elements" if mx.any(wrong).item() else ""
    a, b = got.astype(mx.float32), want.astype(mx.float32)
    same = (a == b) | (mx.isnan(a) & mx.isnan(b))
    error = mx.where(same, 0.0, mx.abs(a - b))
    wrong = mx.logical_not(same | (error <= tolerance.absolute + tolerance.relative * mx.abs(b)))
    if not mx.any(wrong).item():
        return ""
    worst = f"{error.max().item():.3g} of {mx.abs(b).max().item():.3g}"
    return f"is off by up to {worst} in {int(wrong.sum())} of {wrong.size} elements"


def _schedules(entry: Entry, launches: list[tuple[Case, Launch]], runs: dict) -> Iterator[str]:
    for case, launch in launches:
        other = simulator.run(entry.kernel.text, launch, check=True, order="reverse", resident=entry.resident)
        yield from (f"{case.label}, reversed: {fault}" for fault in other.faults)
        yield from _different_bits(entry, f"{case.label}: reversed schedule", runs[case.label].outputs, other.outputs)


def _plain_build(entry: Entry, launches: list[tuple[Case, Launch]], runs: dict) -> Iterator[str]:
    for case, launch in launches:
        plain = simulator.run(entry.kernel.text, launch, resident=entry.resident)
        yield from (f"{case.label}: {fault}" for fault in plain.faults)
        yield from _different_bits(entry, f"{case.label}: plain build", runs[case.label].outputs, plain.outputs)


def _in_place(entry: Entry, launches: list[tuple[Case, Launch]], runs: dict) -> Iterator[str]:
    for case, launch in launches:
        if pairs := entry.kernel.rewritten(launch):
            shared = simulator.run(entry.kernel.text, launch, check=True, resident=entry.resident, in_place=pairs)
            yield from (f"{case.label}, in place: {fault}" for fault in shared.faults)
            yield from _different_bits(entry, f"{case.label}: in place", runs[case.label].outputs, shared.outputs)


def _different_bits(entry: Entry, what: str, one: list[mx.array], other: list[mx.array]) -> Iterator[str]:
    for name, a, b in zip(entry.kernel.text.output_names, one, other, strict=False):
        if not mx.array_equal(a, b, equal_nan=True).item():
            yield f"{what} gives other bits in {name}"


def _traffic(entry: Entry, dtype: mx.Dtype, runs: dict) -> Iterator[str]:
    budget = entry.budget(dtype)
    if budget is None:
        yield "no budget stored: `labkit kernels trace --store` writes what it moves today"
        return
    first = runs.get(entry.cases[0].label)
    if first is None:
        yield "the first case did not run"
        return
    yield from over_budget(first.traffic.summary(), budget, entry.traffic_slack)
