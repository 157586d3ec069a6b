"""What a kernel moved, counted by the simulator: as data, as a table, as a picture. Counts, never times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.kernels.signature import MetalText, Parameter
from labkit.kernels.simulator.library import Library, ResultRecord, SiteRecord
from labkit.kernels.simulator.symbols import SymbolTable
from labkit.kernels.simulator.translation import HEADER_LINES_FROM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE_BYTES, SECTOR_BYTES = 128, 32


@dataclass(frozen=True)
class Flow:
    """Reads or writes of one buffer, or of one line of text.

    Attributes:
        memory: the buffer's name. direction: "read" or "write".
        line: the line of Metal text (None: of the whole kernel). in_header: whether it counts in the header.
        bytes: that threads asked for.
        requests: memory instructions of a simdgroup.
        lines, sectors: 128-byte lines and 32-byte sectors that the requests touched, each request by itself.
        footprint: bytes of the distinct lines touched in all; 0 for a single line of text.
    """

    memory: str
    direction: str
    bytes: int
    requests: int
    lines: int
    sectors: int
    footprint: int = 0
    line: int | None = None
    in_header: bool = False
    text: str = ""

    @property
    def lines_per_request(self) -> float:
        """1 for 32 neighbouring 4-byte elements, 32 for a stride of a line or more."""
        return self.lines / self.requests if self.requests else 0.0

    @property
    def sector_use(self) -> float:
        """The share of the sectors' bytes that was asked for; above 1 where lanes share bytes."""
        return self.bytes / (self.sectors * SECTOR_BYTES) if self.sectors else 0.0

    @property
    def repeats(self) -> float:
        """How often each byte of the footprint was asked for."""
        return self.bytes / self.footprint if self.footprint else 0.0


