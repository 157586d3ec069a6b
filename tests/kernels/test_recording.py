"""Functions of launches, recorded and replayed launch by launch on a CPU; and the graphs' calls, told to a driver that
only writes them down."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import Kernel, cuda_build
from labkit.kernels.launch import CudaOverride
from labkit.kernels.recording import Moved, NoRoom, NotRecordable, Recording, count_on, cuda_graph, cuda_units, record
from labkit.kernels.recording.on_host import OnHost
from labkit.kernels.targets import use_target

MACHINE = OnHost("reference")


@pytest.fixture(autouse=True)
def on_reference():
    with use_target("reference"):
        yield


def ints(*numbers: int) -> mx.array:
    array = mx.array(numbers, dtype=mx.int32)
    mx.eval(array)
    return array


ONE = ints(1, 0, 2, 0)


def step(carried: list[mx.array], given: list[mx.array]) -> list[mx.array]:
    """A counter, and a sum of what is given, by way of an array that is neither."""
    number, total = carried
    between = count_on(total.reshape(-1), given[0])
    return [count_on(number, ONE), count_on(between, given[1]).reshape(total.shape)]


def carried() -> list[mx.array]:
    return [ints(0, 0, 0, 0), ints(1, 2, 3, 4).reshape(2, 2)]


def given(first: int = 10, second: int = 100) -> list[mx.array]:
    return [ints(*[first] * 4), ints(*[second] * 4)]


def directly(times: int, arrays: list[mx.array], others: list[mx.array]) -> list[list]:
    """What the function leaves after so many calls."""
    for _ in range(times):
        arrays = step(arrays, others)
    return values(arrays)


def values(arrays: list[mx.array]) -> list[list]:
    return [array.tolist() for array in arrays]


@pytest.fixture
def recording():
    return record(step, carried(), given(), MACHINE, reads=[1])


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 2, 3, 6])
def test_replays_leave_what_calls_leave(recording, times):
    recording.open(carried(), given())
    begun = [recording.replay() for _ in range(times)]
    assert values(recording.carried()) == directly(times, carried(), given())
    for index, one in list(enumerate(begun, 1))[-2:]:
        (read,) = recording.read(one)
        assert read.dtype == np.uint8
        assert read.view(np.int32).reshape(2, 2).tolist() == directly(index, carried(), given())[1]


def test_what_is_carried_out_is_a_copy(recording):
    recording.open(carried(), given())
    recording.replay()
    first = recording.carried()
    recording.replay()
    recording.replay()
    assert values(first) == directly(1, carried(), given())


def test_a_second_opening_starts_from_its_own_arrays(recording):
    """After an odd number of replays the other set is the newest; and what is given lies elsewhere each time."""
    kept = []
    for times, first in [(3, 1), (2, 5), (1, 7), (4, 7)]:
        arrays = [ints(first, 0, 0, 0), ints(first, 1, 2, 3).reshape(2, 2)]
        others = given(first, 3 * first)
        kept.append(others)  # so that the next ones lie elsewhere
        mine = recording.open(arrays, others)
        assert values(mine) == values(arrays)
        for _ in range(times):
            recording.replay()
        assert values(recording.carried()) == directly(times, arrays, others)
        recording.close()


def test_what_was_carried_out_can_be_carried_in(recording):
    recording.open(carried(), given())
    recording.replay()
    recording.open(recording.carried(), given())
    recording.replay()
    assert values(recording.carried()) == directly(2, carried(), given())


def test_its_own_arrays_can_be_carried_in(recording):
    mine = recording.open(carried(), given())
    recording.open(mine, given())
    recording.replay()
    assert values(recording.carried()) == directly(1, carried(), given())


def test_inputs_may_be_parts_of_what_is_given_and_carried():
    def parts(arrays, others):
        low = others[0][:4]
        both = count_on(arrays[0], others[0])
        return [both, count_on(count_on(arrays[1], low), both[4:])]

    start = lambda: [ints(*range(8)), ints(1, 2, 3, 4)]
    made = record(parts, start(), [ints(*range(8))], MACHINE)
    others = [ints(*range(10, 18))]
    made.open(start(), others)
    wanted = start()
    for _ in range(3):
        made.replay()
        wanted = parts(wanted, others)
    assert values(made.carried()) == values(wanted)


def strided(first: int) -> mx.array:
    """Every second of eight numbers."""
    return ints(*range(first, first + 8))[::2]


def test_what_is_given_or_carried_may_have_strides(recording):
    arrays, others = [strided(0), mx.transpose(ints(1, 2, 3, 4).reshape(2, 2))], [strided(3), strided(9)]
    mx.eval(arrays, others)
    for made in (recording, record(step, arrays, others, MACHINE)):
        mine = made.open(arrays, others)
        assert values(mine) == values(arrays)
        gc.collect()
        filler = [mx.full((4,), index, dtype=mx.int32) for index in range(64)]
        mx.eval(filler)
        made.replay()
        assert values(made.carried()) == directly(1, arrays, others)
        made.close()


def test_empty_arrays():
    def beside(arrays, others):
        return [count_on(arrays[0], others[0]), arrays[1]]

    start = [ints(1, 2), mx.zeros((0, 3))]
    made = record(beside, start, [ints(5, 6), mx.zeros((0,), mx.int32)], MACHINE)
    made.open(start, [ints(7, 8), mx.zeros((0,), mx.int32)])
    made.replay()
    assert values(made.carried()) == [[8, 10], []]
    assert made.carried()[1].shape == (0, 3)


def test_bytes_are_those_of_all_that_it_wrote(recording):
    assert recording.nbytes == 16 * 3, "three launches' outputs: what is carried is among them"
    assert recording._sets[0] == recording._sets[1], "and is written where it is read"


def test_what_is_read_too_late_to_be_written_in_place_has_two_sets():
    """The one by a launch behind the one that writes it, the other by that one, as it may not."""

    def late(arrays, others):
        first = count_on(arrays[0], ONE)
        return [first, launched(MIRRORED, arrays[1]), count_on(arrays[2], arrays[0])]

    start = lambda: [ints(1, 2, 3, 4), ints(5, 6, 7, 8), ints(9, 10, 11, 12)]
    made = record(late, start(), [], MACHINE)
    assert [one is other for one, other in zip(*made._sets, strict=True)] == [False, False, True]
    assert made.nbytes == 16 * (3 + 2)
    made.open(start(), [])
    wanted = start()
    for _ in range(3):
        made.replay()
        wanted = late(wanted, [])
    assert values(made.carried()) == values(wanted)


def test_what_is_given_is_held_only_while_it_is_open():
    others, base = [mx.zeros((1 << 20,), mx.int32) for _ in range(2)], [ints(0), ints(1, 2)]
    mx.eval(others)

    def look(arrays, others):
        return [count_on(arrays[0], others[0][:1]), count_on(arrays[1], others[1][4:6])]

    made = record(look, base, others, MACHINE)
    held = mx.get_active_memory()
    del others
    gc.collect()
    assert held - mx.get_active_memory() >= 8 << 20, "what a recording was noted with lives on"
    others = [mx.ones((1 << 20,), mx.int32) for _ in range(2)]
    mx.eval(others)
    made.open(base, others)
    held = mx.get_active_memory()
    del others
    gc.collect()
    assert held - mx.get_active_memory() < 1 << 20, "an open recording needs what it was given"
    made.replay()
    assert values(made.carried()) == [[1], [2, 3]]
    made.close()
    assert held - mx.get_active_memory() >= 8 << 20


def test_making_one_needs_one_set_besides_its_own():
    """And what it was noted with goes."""
    size, arrays = 8 << 20, [mx.zeros((1 << 20,), mx.int64).view(mx.int32)]
    by = mx.ones((1 << 21,), mx.int32)
    mx.eval(arrays, by)
    before, held = mx.get_active_memory(), []

    class Weighing(OnHost):
        def prepare(self, program):
            held.append(mx.get_active_memory() - before)
            return super().prepare(program)

    mx.reset_peak_memory()
    made = record(lambda c, g: [count_on(count_on(c[0], g[0]), g[0])], arrays, [by], Weighing("reference"))
    # On the host what a launch reads and writes lies outside of the recording's memory too, for this one and the last.
    assert mx.get_peak_memory() - before < (4 + 3.2) * size
    assert held[0] < 3.1 * size, "what is written, and the right answer"
    gc.collect()
    assert made.nbytes == 2 * size
    assert mx.get_active_memory() - before < 2.1 * size


def test_without_room_nothing_is_computed():
    size, arrays, by = 4 << 20, [mx.zeros((1 << 20,), mx.int32)], [mx.ones((1 << 20,), mx.int32)]
    mx.eval(arrays, by)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    twice = lambda c, g: [count_on(count_on(c[0], g[0]), g[0])]
    with pytest.raises(NoRoom, match=f"{4 * size} bytes are needed, and {4 * size - 1} may be taken"):
        record(twice, arrays, by, MACHINE, room=4 * size - 1)
    assert mx.get_peak_memory() - before < 0.1 * size
    assert record(twice, arrays, by, MACHINE, room=4 * size).nbytes == 2 * size


# -- what cannot be recorded -------------------------------------------------------------------------------------------


def refused(function: Any, match: str, arrays: list[mx.array] | None = None) -> None:
    with pytest.raises(NotRecordable, match=match):
        record(function, arrays or carried(), given(), MACHINE)


def test_an_operation_before_a_launch():
    refused(lambda c, g: step([c[0] + 1, c[1]], g), "input counters of kernel count_on .* an operation of MLX's own")


def test_an_operation_between_two_launches():
    refused(lambda c, g: step([count_on(c[0], ONE) * 2, c[1]], g), "input counters of kernel count_on")


def test_an_operation_behind_the_last_launch():
    refused(lambda c, g: [step(c, g)[0] * 2, step(c, g)[1]], "carried array 0 is not a launch's output")


def test_an_operation_on_what_is_given():
    refused(lambda c, g: step(c, [g[0] + g[1], g[1]]), "input by of kernel count_on")


def test_a_part_with_strides():
    """MLX would make a copy of it before the launch; its place is nobody's."""
    wide = [ints(*range(8)), ints(1, 2, 3, 4).reshape(2, 2)]
    refused(lambda c, g: [count_on(c[0], c[0]), count_on(c[0][::2], g[0]).reshape(2, 2)], "input counters", wide)


