"""Small functions of single values and rows, which other loops take in: exponentials that become vectors, norms."""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import exact, inner
from labkit.kernels.vectors import float_of_bits

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@exact
def exp(x):
    """e^x in float32, within 2 units in the last place; e^-87 and e^88 beyond these.

    Source: the polynomial of Cephes' expf. Unlike the C library's it has no branches, so that loops over it become
    vectors.
    """
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * LOG2E + np.float32(0.5))
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return (p * r * r + r + np.float32(1)) * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@inner
def fill(x, value):
    """x[i] = value."""
    for i in range(x.size):
        x[i] = value


@inner
def copy(x, out):
    """out[i] = x[i]. (numba's own assignment of one array to another compiles the text of its error, for seconds.)"""
    for i in range(x.size):
        out[i] = x[i]


@inner
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return np.float32(1) / (np.float32(1) + exp(-x))


@inner
def swiglu(gate, up):
    """gate[i] = silu(gate[i]) up[i], in place."""
    for i in range(gate.size):
        gate[i] = gate[i] * sigmoid(gate[i]) * up[i]


@inner
def gated(x, gate, out):
    """out[i] = x[i] sigmoid(gate[i])."""
    for i in range(x.size):
        out[i] = x[i] * sigmoid(gate[i])


@inner
def rms_norm(x, weight, eps, out):
    """out[i] = x[i] weight[i] / sqrt(mean(x^2) + eps)."""
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        out[i] = x[i] * factor * weight[i]


@inner
def scale_to(x, length):
    """x scaled to this length in place, with the 1e-6 of Gated DeltaNet's normalisation under the root."""
    total = np.float32(1e-6)
    for i in range(x.size):
        total += x[i] * x[i]
    factor = length / np.sqrt(total)
    for i in range(x.size):
        x[i] *= factor
