"""What was noted of a function's launches, with every address named by what lies there."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import mlx.core as mx

from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch

Addresses = Callable[[Sequence[mx.array]], list[int]]


class NotRecordable(Exception):
    """A function does what a recording cannot hold; the message says what."""


class Noted(NamedTuple):
    """One launch as it happened."""

    kernel: Kernel
    launch: Launch
    outputs: tuple[mx.array, ...]


class Place(NamedTuple):
    """Where an array of a launch lies.

    Attributes:
        kind: "before" and "after": what the function carries from call to call, its input and its output number
            `index`; "given": number `index` of what stays the same while a recording is open; "fixed": always there.
        offset: bytes behind its first; the address itself of what is fixed.
    """

    kind: Literal["before", "after", "given", "fixed"]
    index: int
    offset: int


@dataclass(frozen=True)
class Node:
    """A launch, and where its inputs and outputs lie. In place of what is given or carried in stand arrays of its shape
    and dtype that nobody ever evaluates: the first ones may go."""

    kernel: Kernel
    launch: Launch
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def given(self) -> bool:
        """Whether an address of it changes when a recording is opened anew."""
        return any(place.kind == "given" for place in self.inputs)

    def rewrites(self, number: int) -> bool:
        """Whether input `number` is the whole of what the launch leaves in its stead, and may be the same memory."""
        text, before = self.kernel.text, self.inputs[number]
        new = self.kernel.rewritten(self.launch).get(text.input_names[number])
        return new is not None and self.outputs[text.output_names.index(new)] == before._replace(kind="after")


@dataclass(frozen=True)
class Program:
    """The launches of one call, in order.

    Attributes:
        made: what the launches wrote; they write it again at each call.
        fixed: arrays that are always there, by their addresses.
        read: those of them that the launches were noted with. All of it lives as long as the program.
        rewritten: numbers of carried arrays that may be written where they are read.
    """

    nodes: tuple[Node, ...]
    made: tuple[mx.array, ...]
    fixed: dict[int, mx.array]
    read: tuple[mx.array, ...]
    rewritten: frozenset[int]


class _Regions:
    """Whose bytes an address is."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._found: list[tuple[int, Place | None]] = []

    def add(self, address: int, nbytes: int, place: Place | None) -> None:
        """Bytes that belong to `place`; to what is fixed if None. What was added first counts."""
        at = bisect.bisect_left(self._starts, address)
        if at < len(self._starts) and self._starts[at] == address:
            return
        self._starts.insert(at, address)
        self._found.insert(at, (nbytes, place))

    def place(self, address: int, nbytes: int) -> Place | None:
        """The place of some bytes, or None if nobody owns all of them."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, (size, place) = self._starts[at], self._found[at]
        if address + nbytes > start + size:
            return None
        return Place("fixed", 0, address) if place is None else place._replace(offset=address - start)


def as_program(
    noted: Sequence[Noted],
    again: Sequence[Noted],
    before: Sequence[mx.array],
    after: Sequence[mx.array],
    given: Sequence[mx.array],
    addresses: Addresses,
) -> Program:
    """Name every address.

    Args:
        noted: the launches. again: those of a second call with the same arguments, while all arrays of the first one
            live: an input at the same address in both is one that nobody makes anew (a weight, an option).
        before, after: what the function was given to carry on, and what it left in its place.
        given: what it was given besides, and may lie elsewhere the next time.
        addresses: where arrays lie.

    Raises:
        NotRecordable: an input that is none of these and that no launch made, something carried on that is not a
            launch's whole output, or arrays that share memory, which others may not.
    """
    if [(array.dtype, array.shape) for array in before] != [(array.dtype, array.shape) for array in after]:
        raise NotRecordable("what is carried on changes its shape or dtype from call to call")
    if [_what(launch) for launch in noted] != [_what(launch) for launch in again]:
        raise NotRecordable("two calls made different launches")
    regions = _regions(noted, before, after, given, addresses)
    inputs = [array for launch in noted for array in launch.launch.inputs]
    where, there = _addresses(inputs, [array for launch in again for array in launch.launch.inputs], addresses)
    written = iter(addresses([array for launch in noted for array in launch.outputs]))
    nodes, read, fixed, at = [], [], {}, itertools.count()
    for launch in noted:
        if launch.launch.init_value is not None:
            raise NotRecordable(
                f"kernel {launch.kernel.name} wants its outputs filled: an operation of MLX's own does it"
            )
        places = []
        for number, name in enumerate(launch.kernel.text.input_names):
            index = next(at)
            address, array = where[index], inputs[index]
            place = regions.place(address, array.nbytes) if array.size else Place("fixed", 0, address)
            if place is None and (there[index] == address or _is_number(launch.launch, number)):
                place, fixed[address] = Place("fixed", 0, address), array
            if place is None:
                raise NotRecordable(
                    f"input {name} of kernel {launch.kernel.name} is neither a launch's output nor what was given: an "
                    "operation of MLX's own made it"
                )
            places.append(place)
        outputs = [
            regions.place(address, array.nbytes) if array.size else Place("fixed", 0, address)
            for address, array in zip(itertools.islice(written, len(launch.outputs)), launch.outputs, strict=True)
        ]
        kept = [
            array if place.kind == "fixed" else mx.zeros(array.shape, array.dtype)
            for array, place in zip(launch.launch.inputs, places, strict=True)
        ]
        read += [array for array, place in zip(kept, places, strict=True) if place.kind == "fixed"]
        nodes.append(Node(launch.kernel, replace(launch.launch, inputs=tuple(kept)), tuple(places), tuple(outputs)))
    made = tuple(array for launch in noted for array in launch.outputs)
    return Program(tuple(nodes), made, fixed, tuple(read), _rewritten(nodes))


def _rewritten(nodes: Sequence[Node]) -> frozenset[int]:
    """Carried arrays that no launch reads behind the one that writes them, nor that one, but as it may."""
    writer = {place.index: at for at, node in enumerate(nodes) for place in node.outputs if place.kind == "after"}
    read_late = {
        place.index
        for at, node in enumerate(nodes)
        for number, place in enumerate(node.inputs)
        if place.kind == "before" and place.index in writer
        and (at > writer[place.index] or (at == writer[place.index] and not node.rewrites(number)))
    }  # fmt: skip
    return frozenset(writer) - read_late


def _what(noted: Noted) -> tuple:
    """All of a launch but where its arrays lie."""
    launch = noted.launch
    sizes = launch.output_shapes, launch.output_dtypes, launch.grid, launch.threadgroup, launch.template
    return noted.kernel.name, [(array.shape, array.dtype) for array in launch.inputs], launch.numbers, *sizes


def _addresses(
    inputs: Sequence[mx.array], twins: Sequence[mx.array], addresses: Addresses
) -> tuple[list[int], list[int]]:
    """Where the inputs of two calls lie, of which some occur often.

    Asked at once, and for what is the same object in both calls twice: of what is not whole in memory an address is
    that of a copy made for the question, and only copies that live together are sure to lie apart.
    """
    once, other = ({id(array): array for array in arrays} for arrays in (inputs, twins))
    found = addresses([*once.values(), *other.values()])
    where, there = dict(zip(once, found, strict=False)), dict(zip(other, found[len(once) :], strict=True))
    return [where[id(array)] for array in inputs], [there[id(array)] for array in twins]


def _regions(
    noted: Sequence[Noted],
    before: Sequence[mx.array],
    after: Sequence[mx.array],
    given: Sequence[mx.array],
    addresses: Addresses,
) -> _Regions:
    regions, found = _Regions(), []
    for kind, arrays in (("before", before), ("given", given)):
        for index, (address, array) in enumerate(zip(addresses(arrays), arrays, strict=True)):
            regions.add(address, array.nbytes, Place(kind, index, 0))
            found += [(address, address + array.nbytes, f"{kind} {index}")] if array.size else []
    for (_, end, one), (start, _, other) in itertools.pairwise(sorted(found)):
        if start < end:
            raise NotRecordable(f"arrays {one} and {other} share memory, which at the next opening they may not")
    left: dict[int, int] = {}
    for index, (address, array) in enumerate(zip(addresses(after), after, strict=True)):
        if not array.size:
            continue
        if address in left:
            raise NotRecordable(f"carried arrays {left[address]} and {index} are one output")
        left[address] = index
    outputs = [array for launch in noted for array in launch.outputs if array.size]
    for address, array in zip(addresses(outputs), outputs, strict=True):
        index = left.pop(address, None)
        if index is not None and array.nbytes != after[index].nbytes:
            raise NotRecordable(f"carried array {index} is a part of a launch's output")
        regions.add(address, array.nbytes, None if index is None else Place("after", index, 0))
    if left:
        raise NotRecordable(
            f"carried array {min(left.values())} is not a launch's output: an operation of MLX's own made it, or it "
            "is left as it was"
        )
    return regions


def _is_number(launch: Launch, index: int) -> bool:
    return bool(launch.numbers) and launch.numbers[index] is not None