@dataclass(frozen=True)
class Traffic:
    """All that one launch moved and waited for."""

    kernel: str
    buffers: tuple[Flow, ...]
    threadgroups: int
    threads: int
    barriers: int
    simd_barriers: int
    simd_operations: int
    atomics: int
    threadgroup_bytes: int
    threadgroup_read: int
    threadgroup_written: int
    _count_by_line: Callable[[], tuple[Flow, ...]] = field(repr=False, compare=False)

    @cached_property
    def by_line(self) -> tuple[Flow, ...]:
        """The same by line of the Metal text: read from the build's debug information when first asked for."""
        return self._count_by_line()

    @property
    def device_bytes(self) -> int:
        """Bytes that threads asked of device memory, repeats included."""
        return sum(flow.bytes for flow in self.buffers)

    @property
    def footprint(self) -> int:
        """Bytes of the distinct lines touched: what must move at least once."""
        return sum(flow.footprint for flow in self.buffers)

    @property
    def lines(self) -> int:
        """128-byte lines over all requests."""
        return sum(flow.lines for flow in self.buffers)

    def summary(self) -> dict[str, int]:
        """The counts that a stored budget bounds."""
        names = ["device_bytes", "footprint", "lines", "barriers", "simd_operations", "atomics", "threadgroup_bytes"]
        return {name: int(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        rows = [_HEADINGS, *(_cells(flow, flow.memory) for flow in self.buffers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        return "\n".join([*lines, self._synchronisation()])

    def _synchronisation(self) -> str:
        return (
            f"{self.threadgroups:,} threadgroups, {self.threads:,} threads, {self.barriers:,} barriers, "
            f"{self.simd_operations:,} simdgroup operations, {self.atomics:,} atomics; threadgroup memory "
            f"{self.threadgroup_bytes:,} B, {self.threadgroup_read:,} B read, {self.threadgroup_written:,} B written"
        )

    def _repr_html_(self) -> str:
        def row(cells: list[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

        rows = "".join(row(_cells(flow, flow.memory), "td") for flow in self.buffers)
        return f"<table>{row(_HEADINGS, 'th')}{rows}</table><p>{self._synchronisation()}</p>"

    def picture(self) -> Figure:
        """Per buffer the bytes asked for beside the footprint, and the lines that each request costs."""
        from matplotlib.figure import Figure

        flows = list(self.buffers)
        names = [f"{flow.memory} {flow.direction}" for flow in flows]
        places = range(len(flows))
        figure = Figure(figsize=(8, 0.6 + 0.45 * max(len(flows), 2)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.barh([p - 0.2 for p in places], [flow.bytes for flow in flows], 0.38, label="asked for by threads")
        left.barh([p + 0.2 for p in places], [flow.footprint for flow in flows], 0.38, label="distinct lines")
        left.set(yticks=list(places), yticklabels=names, xscale="log", xlabel="bytes")
        left.invert_yaxis()
        left.legend(fontsize="small")
        bars = right.barh(list(places), [flow.lines_per_request for flow in flows], 0.6, color="tab:red")
        right.bar_label(bars, [f"{flow.lines_per_request:.1f}" for flow in flows], padding=2)
        right.axvline(1, color="0.6", linewidth=0.8)
        right.set(xlabel=f"{LINE_BYTES}-byte lines per simdgroup request", xlim=(0, 36))
        figure.suptitle(f"{self.kernel}: counted traffic")
        return figure

    def source_picture(self, top: int = 12) -> Figure:
        """The lines of Metal text that move the most, by 128-byte lines touched."""
        from matplotlib.figure import Figure

        flows = sorted(self.by_line, key=lambda flow: -flow.lines)[:top]
        figure = Figure(figsize=(9, 0.6 + 0.35 * max(len(flows), 2)), layout="constrained")
        axes = figure.subplots()
        labels = [f"{flow.line}: {flow.text.strip()[:60]}  [{flow.memory} {flow.direction}]" for flow in flows]
        axes.barh(range(len(flows)), [flow.lines for flow in flows], color="tab:red")
        axes.set_yticks(range(len(flows)), labels, family="monospace", fontsize="small")
        axes.invert_yaxis()
        axes.set(
            xlabel=f"{LINE_BYTES}-byte lines over all requests", title=f"{self.kernel}: where the traffic comes from"
        )
        return figure


_HEADINGS = ["buffer", "", "bytes", "requests", "lines/req", "sectors used", "footprint", "repeats"]


def _cells(flow: Flow, name: str) -> list[str]:
    return [
        name,
        flow.direction,
        f"{flow.bytes:,}",
        f"{flow.requests:,}",
        f"{flow.lines_per_request:.2f}",
        f"{flow.sector_use:.0%}",
        f"{flow.footprint:,}",
        f"{flow.repeats:.1f}",
    ]


def count_traffic(
    text: MetalText,
    found: list[Parameter],
    library: Library,
    result: ResultRecord,
    sites: list[SiteRecord],
    symbols: SymbolTable,
) -> Traffic:
    """The runtime's counts by buffer and by line of text."""
    buffers = []
    for index, parameter in enumerate(found):
        b = result.buffers[index]
        for way, direction in enumerate(("read", "write")):
            if b.requests[way]:
                counts = (
                    b.bytes[way],
                    b.requests[way],
                    b.lines[way],
                    b.sectors[way],
                    b.footprint_lines[way] * LINE_BYTES,
                )
                buffers.append(Flow(parameter.name, direction, *counts))
    c = result.counters
    return Traffic(
        text.name,
        tuple(buffers),
        *(getattr(c, name) for name in _COUNTERS),
        _count_by_line=lambda: tuple(_by_line(text, found, library, sites, symbols)),
    )


_COUNTERS = (
    *("threadgroups", "threads", "barriers", "simd_barriers", "simd_operations", "atomics"),
    *("threadgroup_bytes", "threadgroup_read", "threadgroup_written"),
)


def _by_line(
    text: MetalText, found: list[Parameter], library: Library, sites: list[SiteRecord], symbols: SymbolTable
) -> list[Flow]:
    sites = [site for site in sites if site.buffer >= 0]
    lines = symbols.lines(site.pc - library.image for site in sites)
    sums: dict[tuple[int, int, int], list[int]] = {}
    for site in sites:
        key = (lines[site.pc - library.image], site.buffer, site.write)
        total = sums.setdefault(key, [0, 0, 0, 0])
        for i, value in enumerate((site.bytes, site.requests, site.lines, site.sectors)):
            total[i] += value
    flows = []
    for (line, buffer, write), counts in sorted(sums.items()):
        in_header = line > HEADER_LINES_FROM
        number = line - HEADER_LINES_FROM if in_header else line
        rows = (text.header if in_header else text.source).splitlines()
        code = rows[number - 1] if 0 < number <= len(rows) else ""
        direction = "write" if write else "read"
        flows.append(Flow(found[buffer].name, direction, *counts, line=number, in_header=in_header, text=code))
    return flows
