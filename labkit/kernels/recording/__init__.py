"""A function made of labkit's launches, recorded once and replayed without MLX: one CUDA graph for a whole step.

MLX's part in a launch (to build, to evaluate, to track) takes the host longer than a fast GPU takes to compute it. What
decoding does token after token is always the same launches at the same addresses, but for what the device itself
counts on. So they are noted while the function runs once, and replayed from two graphs by turns: what one leaves, the
other reads, in the same memory where the launches allow it.
"""

from labkit.kernels.recording.counting import COUNT_ON, count_on
from labkit.kernels.recording.machine import Machine, machine_here
from labkit.kernels.recording.program import NotRecordable, Program
from labkit.kernels.recording.recording import Moved, NoRoom, Recording, record

__all__ = [
    "COUNT_ON",
    "Machine",
    "Moved",
    "NoRoom",
    "NotRecordable",
    "Program",
    "Recording",
    "count_on",
    "machine_here",
    "record",
]
