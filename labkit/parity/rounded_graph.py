"""The hybrid's whole sequence in float32, rounded to bfloat16 where one says: see `labkit.parity.roundings`.

A GPU multiplies 16-bit numbers exactly and adds them in float32; what it loses, it loses where an array is stored. So
this graph, in plain numpy, computes in float32 and rounds arrays to bfloat16 at points that have names. Without any it
is the exact model (2e-5 nat from torch's golden); with all of them it is what a GPU computes in bfloat16, up to the
order of sums; with one it shows what that one costs.

Names and forms as in `labkit.models.hybrid`, whose kernels say in their docstrings what they round.
"""

from __future__ import annotations

from collections.abc import Collection

import mlx.core as mx
import numpy as np

from labkit.kernels.gated_delta import scan
from labkit.kernels.gated_delta.reference import L2_EPS
from labkit.kernels.quantized_matmul import Packed
from labkit.models.hybrid import Hybrid
from labkit.models.hybrid.config import CONV_TAPS, LINEAR, HybridConfig
from labkit.models.hybrid.matrix import Matrix
from labkit.models.hybrid.packing import AttentionWeights, DeltaWeights, LayerWeights

POINTS = {
    "embedding": "the embedding's rows",
    "stream": "the residual stream, after each of its additions",
    "norms": "norms, as matrices read them",
    "projections": "DeltaNet's q, k, v and z; attention's q, gate, k and v",
    "decays": "DeltaNet's a and b, which become decays and betas",
    "conv": "q, k and v after the convolution",
    "delta": "the recurrence's output, and its gated norm",
    "heads": "q and k after norm and rotation",
    "probabilities": "attention's exponentials",
    "attention": "attention's output, before and after its gate",
    "updates": "what mixers and MLPs add to the stream",
    "scored": "the norm, as the router reads it",
    "router": "the router's scores",
    "middles": "an expert's hidden values",
    "products": "experts' outputs before they are summed",
    "logits": "logits",
    "weights": "layers' matrices, dequantised",
    "head weights": "the head's matrix, dequantised",
}
"""What may be rounded."""

Choices = list[np.ndarray]
"""The experts of each token [T, k], a layer after the other, the best first."""

Pair = tuple[np.ndarray, np.ndarray]
"""A matrix, and the same rounded."""


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values as the nearest of bfloat16, of two equally near the even one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


class RoundedGraph:
    """The graph over weights that are dequantised once (four bytes each, twice).

    Args:
        model: a sparse hybrid whose shared expert runs as further experts.

    Raises:
        ValueError: another model.
    """

    def __init__(self, model: Hybrid):
        self.sizes, weights = model.sizes, model.weights
        if not self.sizes.sparse or any(layer.mlp.shared_slots == 0 for layer in weights.layers):
            raise ValueError("roundings are told apart in sparse hybrids whose shared expert has the experts' form")
        self.layers = [
            _Layer(self.sizes, kind, layer) for kind, layer in zip(self.sizes.layer_kinds, weights.layers, strict=True)
        ]
        self.embedding, self.head = _pair(weights.embedding)[0], _pair(weights.head)
        self.norm = _floats(weights.norm)

    def logits(
        self, tokens: np.ndarray, points: Collection[str], chosen: Choices | None = None
    ) -> tuple[np.ndarray, Choices]:
        """A window from its beginning.

        Args:
            tokens: [T]. points: of `POINTS`, where to round. chosen: experts to take, whatever the scores say.

        Returns:
            float32 [T, V], and the experts that were taken.

        Raises:
            ValueError: points that are not there.
        """
        if unknown := set(points) - set(POINTS):
            raise ValueError(f"no point {sorted(unknown)[0]!r} to round at; there are {', '.join(POINTS)}")
        at = _Rounding(points)
        stream, update, taken = at("embedding", self.embedding[tokens]), None, []
        for number, layer in enumerate(self.layers):
            if update is not None:
                stream = at("stream", stream + update)
            update = layer.mixed(at("norms", _rms_norm(stream, layer.input_norm, self.sizes.eps)), at)
            stream = at("stream", stream + update)
            normed = _rms_norm(stream, layer.post_norm, self.sizes.eps)
            update, experts = layer.experts(normed, at, None if chosen is None else chosen[number])
            taken.append(experts)
        states = at("norms", _rms_norm(at("stream", stream + update), self.norm, self.sizes.eps))
        return at("logits", states @ at.matrix(self.head, "head weights").T), taken


class _Rounding:
    """What is rounded in one forward."""

    def __init__(self, points: Collection[str]):
        self._points = points

    def __call__(self, point: str, x: np.ndarray) -> np.ndarray:
        return rounded(x) if point in self._points else x

    def matrix(self, both: Pair, point: str = "weights") -> np.ndarray:
        return both[point in self._points]


