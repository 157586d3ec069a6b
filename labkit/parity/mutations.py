"""Deliberate mistakes: each is a bug that an engine for this architecture really makes, put into a model that works.

A check that no mistake turns red proves nothing. `with mutation(model):` breaks an mlx-lm qwen3_5 model and mends it
again; the parity check must call every one of them a defect (tests/parity/test_mutations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

Breakage = Callable[[nn.Module, ExitStack], None]


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        name: short, for tables.
        mistake: what an engine would have done wrong.
        shows: "always", or only where a text is read in several forwards ("caches") or token by token ("decode").
    """

    name: str
    mistake: str
    shows: Literal["always", "caches", "decode"]
    _break: Breakage

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[nn.Module]:
        """Break `model` (an mlx-lm qwen3_5 or qwen3_5_moe model) inside the with block."""
        with ExitStack() as mend:
            self._break(model, mend)
            yield model


def _layers(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """A model's linear-attention modules and full-attention modules."""
    linear = [getattr(layer, "is_linear", False) for layer in model.layers]
    delta = [layer.linear_attn for layer, is_linear in zip(model.layers, linear, strict=True) if is_linear]
    attention = [layer.self_attn for layer, is_linear in zip(model.layers, linear, strict=True) if not is_linear]
    if not delta or not attention:
        raise ValueError("mutations need a hybrid of the qwen3_5 family, with linear and full attention layers")
    return delta, attention


def _set(mend: ExitStack, target: Any, name: str, value: Any) -> None:
    if not hasattr(target, name):
        raise ValueError(f"{type(target).__name__} has no {name} to break: this mutation does not apply to the model")
    mend.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)


def _permute_head(model: nn.Module, mend: ExitStack) -> None:
    attention = _layers(model)[1][0]
    heads, projection = attention.num_attention_heads, attention.q_proj
    order = mx.array([1, 0, *range(2, heads)])
    for name in ("weight", "scales", "biases"):
        if name in projection:
            rows = projection[name]
            _set(mend, projection, name, rows.reshape(heads, -1, rows.shape[-1])[order].reshape(rows.shape))


def _keep_raw_scores(model: nn.Module, mend: ExitStack) -> None:
    for layer in model.layers:
        _set(mend, layer.mlp, "norm_topk_prob", False)


def _interleaved_rope(model: nn.Module, mend: ExitStack) -> None:
    for attention in _layers(model)[1]:
        _set(mend, attention.rope, "traditional", True)


class _Rope(nn.Module):
    """A rope whose offset is moved by `shift(x)`."""

    def __init__(self, rope: nn.Module, shift: Callable[[mx.array], int]) -> None:
        super().__init__()
        self.rope, self.shift = rope, shift

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return self.rope(x, offset=offset + self.shift(x))


def _late_keys(model: nn.Module, mend: ExitStack) -> None:
    # The offset was read again after the cache had grown. A common shift of queries and keys would not show at all.
    for attention in _layers(model)[1]:
        kv_heads = attention.num_key_value_heads
        _set(mend, attention, "rope", _Rope(attention.rope, lambda x, own=kv_heads: int(x.shape[1] == own)))


def _gap_before_decode(model: nn.Module, mend: ExitStack) -> None:
    for attention in _layers(model)[1]:
        _set(mend, attention, "rope", _Rope(attention.rope, lambda x: int(x.shape[2] == 1)))


def _round_decay_rate(model: nn.Module, mend: ExitStack) -> None:
    for delta in _layers(model)[0]:
        _set(mend, delta, "A_log", delta.A_log.astype(mx.bfloat16).astype(mx.float32))


def _round_decay(model: nn.Module, mend: ExitStack) -> None:
    from mlx_lm.models import gated_delta

    exact = gated_delta.compute_g
    _set(
        mend,
        gated_delta,
        "compute_g",
        lambda A_log, a, dt_bias: exact(A_log, a, dt_bias).astype(mx.bfloat16).astype(mx.float32),
    )