def test_a_constant_with_strides():
    """The same object in both calls, but no whole memory: nothing would hold the copy."""
    odd = ints(*range(8))[::2]
    mx.eval(odd)
    refused(lambda c, g: [count_on(c[0], odd), step(c, g)[1]], "input by of kernel count_on")


def test_a_part_of_an_output():
    def part(arrays, others):
        return [count_on(others[0], others[1])[:2], step([ints(1, 2, 3, 4), arrays[1]], others)[1]]

    refused(part, "carried array 0 is a part of a launch's output", [ints(1, 2), carried()[1]])


def test_a_carried_array_left_as_it_was():
    refused(lambda c, g: [c[0], step(c, g)[1]], "carried array 0 is not a launch's output: .* left as it was")


def test_one_output_carried_twice():
    """At the second call the one would be written and the other read."""

    def twice(arrays, others):
        out = count_on(arrays[0], arrays[1])
        return [out, out]

    refused(twice, "carried arrays 0 and 1 are one output", [ints(1, 2, 3, 4), ints(5, 6, 7, 8)])


@pytest.mark.parametrize("change", [lambda a: a.reshape(4, 1), lambda a: a.view(mx.uint32)], ids=["shape", "dtype"])
def test_a_carried_array_that_changes(change):
    refused(lambda c, g: [change(step(c, g)[0]), step(c, g)[1]], "changes its shape or dtype")


