"""Throughput, latency and memory against the number of rows that decode together, beside mlx-lm's batch generator.

workload.py  how many rows, from which contexts
sides.py     labkit's engine and mlx-lm's `BatchGenerator` behind one face
sweep.py     both sides by turns, point by point, with the floor beside them
host.py      what a step costs the host when the model costs nothing
table.py     what was measured, as curves, rows of a table and a picture
memory.py    bytes that rows keep alive, in a rectangle or in pages
"""

from labkit.measure.batching.host import host_cost
from labkit.measure.batching.memory import live_bytes
from labkit.measure.batching.sides import BatchGeneratorSide, EngineSide, Run
from labkit.measure.batching.sweep import Point, sweep_point
from labkit.measure.batching.workload import Workload

__all__ = ["BatchGeneratorSide", "EngineSide", "Point", "Run", "Workload", "host_cost", "live_bytes", "sweep_point"]