class _Afterwards(nn.Module):
    """A linear-attention module that damages one of its cache's arrays after each forward."""

    def __init__(self, inner: nn.Module, slot: int, damage: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.inner, self.slot, self.damage = inner, slot, damage

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        out = self.inner(x, mask, cache)
        if cache is not None:
            cache[self.slot] = self.damage(cache[self.slot])
        return out


def _damage_caches(model: nn.Module, mend: ExitStack, slot: int, damage: Callable[[mx.array], mx.array]) -> None:
    _layers(model)
    for layer in model.layers:
        if layer.is_linear:
            _set(mend, layer, "linear_attn", _Afterwards(layer.linear_attn, slot, damage))


def _stale_conv_tail(model: nn.Module, mend: ExitStack) -> None:
    _damage_caches(model, mend, 0, lambda tail: mx.roll(tail, 1, axis=1))


def _round_state(model: nn.Module, mend: ExitStack) -> None:
    _damage_caches(model, mend, 1, lambda state: state.astype(mx.bfloat16).astype(mx.float32))


def _norm_without_one(model: nn.Module, mend: ExitStack) -> None:
    norm = _layers(model)[1][0].q_norm
    _set(mend, norm, "weight", norm.weight - 1)


def _swap_gate_and_up(model: nn.Module, mend: ExitStack) -> None:
    experts = model.layers[0].mlp.switch_mlp
    gate, up = experts.gate_proj, experts.up_proj
    _set(mend, experts, "gate_proj", up)
    _set(mend, experts, "up_proj", gate)


def _wide_norm_epsilon(model: nn.Module, mend: ExitStack) -> None:
    for layer in model.layers:
        _set(mend, layer.input_layernorm, "eps", 1e-5)


def _wide_gated_epsilon(model: nn.Module, mend: ExitStack) -> None:
    for delta in _layers(model)[0]:
        _set(mend, delta.norm, "eps", 1e-5)


def _l2norm_epsilon(epsilon: Callable[[float, float], float]) -> Breakage:
    def breakage(model: nn.Module, mend: ExitStack) -> None:
        from mlx_lm.models import qwen3_5

        exact = qwen3_5.normalize_qk
        _set(
            mend,
            qwen3_5,
            "normalize_qk",
            lambda q, k, *, inv_scale, eps: exact(q, k, inv_scale=inv_scale, eps=epsilon(eps, inv_scale)),
        )

    return breakage


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("permuted head", "two query heads of one attention layer change places", "always", _permute_head),
    Mutation("raw top-k scores", "the chosen experts' scores are not renormalised", "always", _keep_raw_scores),
    Mutation("interleaved rope", "rotary pairs are neighbours instead of halves", "always", _interleaved_rope),
    Mutation("late keys", "keys are rotated one position further than queries", "always", _late_keys),
    Mutation("position gap", "decode starts one position late after the prefill", "decode", _gap_before_decode),
    Mutation("rounded A_log", "the decay rate is stored in bfloat16", "always", _round_decay_rate),
    Mutation("rounded decay", "the decay gate g is computed in bfloat16", "always", _round_decay),
    Mutation("rounded state", "the recurrent state is kept in bfloat16 between forwards", "caches", _round_state),
    Mutation("stale conv tail", "the convolution's last inputs are kept out of order", "caches", _stale_conv_tail),
    Mutation("norm without 1", "a norm's weight is applied as w, not 1 + w", "always", _norm_without_one),
    Mutation("gate and up swapped", "the experts' gate and up projections change places", "always", _swap_gate_and_up),
    Mutation("layer norm epsilon", "RMSNorm with 1e-5 instead of 1e-6", "always", _wide_norm_epsilon),
    Mutation("gated norm epsilon", "the gated RMSNorm with 1e-5 instead of 1e-6", "always", _wide_gated_epsilon),
    Mutation("l2norm without epsilon", "q, k normalised with epsilon 0", "always", _l2norm_epsilon(lambda eps, _: 0.0)),
    Mutation(
        "l2norm epsilon on the mean",
        "the l2-norm's epsilon added to the mean of squares instead of their sum",
        "always",
        _l2norm_epsilon(lambda eps, inv_scale: eps / inv_scale**2),
    ),
)


def mutation(name: str) -> Mutation:
    """The mutation called `name`."""
    for found in MUTATIONS:
        if found.name == name:
            return found
    raise KeyError(f"no mutation is called {name!r}; there are: {', '.join(item.name for item in MUTATIONS)}")
