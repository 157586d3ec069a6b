"""A slider over prepared pictures that needs no kernel, no library and no network.

Two forms. `plot` draws axes once and keeps, for each position of the slider, only the curves' coordinates: a dozen
positions cost a few kilobytes, and text and axes take the page's own colour, light or dark. `figures` keeps whole
matplotlib figures. Both give one piece of HTML with a plain `<input type="range">`: arrow keys move it, its value is
read aloud, and without scripts the first position stands there. It works in a static book, from a file, and in
JupyterLab.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from labkit.report.axes import Axis, Canvas
from labkit.report.style import COLOURS, svg

__all__ = ["Axis", "Frame", "figures", "figures_html", "plot", "plot_html"]

_STYLE = """
.labkit-frames{font-family:inherit;max-width:46rem;margin:.5rem 0;color:inherit}
.labkit-frames svg,.labkit-frames img{width:100%;height:auto;display:block}
.labkit-frames img[hidden]{display:none}
.labkit-frames svg text{fill:currentColor;font-size:12px}
.labkit-frames .control{display:flex;gap:.75rem;align-items:center;flex-wrap:wrap;margin:.25rem 0}
.labkit-frames input{flex:1 1 12rem;accent-color:#0072b2}
.labkit-frames output{font-variant-numeric:tabular-nums;min-width:7rem}
.labkit-frames p{margin:.25rem 0;font-variant-numeric:tabular-nums}
""".strip().replace("\n", "")

# The script finds its own block by id: a page may hold many, and JupyterLab runs it after the block was inserted.
_SCRIPT = """
(function(){var box=document.getElementById(ID);if(!box||box.dataset.ready)return;box.dataset.ready="1";
var data=JSON.parse(box.querySelector("script[type='application/json']").textContent);
var input=box.querySelector("input"),out=box.querySelector("output"),note=box.querySelector("p");
var paths=box.querySelectorAll("[data-mark]"),pictures=box.querySelectorAll("img");
function show(){var i=+input.value,f=data[i];out.textContent=f.label;input.setAttribute("aria-valuetext",f.label);
if(note)note.textContent=f.note||"";
paths.forEach(function(p,k){p.setAttribute("d",f.d[k])});
pictures.forEach(function(p,k){p.hidden=k!==i})}
input.addEventListener("input",show);show()})();
""".strip().replace("\n", "")


@dataclass(frozen=True)
class Frame:
    """One position of the slider.

    Attributes:
        label: what stands beside the slider: "context 4,096".
        marks: for each series name its points: x and y values of equal length. Bars are drawn from the axis to y.
        note: a sentence under the picture, such as the number to read off.
    """

    label: str
    marks: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    note: str = ""


def plot(
    frames: Sequence[Frame],
    *,
    title: str,
    slider: str,
    x: Axis,
    y: Axis,
    bars: bool = False,
    start: int = 0,
) -> None:
    """Show line data (or bars) under a slider.

    Args:
        frames: at least one, all with the same series in the same order.
        title: what the picture shows; also its description for readers who do not see it.
        slider: the name of what the slider changes: "batch size".
        x, y: the axes, fixed for all frames so that movement means change; they grow if points lie beyond them.
        bars: draw each series as bars instead of a line with dots.
        start: the position shown first.

    Raises:
        ValueError: no frames, frames whose series differ, or points of unequal length.
    """
    _display(plot_html(frames, title=title, slider=slider, x=x, y=y, bars=bars, start=start), title)


def plot_html(
    frames: Sequence[Frame], *, title: str, slider: str, x: Axis, y: Axis, bars: bool = False, start: int = 0
) -> str:
    """The HTML that `plot` shows."""
    names = _common_series(frames)
    # One pair of axes for all frames, long enough for each: a point drawn at the edge would tell a wrong value.
    points = [frame.marks[name] for frame in frames for name in names]
    x, y = x.holding(v for xs, _ in points for v in xs), y.holding(v for _, ys in points for v in ys)
    canvas = Canvas(x, y, names)
    draw = canvas.bars if bars else canvas.line
    drawn = [
        [draw(*frame.marks[name], slot=slot, slots=len(names)) for slot, name in enumerate(names)] for frame in frames
    ]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    marks = "".join(
        f'<path data-mark d="{path}" fill="{colour if bars else "none"}" stroke="{colour}" '
        f'stroke-width="{0 if bars else 2.2}" stroke-linecap="round" stroke-linejoin="round"/>'
        for path, colour in zip(drawn[start], colours, strict=True)
    )
    picture = canvas.document(title, marks, colours)
    data = [{"label": f.label, "note": f.note, "d": d} for f, d in zip(frames, drawn, strict=True)]
    return _block(picture, data, slider, start)


def figures(
    values: Iterable[Any],
    draw: Callable[[Any], Any],
    *,
    title: str,
    slider: str,
    label: Callable[[Any], str] = str,
    start: int = 0,
) -> None:
    """Show one matplotlib figure a value under a slider; each is kept whole (about 15 kB), so keep them few.

    Args:
        values: what the slider runs over.
        draw: gives the figure for a value.
        title: what the pictures show, also as their description.
        slider: the name of what the slider changes.
        label: how a value reads beside the slider.
        start: the position shown first.
    """
    _display(figures_html(values, draw, title=title, slider=slider, label=label, start=start), title)


def figures_html(
    values: Iterable[Any],
    draw: Callable[[Any], Any],
    *,
    title: str,
    slider: str,
    label: Callable[[Any], str] = str,
    start: int = 0,
) -> str:
    """The HTML that `figures` shows."""
    import matplotlib.pyplot as plt

    pictures, data = [], []
    for value in values:
        figure = draw(value)
        encoded = base64.b64encode(svg(figure).encode()).decode()
        plt.close(figure)
        hidden = "" if len(pictures) == start else " hidden"
        alt = escape(f"{title}: {label(value)}", quote=True)
        pictures.append(f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}"{hidden}>')
        data.append({"label": label(value), "d": []})
    if not data:
        raise ValueError("a slider needs at least one frame")
    return _block("".join(pictures), data, slider, start)


def _block(picture: str, data: list[dict], slider: str, start: int) -> str:
    content = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    # An id from the content: the same notebook gives the same bytes, two sliders on a page differ.
    name = "labkit-" + hashlib.sha256((picture + content + slider).encode()).hexdigest()[:12]
    first = data[start]
    note = f"<p aria-live='polite'>{escape(first['note'])}</p>" if any(frame.get("note") for frame in data) else ""
    return (
        f'<div class="labkit-frames" id="{name}"><style>{_STYLE}</style>{picture}'
        f'<div class="control"><label for="{name}-input">{escape(slider)}</label>'
        f'<input type="range" id="{name}-input" min="0" max="{len(data) - 1}" step="1" value="{start}" '
        f'aria-valuetext="{escape(first["label"], quote=True)}" autocomplete="off">'
        f'<output for="{name}-input">{escape(first["label"])}</output></div>{note}'
        f'<script type="application/json">{content}</script>'
        f"<script>{_SCRIPT.replace('ID', json.dumps(name), 1)}</script></div>"
    )


def _common_series(frames: Sequence[Frame]) -> list[str]:
    if not frames:
        raise ValueError("a slider needs at least one frame")
    names = list(frames[0].marks)
    for frame in frames:
        if list(frame.marks) != names:
            raise ValueError(f"frame {frame.label!r} has the series {list(frame.marks)}, the first one has {names}")
        for name, (xs, ys) in frame.marks.items():
            if len(xs) != len(ys):
                raise ValueError(f"frame {frame.label!r}, series {name!r}: {len(xs)} x values but {len(ys)} y values")
    return names


def _display(html: str, title: str) -> None:
    from IPython.display import display

    display({"text/html": html, "text/plain": f"[slider] {title}"}, raw=True)
