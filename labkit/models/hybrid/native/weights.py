"""A layer's weights as the loops read them: every matrix in one arena of bytes, small vectors in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.kernels.quantized_matmul.panels import OUTPUTS, ROWS, WIDTH, Panels
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.matrix import Matrix, Weights
from labkit.models.hybrid.native.records import LAYER, filled
from labkit.models.hybrid.packing import AttentionWeights, DeltaWeights, DenseWeights, ExpertWeights, LayerWeights


class Arena:
    """Matrices behind each other.

    Attributes:
        data: uint8, all bytes.
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._size = 0
        self.data = np.empty(0, np.uint8)

    def add(self, weights: Weights) -> np.ndarray:
        """Lay out a matrix; returns its description, int64 [FIELDS]."""
        panels = Panels.pack(weights)
        description = panels.describe(self._size)
        self._parts.append(panels.data)
        self._size += panels.data.size
        return description

    def add_all(self, matrix: Matrix) -> np.ndarray:
        """Matrices with the same inputs -> int64 [parts, FIELDS]."""
        return np.stack([self.add(part) for part in matrix.parts])

    def close(self) -> None:
        """All were added."""
        self.data = np.concatenate(self._parts)
        self._parts.clear()


@dataclass(frozen=True)
class Mixer:
    """What both kinds have: the matrices of their inputs, int64 [parts, FIELDS], and of their output."""

    inputs: np.ndarray
    output: np.ndarray

    @cached_property
    def columns(self) -> int:
        """Of the inputs side by side, with room for the last panel's padding."""
        return int(self.inputs[:, ROWS].sum()) + WIDTH


@dataclass(frozen=True)
class Delta(Mixer):
    """Gated DeltaNet. inputs: matrices of q, k, v, z, a, b. conv: [4, channels]."""

    conv: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray


@dataclass(frozen=True)
class Attention(Mixer):
    """Gated attention. inputs: matrices of queries with gates, keys, values."""

    q_norm: np.ndarray
    k_norm: np.ndarray


@dataclass(frozen=True)
class Dense:
    """An MLP's three matrices."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True)
class Experts:
    """Sparse experts; `slots` of them, the last, are the shared one. Else `shared` is, or nothing is."""

    router: np.ndarray
    routed: Dense
    slots: int
    shared: Dense | None


@dataclass(frozen=True)
class NativeLayer:
    """One block."""

    arena: np.ndarray
    input_norm: np.ndarray
    mixer: Delta | Attention
    post_norm: np.ndarray
    mlp: Dense | Experts

    @property
    def matrices(self) -> list[np.ndarray]:
        """All descriptions, int64 [.., FIELDS]."""
        parts = [self.mixer.inputs, self.mixer.output]
        mlps = [self.mlp] if isinstance(self.mlp, Dense) else [self.mlp.routed, self.mlp.shared]
        parts += [matrix for mlp in mlps if mlp for matrix in (mlp.gate, mlp.up, mlp.down)]
        return parts if isinstance(self.mlp, Dense) else [*parts, self.mlp.router]

    def record(self, sizes: HybridConfig, scale: np.ndarray) -> np.ndarray:
        """LAYER [1]. scale: float32 [1], of attention; the caller holds it."""
        mixer, mlp, every = self.mixer, self.mlp, self.mlp
        values: dict[str, Any] = {
            "arena": self.arena, "width": sizes.hidden, "eps": sizes.eps, "input_norm": self.input_norm,
            "post_norm": self.post_norm, "inputs": mixer.inputs, "parts": len(mixer.inputs), "columns": mixer.columns,
            "output": mixer.output,
        }  # fmt: skip
        if isinstance(mixer, Delta):
            values |= {name: getattr(sizes, name) for name in ("key_heads", "value_heads", "key_dim", "value_dim")}
            values |= {name: getattr(mixer, name) for name in ("conv", "a_log", "dt_bias")}
            values |= {"mixer_norm": mixer.norm, "mixed": sizes.delta_width}
        else:
            values |= {name: getattr(sizes, name) for name in ("query_heads", "kv_heads", "head_dim")}
            values |= {"attends": 1, "q_norm": mixer.q_norm, "k_norm": mixer.k_norm, "scale": scale}
            values |= {"half": sizes.rotary // 2, "mixed": sizes.query_heads * sizes.head_dim}
        if isinstance(mlp, Experts):
            routed, every = mlp.routed, mlp.shared
            values |= {name: int(getattr(sizes, name)) for name in ("experts", "top_k", "renormalise")}
            values |= {"slots": mlp.slots, "router": mlp.router, "router_parts": len(mlp.router)}
            values |= {"router_columns": int(mlp.router[:, OUTPUTS].sum()), "factor": int(every is not None)}
            values |= {"expert_gate": routed.gate, "expert_up": routed.up, "expert_down": routed.down}
        if every is not None:
            values |= {"gate": every.gate, "up": every.up, "down": every.down}
        return filled(LAYER, **values)

    @property
    def nbytes(self) -> int:
        """Of the arena: vectors and descriptions are a few kilobytes."""
        return self.arena.nbytes

    @classmethod
    def pack(cls, layer: LayerWeights) -> NativeLayer:
        """From the layer's tensors."""
        arena = Arena()
        mixer = _delta(arena, layer.mixer) if isinstance(layer.mixer, DeltaWeights) else _attention(arena, layer.mixer)
        mlp = _dense(arena, layer.mlp) if isinstance(layer.mlp, DenseWeights) else _experts(arena, layer.mlp)
        arena.close()
        return cls(arena.data, vector(layer.input_norm), mixer, vector(layer.post_norm), mlp)


def vector(array: mx.array) -> np.ndarray:
    """In float32, on the host, for itself."""
    return np.array(array.astype(mx.float32))


def _delta(arena: Arena, weights: DeltaWeights) -> Delta:
    return Delta(
        arena.add_all(weights.inputs),
        arena.add(_only(weights.output.parts)),
        np.ascontiguousarray(vector(weights.conv).T),
        vector(weights.a_log),
        vector(weights.dt_bias),
        vector(weights.norm),
    )


def _attention(arena: Arena, weights: AttentionWeights) -> Attention:
    return Attention(
        arena.add_all(weights.inputs),
        arena.add(_only(weights.output.parts)),
        vector(weights.q_norm),
        vector(weights.k_norm),
    )


def _dense(arena: Arena, weights: DenseWeights) -> Dense:
    return Dense(arena.add(weights.gate), arena.add(weights.up), arena.add(_only(weights.down.parts)))


def _experts(arena: Arena, weights: ExpertWeights) -> Experts:
    routed = Dense(arena.add(weights.gate), arena.add(weights.up), arena.add(weights.down))
    shared = None if weights.shared is None else _dense(arena, weights.shared)
    return Experts(arena.add_all(weights.router), routed, weights.shared_slots, shared)


def _only(parts: Sequence[Weights]) -> Weights:
    (part,) = parts
    return part
