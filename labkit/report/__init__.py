"""Reports: notebooks executed and tested, their results as data, one look for plots, and the book made of them.

commands.py    `labkit report`, `notebooks`, `book` (`schedule` in schedule_command.py)
style.py       one matplotlib look; SVG whose bytes repeat
frames.py      a slider over prepared pictures that works in a static page, without a library or a network
axes.py        axes and marks of a small SVG plot: the part of a picture that a slider keeps still
diagram.py     a model and ways through a machine, drawn
tables.py      plain tables inside a notebook, as Markdown
ablation.py    one table for mechanisms taken away
checks.py      a check shown to fail where it must
kernel_pictures.py  lanes on memory lines, counted traffic, columns cut into parts
paged_pictures.py  a pool as a field of blocks, tables, waste over time
pressure_pictures.py  who was where under memory pressure, and the bytes below the ceiling
prefix_pictures.py  prompts as chains of blocks, boundaries that keep a state
rectangle_pictures.py  rows of several lengths in one rectangle, masks
timeline.py    an engine's log as a schedule, drawn or as text
watch.py       an engine with buttons, and its schedule
widgets.py     the same as a live widget where a kernel listens
records.py     results as data inside a notebook's outputs
parameters.py  a notebook's own parameters, and the check of what is given
runner.py      notebooks through papermill, one process each (worker.py is that process)
outcomes.py    what a run tells: its steps, how each notebook ended, and why it failed
kernel_client.py  the client between a worker and its kernel, whose waits all end
ahead.py       the native graph compiled beside the notebooks that load no model
executed.py    what is done to a notebook after its execution
provenance.py  commit, versions, device; removal of machine paths
summary.py     all records in one table
normalise.py   how notebooks are committed with their outputs
guards.py      the rules that every committed notebook keeps
contents.py    the book's parts, its list of notebooks, the page of their parameters
book.py        the Jupyter Book of executed notebooks, without any external request
"""

from __future__ import annotations

from labkit.report import diagram, frames, provenance, style, tables
from labkit.report.checks import turns_red
from labkit.report.records import Record, record
from labkit.report.runner import run
from labkit.report.widgets import live

__all__ = ["Record", "diagram", "frames", "live", "provenance", "record", "run", "style", "tables", "turns_red"]
