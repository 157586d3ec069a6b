"""Protocol replay: mlx-lm runs an engine's log again, with its own model and its own caches.

The oracle never sees what the engine computed: only the log, which says what was merged, extended, filtered and fed. So
equal logits and equal cache states, bit for bit at every step, say that continuous batching here is what mlx-lm would
compute for the same batches. Comparing a batch with a row's own solo run says less and asks too much: kernels round
differently for other shapes, and a correct engine then differs from itself.

`UNDEFINED` lists what mlx-lm leaves undefined, with what labkit does instead; such cells are not compared.
"""

from labkit.parity.replay.compare import Difference, differences
from labkit.parity.replay.oracle import UNDEFINED, Oracle
from labkit.parity.replay.recorder import Recorder, Recording
from labkit.parity.replay.replay import Verdict, replay, tolerant_replay
from labkit.parity.replay.schedules import Arrival, Schedule, random_schedule, run

__all__ = [
    "UNDEFINED",
    "Arrival",
    "Difference",
    "Oracle",
    "Recorder",
    "Recording",
    "Schedule",
    "Verdict",
    "differences",
    "random_schedule",
    "replay",
    "run",
    "tolerant_replay",
]