def test_arrays_that_share_memory():
    """At the next opening they may not, and one of them would be read for the other."""
    both, parts = ints(5, 6, 7, 8), ints(*range(6))
    for others in ([both, both], [parts[:4], parts[2:]], [parts[1:5], parts[2:6]]):
        mx.eval(others)
        with pytest.raises(NotRecordable, match="arrays given 0 and given 1 share memory"):
            record(step, carried(), others, MACHINE)
    arrays = carried()
    with pytest.raises(NotRecordable, match="arrays before 0 and given 1 share memory"):
        record(step, arrays, [both, arrays[0]], MACHINE)
    record(step, carried(), [parts[:4], ints(1, 2, 3, 4)], MACHINE)


def test_each_graph_is_compared():
    class Crooked(Witness):
        """Its second graph writes elsewhere."""

        def build(self, prepared, resolve):
            built = super().build(prepared, resolve)
            if self.calls["build"] == 2:
                node, inputs, _ = built[-1]
                built[-1] = (node, inputs, super().addresses([LOST]))
            return built

    with pytest.raises(NotRecordable, match=r"carried arrays \[1\] differ when they are replayed"):
        record(step, carried(), given(), Crooked())


LOST = ints(0, 0, 0, 0)


def test_launches_that_differ_from_call_to_call():
    calls = []

    def other(arrays, others):
        calls.append(0)
        first = count_on(arrays[0], ONE)
        return [first if len(calls) % 2 else count_on(first, ONE), step(arrays, others)[1]]

    refused(other, "two calls made different launches")


