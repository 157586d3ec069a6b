"""One decode step taken apart: its launches, the stages in which they depend on each other, the bytes they move.

capture.py   the step's operations, from MLX's own record of the graph, on any machine
step.py      launches, stages, bytes and the longest chain of a captured step
cuda_graph.py  the same of a graph that MLX's CUDA back end has written
pictures.py  the graph drawn stage by stage
"""

from labkit.measure.trace.capture import capture
from labkit.measure.trace.step import Launch, StepTrace

__all__ = ["Launch", "StepTrace", "capture"]
