"""The oracles: the plain form's own references, one after the other, laid out as the one output is."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.persistent import plain
from labkit.kernels.persistent.arguments import Attention, Cached, Delta, Sparse
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.signature import Launch, TemplateValue


class _Inputs:
    """A launch's inputs, taken in order."""

    def __init__(self, launch: Launch):
        self._left = list(launch.inputs)
        self.sizes: dict[str, TemplateValue] = dict(launch.template)

    def take(self, count: int) -> list[mx.array]:
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def matrix(self, prefix: str) -> Packed:
        return Packed(*self.take(3), self.sizes[f"{prefix}GROUP"], self.sizes[f"{prefix}BITS"])

    def sparse(self) -> Sparse:
        (norm,) = self.take(1)
        matrices = [self.matrix(prefix) for prefix in ("ROUTER_", "", "", "DOWN_")]
        counts = (self.sizes[name] for name in ("E", "TOPK", "SHARED", "RENORMALISE"))
        return Sparse(norm, *matrices, *counts)


def sparse_half(launch: Launch) -> list[mx.array]:
    """hidden and y."""
    inputs = _Inputs(launch)
    rows, sparse, (eps,) = inputs.take(2), inputs.sparse(), inputs.take(1)
    return _filled(launch, ("HIDDEN", "Y"), plain.sparse_half(*rows, sparse, eps.item(), "reference"))


def linear_layer(launch: Launch) -> list[mx.array]:
    """hidden, y, state and tail."""
    inputs = _Inputs(launch)
    rows, projections = inputs.take(2), [inputs.matrix("IN_"), inputs.matrix("OUT_")]
    input_norm, tail, state, *others = inputs.take(7)
    heads, dims = (tuple(inputs.sizes[name] for name in names) for names in (("HK", "HV"), ("DK", "DV")))
    delta = Delta(input_norm, projections[0], *others, projections[1], heads, dims)
    sparse, (eps,) = inputs.sparse(), inputs.take(1)
    found = plain.linear_layer(*rows, delta, tail, state, sparse, eps.item(), "reference")
    return _filled(launch, ("HIDDEN", "Y", "STATE", "TAIL"), found)


def full_layer(launch: Launch) -> list[mx.array]:
    """hidden, y and both tails."""
    inputs = _Inputs(launch)
    rows, projections = inputs.take(2), [inputs.matrix("IN_"), inputs.matrix("OUT_")]
    input_norm, q_norm, k_norm, frequency, positions = inputs.take(5)
    cached = Cached(*inputs.take(8), positions)
    inputs.take(3)
    heads, rotary = (inputs.sizes["HQ"], inputs.sizes["HKV"]), inputs.sizes["ROTARY"]
    # The second frequency is base ** (-2 / rotary).
    base = frequency[1].item() ** (-rotary / 2) if rotary > 2 else 10000.0
    attention = Attention(input_norm, projections[0], q_norm, k_norm, projections[1], heads, rotary, base)
    sparse, (eps,) = inputs.sparse(), inputs.take(1)
    found = plain.full_layer(*rows, attention, cached, sparse, eps.item(), "reference")
    return _filled(launch, ("HIDDEN", "Y", "TAIL_KEYS", "TAIL_VALUES"), found)


def _filled(launch: Launch, names: tuple[str, ...], values: list[mx.array]) -> list[mx.array]:
    """One output of words with the values at the places that the launch's template names."""
    sizes, pieces, at = dict(launch.template), [], 0
    for begin, value in sorted(
        ((sizes[f"{name}_AT"], value) for name, value in zip(names, values, strict=True)), key=lambda pair: pair[0]
    ):
        flat = value.reshape(-1)
        if rest := -flat.size * flat.dtype.size % 4:
            flat = mx.concatenate([flat, mx.zeros((rest // flat.dtype.size,), flat.dtype)])
        pieces += [mx.zeros((begin - at,), mx.uint32), flat.view(mx.uint32)]
        at = begin + pieces[-1].size
    (total,) = launch.output_shapes[0]
    return [mx.concatenate([*pieces, mx.zeros((total - at,), mx.uint32)])]