MIRRORED = Kernel(
    "mirrored",
    ["x"],
    ["y"],
    "uint i = thread_position_in_grid.x; if (i < 4) y[i] = x[3 - i];",
    reference=lambda launch: [launch.inputs[0][mx.array([3, 2, 1, 0])]],
)
SCALED = Kernel(
    "scaled_by",
    ["x", "factor"],
    ["y"],
    "uint i = thread_position_in_grid.x; y[i] = x[i] * factor;",
    reference=lambda launch: [launch.inputs[0] * launch.inputs[1]],
)
FILLED = Kernel(
    "filled",
    ["x"],
    ["y"],
    "uint i = thread_position_in_grid.x; y[i] += x[i];",
    reference=lambda launch: [launch.inputs[0]],
)


def launched(kernel: Kernel, *inputs: Any, **options: Any) -> mx.array:
    return kernel(
        inputs=inputs,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[inputs[0].shape],
        output_dtypes=[inputs[0].dtype],
        **options,
    )[0]


def test_a_number_that_python_counts():
    numbers = iter(range(100))
    refused(lambda c, g: [launched(SCALED, c[0], next(numbers)), step(c, g)[1]], "two calls made different launches")


def test_numbers_that_stay_are_recorded():
    """Zeros too, which are new arrays at each call."""
    for factor in (0, 3):
        made = record(lambda c, g, factor=factor: [launched(SCALED, c[0], factor)], [ints(1, 2)], [], MACHINE)
        made.open([ints(1, 2)], [])
        made.replay()
        made.replay()
        assert values(made.carried()) == [[factor**2, 2 * factor**2]]


def test_outputs_that_are_filled_first():
    refused(
        lambda c, g: [launched(FILLED, c[0], init_value=0), step(c, g)[1]], "kernel filled wants its outputs filled"
    )


def test_a_kernel_that_depends_on_what_is_not_carried():
    seen = []

    def reference(launch):
        seen.append(0)
        return [launch.inputs[0] + len(seen)]

    drifting = Kernel("drifting", ["x"], ["y"], "y[0] = x[0];", reference=reference)
    refused(
        lambda c, g: [launched(drifting, c[0]), step(c, g)[1]], r"carried arrays \[0\] differ when they are replayed"
    )


def test_nothing_is_left_of_what_was_refused():
    machine = Witness()
    with pytest.raises(NotRecordable):
        record(lambda c, g: [c[0] + 1, step(c, g)[1]], carried(), given(), machine)
    assert not machine.calls["build"]


# -- opening -----------------------------------------------------------------------------------------------------------


