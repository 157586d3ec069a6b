"""Mechanisms on the device: kernels as plain Metal text, and the public operations over them.

One folder a mechanism, each with `reference.py` (the oracle), `*.metal` (the text) and the public operations in
`__init__.py`. README.md beside this says how to add one, and what a kernel must pass.
"""

from labkit.kernels.header import Header
from labkit.kernels.launch import CudaOverride, Kernel
from labkit.kernels.signature import Launch
from labkit.kernels.targets import TARGETS, default_target, targets_for, use_target

__all__ = ["TARGETS", "CudaOverride", "Header", "Kernel", "Launch", "default_target", "targets_for", "use_target"]
