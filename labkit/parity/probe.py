"""A random hybrid whose weights are chosen so that every mechanism leaves a mark on the logits.

Trained weights hide some mistakes: a model whose keys are long cannot tell an l2-norm that has its epsilon from one
that lost it. The probe is a small qwen3_5_moe model with the architecture of the real ones (three Gated DeltaNet layers
to one of gated attention, routed and shared experts) in which

* one key head and its queries are so short that the l2-norm's epsilon halves them,
* hidden states are small enough for every RMS epsilon to count,
* decays run from fast to almost none, so that both fresh and old state matter,
* packed matrices have scales that differ between groups.

Its weights are dyadic rationals with few bits, made from a raw bit stream. So the packed form and the dequantised form
are the same numbers exactly, on every machine, and nothing of it need be stored: only an oracle's answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GROUP = 64
PREFIX = "language_model."

TEXT_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}


@dataclass(frozen=True)
class Matrix:
    """A packed matrix: `codes` [..., out, in] in 0..2^bits-1; `scales` and `biases` [..., out, in / 64], powers of two
    and their multiples, so that codes * scales + biases is exact in float32."""

    bits: int
    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray

    def packed(self) -> np.ndarray:
        """Codes as MLX packs them: little end first, 32 / bits to a uint32."""
        per_word = 32 // self.bits
        codes = self.codes.astype(np.uint32).reshape(*self.codes.shape[:-1], -1, per_word)
        return np.bitwise_or.reduce(codes << (np.arange(per_word, dtype=np.uint32) * self.bits), axis=-1)

    def dense(self) -> np.ndarray:
        scales, biases = (np.repeat(part, GROUP, axis=-1) for part in (self.scales, self.biases))
        return self.codes.astype(np.float32) * scales + biases


class _Stream:
    """Numbers from PCG64's raw 64-bit output, which numpy guarantees never to change."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def integers(self, shape: tuple[int, ...], bits: int) -> np.ndarray:
        raw = self._bits.random_raw(int(np.prod(shape)))
        return (raw >> np.uint64(64 - bits)).astype(np.int64).reshape(shape)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """Multiples of 2^-10 between low and high."""
        unit = self.integers(shape, 20) / 2.0**20
        return (np.round((low + (high - low) * unit) * 1024) / 1024).astype(np.float32)

    def matrix(self, shape: tuple[int, ...], gain: float, bits: int = 4) -> Matrix:
        """A matrix whose products with unit-variance inputs have a standard deviation of about `gain`."""
        spread = np.sqrt((2.0 ** (2 * bits) - 1) / 12)
        exponent = round(float(np.log2(gain / (spread * np.sqrt(shape[-1])))))
        exponents = exponent - self.integers((*shape[:-1], shape[-1] // GROUP), 1)
        scales = np.ldexp(1.0, exponents).astype(np.float32)
        return Matrix(bits, self.integers(shape, bits), scales, -scales * np.float32((2**bits - 1) / 2))


def probe_config(*, quantised: bool = True) -> dict:
    """config.json of the probe, as mlx-lm reads it."""
    config = {"model_type": "qwen3_5_moe", "text_config": dict(TEXT_CONFIG)}
    if quantised:
        eight = {"group_size": GROUP, "bits": 8}
        gates = {
            f"{PREFIX}model.layers.{layer}.mlp.{gate}": eight
            for layer in range(TEXT_CONFIG["num_hidden_layers"])
            for gate in ("gate", "shared_expert_gate")
        }
        config["quantization"] = {"group_size": GROUP, "bits": 4, **gates}
    return config


def probe_weights(seed: int = 0) -> dict[str, Matrix | np.ndarray]:
    """The probe's weights under mlx-lm's names (without ".weight" for packed matrices)."""
    stream = _Stream(seed)
    c = TEXT_CONFIG
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    weights: dict[str, Matrix | np.ndarray] = {
        "model.embed_tokens": stream.matrix((vocabulary, hidden), gain=0.02 * np.sqrt(hidden)),
        "lm_head": stream.matrix((vocabulary, hidden), gain=3.0),
        "model.norm.weight": stream.uniform((hidden,), 0.75, 1.25),
    }
    for layer in range(c["num_hidden_layers"]):
        attention = (layer + 1) % c["full_attention_interval"] == 0
        for name, value in _block(stream, attention):
            weights[f"model.layers.{layer}.{name}"] = value
    return {PREFIX + name: value for name, value in weights.items()}


def _block(stream: _Stream, attention: bool) -> Iterator[tuple[str, Matrix | np.ndarray]]:
    c = TEXT_CONFIG
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", stream.uniform((hidden,), 0.5, 1.5)
    mixer = _attention(stream) if attention else _delta_net(stream)
    yield from mixer
    yield "mlp.gate", stream.matrix((c["num_experts"], hidden), gain=1.0, bits=8)
    yield "mlp.shared_expert_gate", stream.matrix((1, hidden), gain=1.0, bits=8)
    for part, lead, width in (
        ("switch_mlp", (c["num_experts"],), inner),
        ("shared_expert", (), c["shared_expert_intermediate_size"]),
    ):
        yield f"mlp.{part}.gate_proj", stream.matrix((*lead, width, hidden), gain=1.0)
        yield f"mlp.{part}.up_proj", stream.matrix((*lead, width, hidden), gain=0.5)
        yield f"mlp.{part}.down_proj", stream.matrix((*lead, hidden, width), gain=0.2)


def _attention(stream: _Stream) -> Iterator[tuple[str, Matrix | np.ndarray]]:
    c = TEXT_CONFIG
    hidden, heads, kv_heads, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    yield "self_attn.q_proj", stream.matrix((heads * dim * 2, hidden), gain=1.0)
    yield "self_attn.k_proj", stream.matrix((kv_heads * dim, hidden), gain=1.0)
    yield "self_attn.v_proj", stream.matrix((kv_heads * dim, hidden), gain=1.0)
    yield "self_attn.o_proj", stream.matrix((hidden, heads * dim), gain=0.5)
    yield "self_attn.q_norm.weight", stream.uniform((dim,), 0.75, 1.5)
    yield "self_attn.k_norm.weight", stream.uniform((dim,), 0.75, 1.5)


def _delta_net(stream: _Stream) -> Iterator[tuple[str, Matrix | np.ndarray]]:
    c = TEXT_CONFIG
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    key_dim, value_width = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    qkv = stream.matrix((2 * key_dim + value_width, hidden), gain=1.0)
    # Head 0's queries and keys: lengths of about the square root of the l2-norm's epsilon, 1e-3
    for first in (0, key_dim):
        short = slice(first, first + c["linear_key_head_dim"])
        for part in (qkv.scales, qkv.biases):
            part[short] *= np.float32(2.0**-11)
    yield "linear_attn.in_proj_qkv", qkv
    yield "linear_attn.in_proj_z", stream.matrix((value_width, hidden), gain=1.0)
    yield "linear_attn.in_proj_a", stream.matrix((heads, hidden), gain=1.0)
    yield "linear_attn.in_proj_b", stream.matrix((heads, hidden), gain=1.0)
    yield (
        "linear_attn.conv1d.weight",
        stream.uniform((2 * key_dim + value_width, c["linear_conv_kernel_dim"], 1), -1, 1),
    )
    yield "linear_attn.A_log", stream.uniform((heads,), -4.0, 0.5)
    yield "linear_attn.dt_bias", stream.uniform((heads,), -2.0, 0.0)
    yield "linear_attn.norm.weight", stream.uniform((c["linear_value_head_dim"],), 0.5, 1.5)
    yield "linear_attn.out_proj", stream.matrix((hidden, value_width), gain=0.1)


def probe_windows(count: int = 2, length: int = 200, seed: int = 1) -> list[np.ndarray]:
    """Random token windows [length + 1] int32."""
    stream = _Stream(seed)
    return [stream.integers((length + 1,), 9).astype(np.int32) for _ in range(count)]


def write_probe(folder: str | Path, *, seed: int = 0, quantised: bool = True) -> Path:
    """Write the probe as a model folder in mlx-lm's format (without a tokenizer), about 1 MB packed."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, value in probe_weights(seed).items():
        if not isinstance(value, Matrix):
            tensors[name] = value
        elif quantised:
            tensors |= {
                f"{name}.weight": value.packed(),
                f"{name}.scales": value.scales,
                f"{name}.biases": value.biases,
            }
        else:
            tensors[f"{name}.weight"] = value.dense()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(probe_config(quantised=quantised), indent=2) + "\n")
    return folder