def test_other_shapes_are_refused(recording):
    with pytest.raises(ValueError, match="of the shapes and dtypes that it was recorded with"):
        recording.open([ints(1, 2), carried()[1]], given())
    with pytest.raises(ValueError, match="recorded with"):
        recording.open(carried(), [given()[0].astype(mx.uint32), given()[1]])
    with pytest.raises(ValueError, match="recorded with"):
        recording.open(carried(), given()[:1])


class Witness(OnHost):
    """Counts what it is asked for; may say that arrays lie elsewhere."""

    def __init__(self):
        super().__init__("reference")
        self.calls, self.copied, self.released = Counter(), [], []
        self.moved: set[int] = set()

    def addresses(self, arrays):
        self.calls["addresses"] += 1
        found = zip(super().addresses(arrays), arrays, strict=True)
        return [address + 64 * (id(array) in self.moved) for address, array in found]

    def build(self, prepared, resolve):
        self.calls["build"] += 1
        return super().build(prepared, resolve)

    def move(self, built, resolve):
        self.calls["move"] += 1
        super().move(built, resolve)

    def release(self, built):
        self.released.append(id(built))

    def copy(self, pairs):
        self.copied += [nbytes for _, _, nbytes in pairs]
        super().copy(pairs)

    def wait(self):
        self.calls["wait"] += 1


def test_weights_that_lie_elsewhere():
    machine = Witness()
    made = record(step, carried(), given(), machine)
    machine.moved = {id(ONE)}
    with pytest.raises(Moved, match="weights lie elsewhere"):
        made.open(carried(), given())
    machine.moved = set()
    made.open(carried(), given())
    made.replay()
    assert values(made.carried()) == directly(1, carried(), given())


def test_what_did_not_move_is_not_touched():
    """Opening with the same arrays copies what is carried, and builds nothing."""
    machine, others = Witness(), given()
    made = record(step, carried(), others, machine)
    for inputs, moves in [(others, {}), (given(), {"move": 2})]:
        machine.calls.clear()
        machine.copied.clear()
        made.open(carried(), inputs)
        assert machine.calls == {"wait": 2, "addresses": 2, **moves}
        assert machine.copied == [16, 16]


class Halfway(Witness):
    """Fails when it is asked for something the second time since it was told to."""

    def __init__(self):
        super().__init__()
        self.failing = ""

    def build(self, prepared, resolve):
        return self._maybe("build", super().build, prepared, resolve)

    def move(self, built, resolve):
        self._maybe("move", super().move, built, resolve)

    def wait(self):
        self._maybe("wait", super().wait)

    def _maybe(self, name, call, *arguments):
        if self.failing == name and self.calls[name]:
            raise KeyboardInterrupt
        return call(*arguments)


def test_a_graph_whose_twin_cannot_be_built_goes():
    machine = Halfway()
    machine.failing = "build"
    with pytest.raises(KeyboardInterrupt):
        record(step, carried(), given(), machine)
    gc.collect()
    assert len(machine.released) == 1


def test_graphs_that_were_moved_halfway_are_moved_at_the_next_opening():
    machine = Halfway()
    made = record(step, carried(), given(), machine)
    machine.calls.clear()
    machine.failing, others = "move", given(3, 4)
    with pytest.raises(KeyboardInterrupt):
        made.open(carried(), others)
    machine.failing = ""
    made.open(carried(), others)
    for _ in range(2):
        made.replay()
    assert values(made.carried()) == directly(2, carried(), others)


def test_what_was_given_goes_even_where_the_machine_fails():
    class Failing(Witness):
        def wait(self):
            if self.calls["fail"]:
                raise RuntimeError("gone")

    machine, others, failures = Failing(), given(), []
    made = record(step, carried(), others, machine, failures=failures)
    made.open(carried(), others)
    machine.calls["fail"] = 1
    with pytest.raises(RuntimeError, match="gone"):
        made.close()
    assert not made._given
    assert failures == ["RuntimeError: gone"]


