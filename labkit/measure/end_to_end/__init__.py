"""Whole engines side by side on the same weights: prefill and decode from 256 to 128K tokens.

subject.py    one set of weights, in mlx-lm's module and in labkit's graph
plan.py       which points are measured, how often, and how long that may take
sides.py      the engines behind one face: labkit's graphs, mlx-lm's own generation loop
filled.py     caches as they are at a context, filled without reading a prompt
fair_line.py  mlx-lm's own DeltaNet text on devices where mlx-lm does not run it
torch_side.py transformers' torch model behind the same face
run.py        the points, by turns, within a time limit, each kept as soon as it is there
parts.py      one file a point: a run that was stopped goes on where it was
curves.py     does the cost grow as the model says?
table.py      the tables of a comparison
pictures.py   its plots
mechanisms.py what can be taken away, by which switch, and what that should cost
ablations.py  one mechanism off at a time, measured beside its prediction
commands.py   `labkit bench end-to-end | ablations`
"""

from labkit.measure.end_to_end.plan import LENGTHS, Plan, Point
from labkit.measure.end_to_end.run import measure
from labkit.measure.end_to_end.sides import LabkitSide, MlxLmSide, Side, sides_for

__all__ = ["LENGTHS", "LabkitSide", "MlxLmSide", "Plan", "Point", "Side", "measure", "sides_for"]
