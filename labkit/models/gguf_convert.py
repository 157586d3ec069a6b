"""A llama-family GGUF file -> a folder in mlx-lm's format: packed weights copied bit for bit, never quantised again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.models.files import LoadError, check_fits
from labkit.models.gguf import GgufHeader, read_gguf_header, refuse_unsupported
from labkit.models.gguf_tokenizer import write_tokenizer

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_GROUP = 32
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def convert(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of `source` into `folder`, which exists.

    Raises:
        LoadError: a file that is damaged, of a kind that is not loaded, or too large for the memory.
    """
    header = read_gguf_header(source)
    refuse_unsupported(source, header)
    check_fits(str(source), sum(tensor.nbytes for tensor in header.tensors))
    config = llama_config(source, header)
    write_tokenizer(source, header.metadata, folder)
    arrays = mx.load(str(source), format="gguf")
    weights = {renamed(name): array for name, array in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def renamed(name: str) -> str:
    """GGUF's tensor name -> Hugging Face's; the suffix (weight, scales, biases, bias) stays.

    Raises:
        LoadError: a tensor that llama models do not have.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{suffix}"
    raise LoadError(f"the GGUF file has a tensor {name!r}, which no dense llama model has")


def llama_config(source: Path, header: GgufHeader) -> dict[str, Any]:
    """The config.json that mlx-lm's llama needs.

    Raises:
        LoadError: a header without the numbers that this takes.
    """
    metadata, names = header.metadata, {tensor.name for tensor in header.tensors}
    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise LoadError(f"{source} has no token_embd.weight")

    def number(key: str, default: Any = None, kind: type = int) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise LoadError(f"{source} lacks llama.{key}")
        if type(value) is not kind or not 0 < value < math.inf:
            raise LoadError(f"{source} has llama.{key} = {value!r}, which is no positive {kind.__name__}")
        return value

    heads, blocks = number("attention.head_count"), number("block_count")
    present = len({name.split(".")[1] for name in names if name.startswith("blk.")})
    if blocks != present:
        raise LoadError(f"{source} announces {blocks} blocks and holds {present}")
    quantisation: dict[str, Any] = {"group_size": _GROUP, "bits": 4}
    for tensor in header.tensors:
        if tensor.type in _BITS:
            path = renamed(tensor.name).removesuffix(".weight")
            quantisation[path] = {"group_size": _GROUP, "bits": _BITS[tensor.type]}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": blocks,
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", number("embedding_length") // heads),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", kind=float),
        "vocab_size": embedding.shape[0],
        "rope_theta": number("rope.freq_base", 10000.0, float),
        # llama.cpp permutes the rows of q and k so that rotary pairs are neighbours.
        "rope_traditional": True,
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": any(name.endswith("attn_q.bias") for name in names),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if len(quantisation) > 2:
        config["quantization"] = config["quantization_config"] = quantisation
    return {key: value for key, value in config.items() if value is not None}
