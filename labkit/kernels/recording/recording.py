"""A recorded function that carries arrays from call to call, replayed where it was recorded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.kernels.recording.machine import Machine
from labkit.kernels.recording.memory import as_bytes, whole
from labkit.kernels.recording.program import Noted, NotRecordable, Place, Program, as_program
from labkit.kernels.targets import watched

Step = Callable[[list[mx.array], list[mx.array]], list[mx.array]]
"""(what is carried, what is given) -> what is carried on, in the same shapes."""


class Moved(Exception):
    """What a recording rests on lies elsewhere by now: record anew."""


class NoRoom(Exception):
    """Making a recording would take more memory than there is now."""


class Recording:
    """Two graphs of one program. One reads the first set of carried arrays and writes the second, the other the other
    way round. What may be written where it is read is the same array in both sets.

    Open it, replay it as often as wanted, and take `carried` out: between `open` and the next one nobody else may write
    what is given, and what is carried lies in the recording's own memory.

    Args:
        failures: where it is written down why the machine could not go on with it: it is of no use then.

    Attributes:
        nbytes: of the arrays that are its own.
    """

    def __init__(
        self,
        machine: Machine,
        program: Program,
        sets: tuple[list[mx.array], list[mx.array]],
        given: Sequence[mx.array],
        reads: Sequence[int],
        failures: list[str] | None = None,
    ):
        self._machine, self._program, self._reads = machine, program, list(reads)
        self._sets, self._failures = sets, [] if failures is None else failures
        self._addresses = [machine.addresses(arrays) for arrays in sets]
        self._given, self._forms = list(given), [_form(array) for array in [*sets[0], *given]]
        self._where: list[int] | None = machine.addresses(given)
        self._side = 0
        self._graphs: list[Any] = []
        # They may be at work when the last reference goes: waited for before the arrays go.
        self._last = weakref.finalize(self, _release, machine, self._graphs)
        prepared = machine.prepare(program)
        for side in (0, 1):
            self._graphs.append(machine.build(prepared, self._resolve(side, self._where)))
        twice = (array for index, array in enumerate(sets[0]) if index not in program.rewritten)
        self.nbytes = sum(array.nbytes for array in [*program.made, *twice])

    def _resolve(self, side: int, given: Sequence[int]) -> Callable[[Place], int]:
        def address(place: Place) -> int:
            if place.kind == "fixed":
                return place.offset
            if place.kind == "given":
                return given[place.index] + place.offset
            of = side if place.kind == "before" else 1 - side
            return self._addresses[of][place.index] + place.offset

        return address

    def open(self, carried: Sequence[mx.array], given: Sequence[mx.array], *, side: int = 0) -> list[mx.array]:
        """Take over the values of evaluated arrays, in shapes and dtypes as recorded.

        Args:
            side: which of the two graphs is the first.

        Returns:
            The recording's own arrays that hold `carried` now, and stale values as soon as it is replayed.

        Raises:
            ValueError: other shapes or dtypes.
            Moved: weights lie elsewhere by now.
        """
        if [_form(array) for array in [*carried, *given]] != self._forms:
            raise ValueError("a recording is opened with arrays of the shapes and dtypes that it was recorded with")
        carried, given = whole(carried), whole(given)
        self._machine.wait()
        fixed = self._program.fixed
        if self._machine.addresses(list(fixed.values())) != list(fixed):
            raise Moved("weights lie elsewhere than when they were recorded: MLX moves what the host reads")
        self._side = side
        where = self._machine.addresses([*carried, *given])
        mine, (theirs, there) = self._addresses[side], (where[: len(carried)], where[len(carried) :])
        self._machine.copy([(to, at, a.nbytes) for to, at, a in zip(mine, theirs, carried, strict=True) if to != at])
        self._given = list(given)
        if self._where != there:
            self._where = None  # until both have moved: whatever ends this in the middle, the next opening moves them
            for number, graph in enumerate(self._graphs):
                self._machine.move(graph, self._resolve(number, there))
            self._where = there
        self._machine.wait()  # until then `carried` must live
        return self._sets[side]

    def close(self) -> None:
        """Wait for all calls, and let what was given go."""
        try:
            with self._noting():
                self._machine.wait()
        finally:
            self._given = []

    def differing(self, wanted: Sequence[mx.array]) -> list[int]:
        """Numbers of what is carried now that differs in a bit, once all calls are done."""
        self._machine.wait()
        pairs = enumerate(zip(self._sets[self._side], wanted, strict=True))
        # One after the other: each comparison makes an array as large as what it compares.
        return [index for index, (own, other) in pairs if not mx.array_equal(as_bytes(own), as_bytes(other)).item()]

    def replay(self) -> Any:
        """Begin one more call. Returns what `read` takes; the second call after it overwrites what it would read."""
        after = 1 - self._side
        sizes = [self._sets[after][index].nbytes for index in self._reads]
        reads = [(self._addresses[after][index], size) for index, size in zip(self._reads, sizes, strict=True)]
        with self._noting():
            begun = self._machine.launch(self._graphs[self._side], reads)
        self._side = after
        return begun

    def read(self, begun: Any) -> list[np.ndarray]:
        """Wait for a call: the arrays whose numbers `record` was given as `reads`, as bytes."""
        with self._noting():
            return self._machine.read(begun)

    def carried(self, *, last: bool = False) -> list[mx.array]:
        """Copies of what is carried now, once all calls are done.

        Args:
            last: the arrays themselves, and no more memory: nobody opens it again.
        """
        with self._noting():
            self._machine.wait()
            own = self._sets[self._side]
            return list(own) if last else self._machine.copies(own)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as reason:
            self._failures.append(f"{type(reason).__name__}: {reason}")
            raise


def record(
    step: Step,
    carried: Sequence[mx.array],
    given: Sequence[mx.array],
    machine: Machine,
    *,
    reads: Sequence[int] = (),
    room: int | None = None,
    failures: list[str] | None = None,
) -> Recording:
    """Run a function four times on the same arrays: twice to note its launches, once from each graph to compare.

    All that the launches write is there twice meanwhile, and once afterwards.

    Args:
        step: calls labkit's kernels, and else only such operations of MLX's as change no value (reshape, slices).
        carried, given: evaluated arrays, which stay as they are.
        reads: numbers of carried arrays that the host wants after each call.
        room: bytes that may be taken; any number by default.
        failures: as for `Recording`.

    Raises:
        NotRecordable: it does something else, or the graph's values differ in a single bit.
        NoRoom: it would take more; known before a launch is computed.
    """
    before, given = whole(carried), whole(given)
    noted, after = _noted(step, before, given)
    if room is not None and (needed := _needed(noted, before)) > room:
        raise NoRoom(f"{needed} bytes are needed, and {room} may be taken")
    _compute(noted, after)
    again, wanted = _noted(step, before, given)
    _compute(again, wanted)
    program = as_program(noted, again, before, after, given, machine.addresses)
    del noted, again
    apart = [index for index in range(len(after)) if index not in program.rewritten]
    own = list(after)
    for index, copy in zip(apart, machine.copies([before[index] for index in apart]), strict=True):
        own[index] = copy
    recording = Recording(machine, program, (own, after), given, reads, failures)
    for side in (0, 1):
        recording.open(before, given, side=side)
        recording.replay()
        if wrong := recording.differing(wanted):
            raise NotRecordable(f"carried arrays {wrong} differ when they are replayed")
    recording.close()
    return recording


def _noted(step: Step, before: list[mx.array], given: Sequence[mx.array]) -> tuple[list[Noted], list[mx.array]]:
    noted: list[Noted] = []

    def note(kernel: Any, launch: Any, outputs: list[mx.array]) -> None:
        noted.append(Noted(kernel, launch, tuple(outputs)))

    with watched(note):
        after = step(list(before), list(given))
    return noted, after


def _needed(noted: Sequence[Noted], carried: Sequence[mx.array]) -> int:
    """Bytes that making a recording takes at most: all that is written twice, or once, with what both sets of carried
    arrays and the right answer take besides."""
    written = sum(array.nbytes for launch in noted for array in launch.outputs)
    return written + max(written, 2 * sum(array.nbytes for array in carried))


def _compute(noted: Sequence[Noted], after: Sequence[mx.array]) -> None:
    # All at once: what is noted lives, so nothing is written where something else was.
    mx.eval(after, [[launch.launch.inputs, launch.outputs] for launch in noted])
    mx.synchronize()


def _release(machine: Machine, graphs: list[Any]) -> None:
    for graph in graphs:
        with contextlib.suppress(Exception):  # of a device that has failed: nobody waits for it any more
            machine.release(graph)


def _form(array: mx.array) -> tuple:
    return array.shape, array.dtype