def test_it_lets_go_of_both_graphs_once_when_it_goes():
    machine = Witness()
    made = record(step, carried(), given(), machine)
    gone = weakref.ref(made)
    made.open(carried(), given())
    made.replay()
    assert not machine.released
    del made
    gc.collect()
    assert gone() is None
    assert len(machine.released) == len(set(machine.released)) == 2 == machine.calls["build"]


# -- as CUDA graphs ----------------------------------------------------------------------------------------------------


class Status(IntEnum):
    SUCCESS = 0
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Driver:
    """NVIDIA's driver as far as recordings call it. It writes calls down and copies, and computes nothing."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared")
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self):
        self.calls: list[tuple] = []
        self.failing = ""
        self._hosts: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple:
            if name == self.failing:
                return (Status.CUDA_ERROR_ILLEGAL_ADDRESS,)
            self.calls.append((name, *arguments))
            return Status.SUCCESS, self._result(name, arguments)

        call.__name__ = name
        return call

    def _result(self, name: str, arguments: tuple) -> Any:
        if name == "cuDeviceGetAttribute":
            return arguments[0]
        if name == "cuMemAllocHost":
            memory = ctypes.create_string_buffer(arguments[0])
            self._hosts[ctypes.addressof(memory)] = memory
            return ctypes.addressof(memory)
        if name in ("cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"):
            ctypes.memmove(*arguments[:3])
        if name == "cuMemFreeHost":
            del self._hosts[arguments[0]]
        return f"{name} {len(self.calls)}"

    def of(self, name: str) -> list[tuple]:
        return [arguments for called, *arguments in self.calls if called == name]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_graph, "_driver", lambda: made)
    monkeypatch.setattr(cuda_graph, "cubin_of", lambda unit, architecture: f"{architecture}: {unit}".encode())
    return made


class Graphs(cuda_graph.CudaGraphs):
    """With addresses of a CPU's memory."""

    def addresses(self, arrays):
        return MACHINE.addresses(arrays)

    def copies(self, arrays):
        return MACHINE.copies(arrays)


LARGE = Kernel(
    "large",
    ["x", "few", "N"],
    ["y"],
    "uint i = thread_position_in_grid.x; if (i < uint(N) && threads_per_grid.x > 0) y[i] = x[i] + few[0];",
    reference=lambda launch: [launch.inputs[0] + launch.inputs[1][0]],
    cuda=CudaOverride("y[0] = x[0] + few[0] + N + threads_per_grid.x;", shared_memory=64 * 1024),
)


def with_large(arrays: list[mx.array], others: list[mx.array]) -> list[mx.array]:
    """What is carried and given, by two kernels: four launches of count_on's form, one of a grid that is cut off."""
    (large,) = LARGE(
        inputs=[count_on(arrays[0], ONE), others[0][1:], 4],
        grid=(70, 3, 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(4,)],
        output_dtypes=[mx.int32],
    )
    return [count_on(large, ONE), count_on(arrays[1], others[1])]


def as_graphs(driver: Driver) -> tuple[Recording, list[mx.array], list[mx.array]]:
    start = [ints(1, 2, 3, 4), ints(5, 6, 7, 8)]
    known = record(with_large, start, given(), MACHINE, reads=[1])
    others, graphs = given(), Graphs()
    return Recording(graphs, known._program, known._sets, others, [1]), start, others


def parameters_of(call: tuple) -> SimpleNamespace:
    return call[-1]


def addresses_of(call: tuple) -> tuple[int, ...]:
    values, types = parameters_of(call).kernelParams
    assert set(types) == {ctypes.c_void_p}
    return values


