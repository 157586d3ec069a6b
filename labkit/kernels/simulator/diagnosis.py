"""From the runtime's fault records to `Fault`: names, lines and elements instead of numbers."""

from __future__ import annotations

import signal

from labkit.kernels.signature import Launch, MetalText, Parameter
from labkit.kernels.simulator import faults as kinds
from labkit.kernels.simulator.faults import Fault
from labkit.kernels.simulator.library import FaultRecord, Library, ResultRecord
from labkit.kernels.simulator.symbols import SymbolTable
from labkit.kernels.simulator.translation import HEADER_LINES_FROM

_RACES = {kinds.RACE_IN_SIMDGROUP, kinds.RACE_BETWEEN_SIMDGROUPS, kinds.RACE_BETWEEN_THREADGROUPS}
_WHOLE_LAUNCH = {kinds.DEADLOCK, kinds.STOPPED}
_UNKNOWN = (1 << 64) - 1


def diagnose(
    text: MetalText,
    launch: Launch,
    found: list[Parameter],
    library: Library,
    result: ResultRecord,
    symbols: SymbolTable,
) -> list[Fault]:
    """Every fault of a launch, in the order in which they were met; unwritten outputs last."""
    records = [result.faults[i] for i in range(result.fault_count)]
    offsets = {pc - library.image for record in records for pc in (record.pc, record.other_pc) if pc}
    lines = symbols.lines(offsets)

    def line_of(pc: int) -> int:
        return lines.get(pc - library.image, 0) if pc else 0

    faults = [_fault(text, found, library, record, line_of) for record in records]
    for index, parameter in enumerate(found):
        unwritten = result.buffers[index].unwritten_bytes
        if parameter.kind == "output" and unwritten:
            size = launch.output_dtypes[parameter.array].size
            first = result.buffers[index].first_unwritten // size
            message = (
                f"{-(-unwritten // size)} elements of output {parameter.name} were never written, first element {first}"
            )
            faults.append(Fault(kinds.UNWRITTEN_OUTPUT, text.name, message, memory=parameter.name, element=first))
    return faults


def _fault(text: MetalText, found: list[Parameter], library: Library, record: FaultRecord, line_of) -> Fault:
    kind = kinds.RUNTIME_KINDS[record.kind]
    in_header, number = _in_text(record.line or line_of(record.pc))
    other_in_header, other_number = _in_text(record.other_line or line_of(record.other_pc))
    other = f"{'header ' if other_in_header else ''}line {other_number}" if other_number else ""
    memory, element = _place(found, library, record)
    shown = text.header if in_header else text.source
    rows = shown.splitlines()
    has_thread = kind not in (kinds.STOPPED, kinds.CRASH) or record.thread or record.threadgroup
    return Fault(
        kind,
        text.name,
        _message(kind, record, memory, element, other),
        line=number,
        in_header=in_header,
        text=rows[number - 1] if 0 < number <= len(rows) else "",
        thread=record.thread if has_thread else None,
        threadgroup=record.threadgroup if has_thread else None,
        memory=memory,
        element=element,
        other_thread=record.other_thread if kind in _RACES or kind == kinds.DIVERGENT_BARRIER else None,
        other_line=other_number or None,
        other_in_header=other_in_header,
        count=record.count,
    )


def _in_text(line: int) -> tuple[bool, int]:
    """Whether a line that the compiler names is one of the header, and its number there."""
    in_header = line > HEADER_LINES_FROM
    return in_header, line - HEADER_LINES_FROM if in_header else line


def _place(found: list[Parameter], library: Library, record: FaultRecord) -> tuple[str, int | None]:
    if record.storage >= 0:
        return library.storage[record.storage].name, record.byte
    if record.buffer >= 0:
        return found[record.buffer].name, record.byte // _item_size(found[record.buffer])
    return "", None


def _item_size(parameter: Parameter) -> int:
    metal_type = parameter.metal_type.removeprefix("atomic<").removesuffix(">")
    sizes = {"float": 4, "half": 2, "bfloat16_t": 2, "int": 4, "bool": 1}
    return sizes.get(metal_type) or int("".join(c for c in metal_type if c.isdigit())) // 8


def _message(kind: str, r: FaultRecord, memory: str, element: int | None, other_place: str) -> str:
    who = f"thread {r.thread} of threadgroup {r.threadgroup}"
    unit = "byte" if r.storage >= 0 else "element"
    place = f"{memory} {unit} {element}" if memory else f"address {r.address:#x}"
    behind = f" at {other_place}" if other_place else ""
    if kind in _RACES:
        other = f"thread {r.other_thread}"
        if kind == kinds.RACE_BETWEEN_THREADGROUPS:
            other += f" of threadgroup {r.other_threadgroup}"
        return f"{who} and {other}{behind} touch {place} and nothing orders them"
    if kind in (kinds.OUT_OF_BOUNDS_READ, kinds.OUT_OF_BOUNDS_WRITE):
        verb = "reads" if kind == kinds.OUT_OF_BOUNDS_READ else "writes"
        return (
            f"{who} {verb} {r.size} bytes at {place}, outside of it"
            if memory
            else f"{who} {verb} {r.size} bytes at {place}, which belongs to no buffer"
        )
    if kind == kinds.UNINITIALISED_READ:
        return f"{who} reads {place}, which nobody has written"
    if kind == kinds.WRITE_TO_INPUT:
        return f"{who} writes {place}, an input"
    if kind == kinds.DIVERGENT_BARRIER:
        return f"{who} waits here while thread {r.other_thread} waits at the barrier of {other_place}"
    if kind == kinds.BARRIER_AFTER_EXIT:
        return f"{who} waits at a barrier that thread {r.other_thread} never reaches"
    if kind == kinds.DIVERGENT_SIMD:
        lanes = f"{r.mask:#010x} of the {r.address:#010x}"
        return f"only lanes {lanes} in this simdgroup reach this simdgroup operation ({who} among them)"
    if kind == kinds.INACTIVE_LANE:
        return f"{who} takes the value of lane {r.other_thread}, which takes no part: it is undefined"
    if kind == kinds.MISALIGNED:
        return f"{who} moves {r.size} bytes at an address that is not a multiple of {r.size}"
    if kind == kinds.DEADLOCK:
        return (
            f"{who} and others poll an atomic that nobody changes any more; a grid-wide barrier needs all threadgroups "
            "alive at once: resident=True"
        )
    if kind == kinds.STOPPED:
        return "stopped before it ended: time limit, or interrupted"
    name = signal.Signals(r.signal).name if r.signal else "no memory for its threads"
    if r.signal == signal.SIGFPE:
        return f"{who} divides an integer by zero ({name})"
    return f"{who} crashed at {place} ({name}); check mode says more"
