"""Weights as a CPU reads them: panels of sixteen outputs, k by k, each group's scales and biases in front of it.

The codes stay packed: a panel of 4-bit weights is 8 bytes a k (output j in the low half of byte j, output j + 8 in the
high half), and scales and biases stay in bfloat16 where that holds them exactly. So the layout takes the checkpoint's
own bytes, and a product reads one stream from front to back.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from labkit.kernels.quantized_matmul.packed import Packed

WIDTH = 16
"""Outputs of a panel."""


@dataclass(frozen=True)
class Form:
    """How weights of one kind lie in a panel.

    Attributes:
        bits: of a weight: 4 or 8 (integers with scale and bias), 16 (bfloat16), 32 (float32).
        factor: bytes of a scale or a bias; 0 without.
    """

    bits: int
    factor: int

    @property
    def name(self) -> str:
        """Short."""
        return f"{self.bits}_{self.factor}"

    @property
    def header(self) -> int:
        """Bytes of scales and biases in front of a group."""
        return 2 * WIDTH * self.factor

    @property
    def row(self) -> int:
        """Bytes of one k."""
        return WIDTH * self.bits // 8


FORMS = (Form(4, 2), Form(4, 4), Form(8, 2), Form(8, 4), Form(16, 0), Form(32, 0))

FIELDS = 8
START, FORM, ROWS, OUTPUTS, INPUTS, GROUP, PANEL, MATRIX = range(FIELDS)
"""Columns of a matrix's description: its first byte, form, outputs, these padded to whole panels, inputs, weights of a
group, bytes of a panel, bytes of a matrix (there is one for each expert)."""


@dataclass(frozen=True)
class Panels:
    """A matrix [N, K], or one for each of E experts, in panels.

    Attributes:
        data: uint8, all bytes. form: how they lie. n, k: sizes. group: weights that share a scale; K without scales.
        experts: matrices behind each other.
    """

    data: np.ndarray
    form: Form
    n: int
    k: int
    group: int
    experts: int

    @property
    def outputs(self) -> int:
        """N, padded to whole panels; the padding's weights are zero."""
        return -(-self.n // WIDTH) * WIDTH

    @property
    def panel_bytes(self) -> int:
        """From panel to panel."""
        return self.k // self.group * self.form.header + self.k * self.form.row

    def describe(self, start: int = 0) -> np.ndarray:
        """int64 [FIELDS], for a matrix that begins at byte `start` of its arena."""
        matrix = self.outputs // WIDTH * self.panel_bytes
        form = FORMS.index(self.form)
        return np.array([start, form, self.n, self.outputs, self.k, self.group, self.panel_bytes, matrix], np.int64)

    @classmethod
    def pack(cls, weights: Packed | mx.array) -> Panels:
        """Lay out packed weights, or floats [N, K] or [E, N, K]."""
        if isinstance(weights, Packed):
            return cls._of_codes(weights)
        return cls._of_floats(weights)

    @classmethod
    def _of_codes(cls, packed: Packed) -> Panels:
        scales, biases, factor = _factors(packed.scales, packed.biases)
        form = Form(packed.bits, factor)
        raw = np.asarray(packed.w).view(np.uint8)
        experts = packed.experts
        raw, scales, biases = (array.reshape(experts, packed.n, -1) for array in (raw, scales, biases))
        empty = cls(np.empty(0, np.uint8), form, packed.n, packed.k, packed.group_size, experts)
        panels, groups = empty.outputs // WIDTH, packed.k // packed.group_size
        data = np.empty((experts, panels, groups, form.header + packed.group_size * form.row), np.uint8)
        for expert in range(experts):
            codes = _padded(_codes(raw[expert], packed.bits), empty.outputs)
            codes = codes.reshape(panels, WIDTH, groups, packed.group_size).transpose(0, 2, 3, 1)
            if packed.bits == 4:
                codes = codes[..., : WIDTH // 2] | (codes[..., WIDTH // 2 :] << 4)
            data[expert, :, :, form.header :] = codes.reshape(panels, groups, -1)
            for place, factors in enumerate((scales[expert], biases[expert])):
                lanes = _padded(factors, empty.outputs).reshape(panels, WIDTH, groups).transpose(0, 2, 1)
                part = slice(place * form.header // 2, (place + 1) * form.header // 2)
                data[expert, :, :, part] = np.ascontiguousarray(lanes).view(np.uint8)
        return cls(data.reshape(-1), form, packed.n, packed.k, packed.group_size, experts)

    @classmethod
    def _of_floats(cls, weights: mx.array) -> Panels:
        bits = 16 if weights.dtype == mx.bfloat16 else 32
        values = np.asarray(weights.view(mx.uint16) if bits == 16 else weights.astype(mx.float32))
        values = values.reshape(-1, *values.shape[-2:])
        experts, n, k = values.shape
        outputs = -(-n // WIDTH) * WIDTH
        data = np.empty((experts, outputs // WIDTH, k, WIDTH), values.dtype)
        for expert in range(experts):
            data[expert] = _padded(values[expert], outputs).reshape(-1, WIDTH, k).transpose(0, 2, 1)
        return cls(data.reshape(-1).view(np.uint8), Form(bits, 0), n, k, k, experts)


def _factors(scales: mx.array, biases: mx.array) -> tuple[np.ndarray, np.ndarray, int]:
    """Scales and biases in bfloat16 if that loses nothing (as uint16), else in float32; and bytes of one."""
    both = [np.asarray(array.astype(mx.float32)).view(np.uint32) for array in (scales, biases)]
    if any((array & 0xFFFF).any() for array in both):
        return *(array.view(np.float32) for array in both), 4
    return *((array >> 16).astype(np.uint16) for array in both), 2


def _codes(raw: np.ndarray, bits: int) -> np.ndarray:
    """Bytes of words, the first weight in the lowest bits -> a byte a weight."""
    if bits == 8:
        return raw
    codes = np.empty((raw.shape[0], 2 * raw.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = raw & 15, raw >> 4
    return codes


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    if rows.shape[0] == count:
        return rows
    return np.concatenate([rows, np.zeros((count - rows.shape[0], *rows.shape[1:]), rows.dtype)])