def test_a_graph_is_a_chain_of_its_launches(driver):
    made, *_ = as_graphs(driver)
    nodes = driver.of("cuGraphAddKernelNode")
    assert len(nodes) == 8, "two graphs of four launches"
    handles = [
        f"cuGraphAddKernelNode {index}"
        for index, call in enumerate(driver.calls, 1)
        if call[0] == "cuGraphAddKernelNode"
    ]
    for graph in (nodes[:4], nodes[4:]):
        assert len({handle for handle, *_ in graph}) == 1
        assert [count for _, _, count, _ in graph] == [0, 1, 1, 1]
    assert [behind for _, behind, _, _ in nodes] == [[], *([h] for h in handles[:3]), [], *([h] for h in handles[4:7])]
    blocks = [
        (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ) for p in map(parameters_of, nodes)
    ]
    assert blocks == [(1, 1, 1, 32, 1, 1), (3, 2, 1, 32, 2, 1), (1, 1, 1, 32, 1, 1), (1, 1, 1, 32, 1, 1)] * 2
    assert [p.sharedMemBytes for p in map(parameters_of, nodes)] == [0, 64 * 1024, 0, 0] * 2
    # Two forms, each loaded once; only the one with more than 48 KB says so.
    loaded = driver.of("cuModuleLoadData")
    assert len(loaded) == 2
    assert all(cubin.startswith(b"sm_90a: ") for (cubin,) in loaded)
    assert [name for _, name in driver.of("cuModuleGetFunction")] == [b"custom_kernel_count_on", b"custom_kernel_large"]
    ((_, attribute, size),) = driver.of("cuFuncSetAttribute")
    assert (attribute, size) == ("dynamic shared", 64 * 1024)
    del made


def test_a_launch_gets_inputs_numbers_grid_and_outputs(driver):
    made, _, others = as_graphs(driver)
    (one,), (before, before_1), (after, after_1) = map(MACHINE.addresses, ([ONE], made._sets[0], made._sets[1]))
    first, large, last, sums = map(addresses_of, driver.of("cuGraphAddKernelNode")[:4])
    given_0, given_1 = MACHINE.addresses(others)
    words = lambda address, count: list((ctypes.c_uint32 * count).from_address(address))
    assert first[:2] == (before, one)
    assert words(first[2], 1) == [4]
    assert len(first) == 4
    assert large[:2] == (first[-1], given_0 + 4)
    assert words(large[2], 1) == [4]
    assert words(large[3], 3) == [70, 3, 1]
    assert len(large) == 5
    assert last[0] == large[-1]
    assert last[1] == one
    assert last[-1] == after
    assert sums[:2] == (before_1, given_1)
    assert sums[-1] == after_1
    # The other graph reads what this one writes; what lies between the two ends is the same memory.
    first, large, last, sums = map(addresses_of, driver.of("cuGraphAddKernelNode")[4:])
    assert (first[0], last[-1], sums[0], sums[-1]) == (after, before, after_1, before_1)
    assert large[0] == first[-1] == addresses_of(driver.of("cuGraphAddKernelNode")[0])[-1]


