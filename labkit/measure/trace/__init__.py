"""One decode step taken apart: its launches, the stages in which they depend on each other, the bytes they move.

capture.py   the step's operations, from MLX's own record of the graph, on any machine
step.py      launches, stages, bytes and the longest chain of a captured step
walk.py      a layer's launches in words
memory.py    what is alive at once while it runs
waterfall.py from the floor to the measured step
cuda_graph.py  the same counts of graphs that MLX's CUDA back end recorded
pictures.py  the graph drawn stage by stage
commands.py  `labkit trace decode | cuda-graph`
"""

from labkit.measure.trace.capture import capture
from labkit.measure.trace.memory import temporary_bytes
from labkit.measure.trace.step import Launch, StepTrace
from labkit.measure.trace.walk import walk
from labkit.measure.trace.waterfall import waterfall

__all__ = ["Launch", "StepTrace", "capture", "temporary_bytes", "walk", "waterfall"]
