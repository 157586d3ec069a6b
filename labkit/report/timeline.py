"""An engine's log as a schedule: one line a request, one column a step; drawn, or as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.engine import StepRecord
from labkit.report import style

COLOURS = {"prefill": style.ORANGE, "decode": style.BLUE, "read": style.SKY}
LETTERS = {"prefill": "P", "decode": "d", "read": "r", "waits": ".", "away": " "}


@dataclass(frozen=True)
class Line:
    """One request in a log.

    Attributes:
        id: the request's.
        cells: record's place in the log -> "prefill", "decode", "read".
        first, last: places of its first and last step.
    """

    id: str
    cells: Mapping[int, str]
    first: int
    last: int


def lines(log: Sequence[StepRecord]) -> list[Line]:
    """Every request of a log, in order of its first step."""
    cells: dict[str, dict[int, str]] = {}
    for place, record in enumerate(log):
        for id in record.rows:
            cells.setdefault(id, {})[place] = record.kind
        for id in record.leaves:
            # A row whose last token is read takes no part in the forward of that step.
            cells.setdefault(id, {}).setdefault(place, "read")
    return [Line(id, at, min(at), max(at)) for id, at in cells.items()]


def text(log: Sequence[StepRecord], *, names: Mapping[str, str] | None = None, width: int = 120) -> str:
    """The schedule for a terminal: P a chunk of the prompt, d a decoded token, r a last token read, . waits.

    Args:
        log: the engine's, or a part of it.
        names: what stands before the line of a request, instead of its id.
        width: characters of a line; longer logs go on below.
    """
    found, named = lines(log), dict(names or {})
    label = max((len(named.get(line.id, line.id)) for line in found), default=0)
    room = max(width - label - 2, 10)
    parts = []
    for start in range(0, len(log), room):
        block = range(start, min(start + room, len(log)))
        parts.append(f"{'':{label}}  {_ruler(log, block)}")
        for line in found:
            if line.last < block.start or line.first >= block.stop:
                continue
            row = "".join(LETTERS[_state(line, place)] for place in block)
            parts.append(f"{named.get(line.id, line.id):{label}}  {row.rstrip()}")
        parts.append("")
    return "\n".join(parts[:-1])


def _state(line: Line, place: int) -> str:
    if place in line.cells:
        return line.cells[place]
    return "waits" if line.first < place < line.last else "away"


def _ruler(log: Sequence[StepRecord], block: range) -> str:
    """Every tenth step's number, as far as it fits."""
    ruler = [" "] * len(block)
    for place in block:
        number = str(log[place].index)
        at = place - block.start
        if log[place].index % 10 == 0 and at + len(number) <= len(block):
            ruler[at : at + len(number)] = number
    return "".join(ruler).rstrip()


def draw(
    log: Sequence[StepRecord],
    title: str,
    *,
    names: Mapping[str, str] | None = None,
    against: str = "steps",
    steps: int | None = None,
) -> Any:
    """The schedule as a picture: below the requests, the bytes of all caches.

    Args:
        log: the engine's, or a part of it.
        title: the picture's.
        names: what stands before the line of a request, instead of its id.
        against: "steps" (the same picture on every machine) or "seconds".
        steps: columns of the picture, for several pictures of one size.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    found, named = lines(log), dict(names or {})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7.2, 2.1 + 0.26 * max(len(found), 2)), sharex=True, height_ratios=[max(len(found), 2), 2.2]
    )
    starts = [r.started for r in log] if against == "seconds" else list(range(len(log)))
    widths = [r.seconds for r in log] if against == "seconds" else [1.0] * len(log)
    for row, line in enumerate(found):
        above.plot(
            [starts[line.first], starts[line.last] + widths[line.last]],
            [row, row],
            color=style.GREY,
            linewidth=0.8,
            zorder=1,
        )
        for place, kind in line.cells.items():
            above.barh(
                row, widths[place] * 0.92, left=starts[place], height=0.72, color=COLOURS[kind], linewidth=0, zorder=2
            )
    above.set_yticks(range(len(found)), [named.get(line.id, line.id) for line in found])
    above.invert_yaxis()
    above.grid(axis="y", visible=False)
    above.set_title(title)
    handles = [Patch(color=colour, label=_WORDS[kind]) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=3, fontsize=8, loc="outside lower center")
    below.fill_between(starts, [r.cache_bytes / 1e6 for r in log], step="post", color=style.GREEN, alpha=0.5)
    below.set_ylabel("caches\n(MB)")
    below.set_xlabel("seconds" if against == "seconds" else "step of the engine")
    if steps is not None:
        below.set_xlim(0, steps)
    return figure


_WORDS = {"prefill": "chunk of a prompt", "decode": "decodes a token", "read": "last token is read"}


def facts(log: Sequence[StepRecord]) -> dict[str, Any]:
    """What a schedule comes to, JSON data: steps by kind, rows together, the longest wait of a running row."""
    decodes = [record for record in log if record.kind == "decode"]
    longest = 0
    for line in lines(log):
        tokens = [place for place, kind in sorted(line.cells.items()) if kind == "decode"]
        for a, b in pairwise(tokens):
            chunks = [record for record in log[a + 1 : b] if record.kind == "prefill"]
            longest = max(longest, len(chunks))
    return {
        "steps": len(log),
        "chunks": sum(record.kind == "prefill" for record in log),
        "decode_steps": len(decodes),
        "tokens_decoded": sum(len(record.rows) for record in decodes),
        "most_rows": max((len(record.rows) for record in decodes), default=0),
        "mean_rows": sum(len(record.rows) for record in decodes) / len(decodes) if decodes else 0.0,
        "chunks_between_two_tokens_of_a_row": longest,
        "peak_cache_bytes": max((record.cache_bytes for record in log), default=0),
    }
