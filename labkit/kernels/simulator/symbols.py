"""From an instruction of a built kernel to the line of Metal text it comes from."""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path


class SymbolTable:
    """The debug information of one library, read when first asked.

    An access inside a vocabulary function (bfloat's conversion, a vector's copy) belongs to the line that called it.
    """

    def __init__(self, library: Path):
        self.library = library

    def lines(self, offsets: Iterable[int]) -> dict[int, int]:
        """{offset in the library: line of the Metal text, 0 if unknown}; offsets are return addresses."""
        offsets = set(offsets)
        if sys.platform == "darwin":
            return {offset: self._atos(offset) for offset in offsets}
        return {offset: self._line(offset - 1) for offset in offsets}

    def _line(self, offset: int) -> int:
        # Innermost first: the line table's own row, then where each enclosing inlined function was called.
        row = self._row(offset)
        if row and _is_metal(row[0]):
            return row[1]
        for _, _, file, line in sorted(
            (span for span in self._inlined if span[0] <= offset < span[1]), key=lambda span: span[1] - span[0]
        ):
            if _is_metal(file):
                return line
        return 0

    def _row(self, offset: int) -> tuple[str, int] | None:
        index = bisect_right(self._addresses, offset) - 1
        return self._rows[index][1:] if index >= 0 else None

    @cached_property
    def _addresses(self) -> list[int]:
        return [row[0] for row in self._rows]

    @cached_property
    def _rows(self) -> list[tuple[int, str, int]]:
        return self._debug_information[0]

    @cached_property
    def _inlined(self) -> list[tuple[int, int, str, int]]:
        return self._debug_information[1]

    @cached_property
    def _debug_information(self) -> tuple[list[tuple[int, str, int]], list[tuple[int, int, str, int]]]:
        from elftools.elf.elffile import ELFFile

        rows: list[tuple[int, str, int]] = []
        inlined: list[tuple[int, int, str, int]] = []
        with self.library.open("rb") as file:
            elf = ELFFile(file)
            if not elf.has_dwarf_info():
                return [], []
            dwarf = elf.get_dwarf_info()
            for unit in dwarf.iter_CUs():
                program = dwarf.line_program_for_CU(unit)
                if program is None:
                    continue
                names = _file_names(program)
                for entry in program.get_entries():
                    state = entry.state
                    if state is not None and not state.end_sequence:
                        rows.append((state.address, names.get(state.file, ""), state.line))
                inlined += _inlined_calls(dwarf, unit, names)
        rows.sort(key=lambda row: row[0])  # of several rows at one address the last counts
        return rows, inlined

    def _atos(self, offset: int) -> int:
        command = ["atos", "-i", "-o", str(self.library), "-offset", hex(offset - 1)]
        done = subprocess.run(command, capture_output=True, text=True)
        for frame in done.stdout.splitlines():
            if ".metal:" in frame:
                return int(frame.rsplit(".metal:", 1)[1].rstrip(")"))
        return 0


def _is_metal(file: str) -> bool:
    return file.endswith(".metal")


def _file_names(program) -> dict[int, str]:
    first = 0 if program["version"] >= 5 else 1
    return {i: entry.name.decode() for i, entry in enumerate(program["file_entry"], first)}


def _inlined_calls(dwarf, unit, names: dict[int, str]) -> list[tuple[int, int, str, int]]:
    """(begin, end, calling file, calling line) of each inlined function."""
    found = []
    ranges = dwarf.range_lists()
    base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
    base = base.value if base else 0
    for die in unit.iter_DIEs():
        if die.tag != "DW_TAG_inlined_subroutine" or "DW_AT_call_line" not in die.attributes:
            continue
        file = names.get(die.attributes["DW_AT_call_file"].value, "")
        line = die.attributes["DW_AT_call_line"].value
        found += [(begin, end, file, line) for begin, end in _spans(die, ranges, unit, base)]
    return found


def _spans(die, ranges, unit, base: int) -> list[tuple[int, int]]:
    low, high = die.attributes.get("DW_AT_low_pc"), die.attributes.get("DW_AT_high_pc")
    if low and high:
        end = high.value if high.form == "DW_FORM_addr" else low.value + high.value
        return [(low.value, end)]
    listed = die.attributes.get("DW_AT_ranges")
    if not listed or ranges is None:
        return []
    spans = []
    for entry in ranges.get_range_list_at_offset(listed.value, unit):
        if hasattr(entry, "base_address"):
            base = entry.base_address
        elif getattr(entry, "is_absolute", False):
            spans.append((entry.begin_offset, entry.end_offset))
        else:
            spans.append((base + entry.begin_offset, base + entry.end_offset))
    return spans
