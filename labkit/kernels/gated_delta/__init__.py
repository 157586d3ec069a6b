"""Gated DeltaNet: linear attention whose state forgets by a gate and learns by the delta rule.

A mixer is `scan_inputs`, then `scan` (or `chunked`), then `gated_norm`; `decode_step` is all three for one to eight tokens.
"""

from labkit.kernels.gated_delta.conv import ScanInputs, scan_inputs, tail_after
from labkit.kernels.gated_delta.norm import gated_norm
from labkit.kernels.gated_delta.scan import PACKED, PLAIN, Layout, scan
from labkit.kernels.gated_delta.spans import full_spans, mask_spans, row_spans
from labkit.kernels.gated_delta.step import decode_step

__all__ = [
    "PACKED",
    "PLAIN",
    "Layout",
    "ScanInputs",
    "decode_step",
    "full_spans",
    "gated_norm",
    "mask_spans",
    "row_spans",
    "scan",
    "scan_inputs",
    "tail_after",
]
