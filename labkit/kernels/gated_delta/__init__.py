"""Gated DeltaNet: linear attention whose state forgets by a gate and learns by the delta rule.

A mixer is `scan_inputs`, then `gated_delta_update` (which is `scan` or `chunked`), then `gated_norm`; `decode_step` is
all three for one to eight tokens. `scan_blocked` is the baseline.
"""

from labkit.kernels.gated_delta.chunks import Tensor, chunked
from labkit.kernels.gated_delta.conv import ScanInputs, scan_inputs, tail_after
from labkit.kernels.gated_delta.norm import gated_norm
from labkit.kernels.gated_delta.recurrence import PACKED, PLAIN, Layout, scan, scan_blocked
from labkit.kernels.gated_delta.spans import full_spans, row_spans
from labkit.kernels.gated_delta.step import decode_step
from labkit.kernels.gated_delta.update import gated_delta_update

__all__ = [
    "PACKED",
    "PLAIN",
    "Layout",
    "ScanInputs",
    "Tensor",
    "chunked",
    "decode_step",
    "full_spans",
    "gated_delta_update",
    "gated_norm",
    "row_spans",
    "scan",
    "scan_blocked",
    "scan_inputs",
    "tail_after",
]