class _Layer:
    """A block's weights in float32, and what it computes of rows [T, D]."""

    def __init__(self, sizes: HybridConfig, kind: str, weights: LayerWeights):
        self.sizes, mixer, mlp = sizes, weights.mixer, weights.mlp
        self.input_norm, self.post_norm = _floats(weights.input_norm), _floats(weights.post_norm)
        self.mixer = (_Delta if kind == LINEAR else _Attention)(sizes, mixer)
        self.inputs, self.output, self.router = _pair(mixer.inputs), _pair(mixer.output), _pair(mlp.router)
        self.gate, self.up, self.down = (_pair(Matrix((part,))) for part in (mlp.gate, mlp.up, mlp.down))

    def mixed(self, x: np.ndarray, at: _Rounding) -> np.ndarray:
        return at("updates", self.mixer(x @ at.matrix(self.inputs).T, at) @ at.matrix(self.output).T)

    def experts(self, normed: np.ndarray, at: _Rounding, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What the sparse MLP adds, and the experts of each token, `chosen` where that is given."""
        count, x = self.sizes.experts, at("norms", normed)
        scores = at("router", at("scored", normed) @ at.matrix(self.router).T)
        if chosen is None:
            chosen = np.argsort(-scores[:, :count], axis=1, kind="stable")[:, : self.sizes.top_k]
        shares = np.exp(scores[:, :count] - scores[:, :count].max(axis=1, keepdims=True))
        weights = np.take_along_axis(shares, chosen, axis=1)
        weights /= (weights if self.sizes.renormalise else shares).sum(axis=1, keepdims=True)
        gate, up, down = (at.matrix(part) for part in (self.gate, self.up, self.down))
        total = np.zeros_like(x)
        for expert in range(len(gate)):
            if expert < count:
                rows, slots = np.nonzero(chosen == expert)
                weight = weights[rows, slots]
            else:  # a part of the shared expert: all rows, as its gate says
                rows, weight = np.arange(len(x)), _sigmoid(scores[:, count])
            inner = _silu(x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)
            total[rows] += at("products", weight[:, None] * (at("middles", inner) @ down[expert].T))
        return at("updates", total), chosen


class _Delta:
    def __init__(self, sizes: HybridConfig, weights: DeltaWeights):
        self.sizes = sizes
        self.conv, self.a_log, self.dt_bias, self.norm = (
            _floats(part) for part in (weights.conv, weights.a_log, weights.dt_bias, weights.norm)
        )

    def __call__(self, projected: np.ndarray, at: _Rounding) -> np.ndarray:
        sizes, tokens = self.sizes, len(projected)
        keys, width, heads = sizes.key_heads * sizes.key_dim, sizes.delta_width, sizes.value_heads
        ends = np.cumsum([sizes.conv_channels, width, heads])
        qkv, z, a, b = np.split(projected, ends, axis=1)
        qkv, z, a, b = at("projections", qkv), at("projections", z), at("decays", a), at("decays", b)
        sequence = np.concatenate([np.zeros((CONV_TAPS - 1, qkv.shape[1]), np.float32), qkv])
        out = _silu(sum(sequence[tap : tap + tokens] * self.conv[:, tap] for tap in range(CONV_TAPS)))
        q, k, v = np.split(out, [keys, 2 * keys], axis=1)
        q, k = (_l2_norm(part.reshape(tokens, sizes.key_heads, -1)) for part in (q, k))
        q, k, v = at("conv", q * sizes.key_dim**-0.5), at("conv", k), at("conv", v.reshape(tokens, heads, -1))
        log_decay = -np.exp(self.a_log) * np.logaddexp(np.float32(0), a + self.dt_bias)
        state = mx.zeros((1, heads, sizes.value_dim, sizes.key_dim))
        y, _ = scan(*(mx.array(part.astype(np.float32))[None] for part in (q, k, v, log_decay, _sigmoid(b))), state)
        y = at("delta", np.array(y)[0])
        y = _rms_norm(y, self.norm, sizes.eps) * _silu(z.reshape(y.shape))
        return at("delta", y.reshape(tokens, -1))


class _Attention:
    def __init__(self, sizes: HybridConfig, weights: AttentionWeights):
        self.sizes, self.q_norm, self.k_norm = sizes, _floats(weights.q_norm), _floats(weights.k_norm)

    def __call__(self, projected: np.ndarray, at: _Rounding) -> np.ndarray:
        sizes, tokens, dim = self.sizes, len(projected), self.sizes.head_dim
        queries, keys = 2 * sizes.query_heads * dim, sizes.kv_heads * dim
        parts = np.split(at("projections", projected), [queries, queries + keys], axis=1)
        q_gate, k, v = (part.reshape(tokens, -1, size) for part, size in zip(parts, (2 * dim, dim, dim), strict=True))
        q, gate = q_gate[..., :dim], q_gate[..., dim:]
        q, k = (at("heads", self._turned(_rms_norm(x, w, sizes.eps))) for x, w in ((q, self.q_norm), (k, self.k_norm)))
        hidden = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)
        attended = np.empty_like(q)
        for head in range(sizes.query_heads):
            shared = head * sizes.kv_heads // sizes.query_heads
            scores = q[:, head] @ k[:, shared].T * np.float32(dim**-0.5) + hidden
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended[:, head] = at("probabilities", shares) @ v[:, shared] / shares.sum(axis=1, keepdims=True)
        gated = at("attention", attended) * _sigmoid(gate)
        return at("attention", gated.reshape(tokens, -1))

    def _turned(self, x: np.ndarray) -> np.ndarray:
        """Rotary positions: pairs (i, i + rotary / 2) of the last axis."""
        rotary = self.sizes.rotary
        frequencies = (self.sizes.rope_base ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        angles = np.arange(len(x), dtype=np.float32)[:, None, None] * frequencies
        low, high, rest = np.split(x, [rotary // 2, rotary], axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, low * sin + high * cos, rest], axis=-1)


def _pair(matrix: Matrix) -> Pair:
    exact = np.concatenate([_floats(part.dequantize() if isinstance(part, Packed) else part) for part in matrix.parts])
    return exact, rounded(exact)


def _floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight


def _l2_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(L2_EPS))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * (np.float32(1) + np.tanh(np.float32(0.5) * x))  # exp would overflow


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)
