"""Layers of a prompt, given to a GPU one by one while the host builds the next ones, and never more than a few ahead.

The host takes about 20 ms to build a chunk of 40 layers; evaluated only then, a prompt of 32K tokens left an H200
waiting for 16 % of its time. But what was given to a GPU keeps its memory until the GPU has done it: every array of
every layer that is ahead, 0.4 GB a layer at 2,048 tokens of the 35B-A3B shape, of which all 40 layers have been seen
alive at once. So the host waits before it runs too far ahead.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

IN_FLIGHT = 2
"""Layers that a GPU has been given and has not finished, at most. One is computed (1.5 ms at 2,048 tokens on an H200)
and one waits behind it, while the host builds the next (0.5 ms): the GPU does not wait."""


class Sending:
    """The layers of one forward on their way to a GPU."""

    def __init__(self) -> None:
        self._unfinished: deque[mx.array] = deque()

    def send(self, stream: mx.array, update: mx.array) -> None:
        """Begin to compute a layer's results, once fewer than `IN_FLIGHT` layers are unfinished. Nothing happens while
        a function is being transformed (compiled, or recorded by `labkit trace`)."""
        if len(self._unfinished) == IN_FLIGHT:
            mx.eval(self._unfinished.popleft())
        try:
            mx.async_eval(stream, update)
        except ValueError:
            return
        self._unfinished.append(update)