def test_only_nodes_with_given_arrays_are_moved(driver):
    made, start, _ = as_graphs(driver)
    others = given(1, 2)
    handles = [
        f"cuGraphAddKernelNode {index}"
        for index, call in enumerate(driver.calls, 1)
        if call[0] == "cuGraphAddKernelNode"
    ]
    executables = [
        f"cuGraphInstantiate {index}" for index, call in enumerate(driver.calls, 1) if call[0] == "cuGraphInstantiate"
    ]
    made.open(start, others)
    moved = driver.of("cuGraphExecKernelNodeSetParams")
    assert [(exe, node) for exe, node, _ in moved] == [
        (executables[index // 4], handles[index]) for index in (1, 3, 5, 7)
    ]
    where = MACHINE.addresses(others)
    assert [addresses_of(call)[1] for call in moved] == [where[0] + 4, where[1]] * 2
    driver.calls.clear()
    made.open(start, others)
    assert not driver.of("cuGraphExecKernelNodeSetParams")


def test_replays_launch_by_turns_and_reads_wait_for_their_own_event(driver):
    made, start, others = as_graphs(driver)
    made.open(start, others)
    assert values(made._sets[0]) == values(start), "copied in"
    driver.calls.clear()
    begun = [made.replay() for _ in range(3)]
    launched = [graph for graph, _ in driver.of("cuGraphLaunch")]
    assert launched[0] == launched[2] != launched[1]
    sources = [source for _, source, _, _ in driver.of("cuMemcpyDtoHAsync")]
    (_, before), (_, after) = map(MACHINE.addresses, made._sets)
    assert sources == [after, before, after]
    assert len(driver.of("cuMemAllocHost")) == 2, "memory of its own for each graph, once"
    events = [event for event, _ in driver.of("cuEventRecord")]
    (read,) = made.read(begun[1])
    assert driver.of("cuEventSynchronize") == [[events[1]]]
    assert read.view(np.int32).tolist() == made._sets[0][1].tolist()
    del begun, made
    gc.collect()
    names = Counter(name for name, *_ in driver.calls)
    assert names["cuGraphExecDestroy"] == names["cuGraphDestroy"] == names["cuEventDestroy"] == 2
    assert not driver._hosts, "memory for reads is freed"
    end = [name for name, *_ in driver.calls]
    assert end.index("cuStreamSynchronize") < end.index("cuGraphExecDestroy")


@pytest.mark.parametrize("failing", ["cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphUpload", "cuEventCreate"])
def test_graphs_that_could_not_be_built_leave_nothing(driver, failing):
    class Second(Graphs):
        def build(self, calls, resolve):
            driver.failing = failing if driver.of("cuGraphCreate") else ""
            return super().build(calls, resolve)

    known = record(with_large, [ints(1, 2, 3, 4), ints(5, 6, 7, 8)], given(), MACHINE)
    with pytest.raises(RuntimeError, match=failing):
        Recording(Second(), known._program, known._sets, given(), [])
    gc.collect()
    names = Counter(name for name, *_ in driver.calls)
    assert names["cuGraphCreate"] == names["cuGraphDestroy"] == 2
    assert names["cuGraphInstantiate"] == names["cuGraphExecDestroy"]
    assert names["cuEventCreate"] == names["cuEventDestroy"]


def test_a_device_that_has_failed_is_let_go_of_in_silence(driver, recwarn):
    made, start, others = as_graphs(driver)
    made.open(start, others)
    made.replay()
    driver.failing = "cuStreamSynchronize"
    del made
    gc.collect()
    names = Counter(name for name, *_ in driver.calls)
    assert names["cuGraphExecDestroy"] == names["cuGraphDestroy"] == names["cuEventDestroy"] == 2
    assert not driver._hosts
    assert not recwarn


def test_errors_of_the_driver_name_its_function(driver):
    made, start, others = as_graphs(driver)
    made.open(start, others)
    again = MACHINE.copies(start)
    for failing, ask in [
        ("cuGraphLaunch", made.replay),
        ("cuStreamSynchronize", made.close),
        ("cuMemcpyDtoDAsync", lambda: made.open(again, others)),
    ]:
        driver.failing = failing
        with pytest.raises(RuntimeError, match=f"{failing} failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
            ask()
    driver.failing = ""


ASKS = Kernel(
    "asks", ["x"], ["y"], "y[thread_position_in_grid.x] = x[x_shape[0] - 1];", reference=lambda launch: launch.inputs
)


def test_kernels_that_ask_for_shapes_are_refused(driver):
    known = record(lambda c, g: [count_on(launched(ASKS, c[0]), ONE)], [ints(1, 2, 3, 4)], [], MACHINE)
    with pytest.raises(NotRecordable, match="kernel asks asks for an input's shape"):
        Recording(Graphs(), known._program, known._sets, [], [])


needs_nvrtc = pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())


@needs_nvrtc
def test_a_compiled_text_has_the_plain_name():
    node = record(step, carried(), given(), MACHINE)._program.nodes[0]
    cubin = cuda_units.cubin_of(cuda_units.unit_of(node), "sm_90a")
    assert cubin[:4] == b"\x7fELF"
    assert b"\0custom_kernel_count_on\0" in cubin, "the function is found by this name"
    assert b"_ZN3mlx4core2cu" not in cubin
