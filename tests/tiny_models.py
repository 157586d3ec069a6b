"""Tiny random models of every cache kind, as mlx-lm modules or as whole checkpoints on disk: seeded, fp32."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from labkit.models.adapter import Adapter

VOCABULARY = 288  # 256 bytes, the special tokens, and columns that no token has
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
EOS = 258

# Like Qwen's: tools in front, thinking of answers before the last question left out, an empty thought on request.
CHAT_TEMPLATE = """
{%- if messages[0].role == 'nobody' %}{{ raise_exception('nobody speaks here') }}{% endif %}
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < last.user and '</think>' in m.content %}
{{- m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # full attention, head tied to the embedding
    "llama": {**_COMMON, "model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": True},
    # full attention, head of its own
    "llama-untied": {**_COMMON, "model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False},
    # window and full attention mixed, window of 8
    "sliding": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    # Gated DeltaNet and full attention
    "hybrid": {
        **_COMMON,
        "model_type": "qwen3_5",
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    # the same with sparse experts
    "hybrid-moe": {
        **_COMMON,
        "model_type": "qwen3_5_moe",
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    # capped logits after the head
    "capped": {**_COMMON, "model_type": "gemma2", "num_hidden_layers": 2, "query_pre_attn_scalar": 8},
    # scaled logits after the head
    "scaled": {**_COMMON, "model_type": "cohere", "num_hidden_layers": 2, "layer_norm_eps": 1e-5},
    # a state-space model that only fills caches of mlx-lm's own class
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
        "eos_token_id": EOS,
    },
}


def module(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random module of mlx-lm, large enough in its weights that logits differ clearly; `changes` to its config."""
    config = CONFIGS[name] | changes
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    result = architecture.Model(architecture.ModelArgs.from_dict(json.loads(json.dumps(config))))
    result.update(tree_map(lambda p: p * 3 if p.ndim > 1 else p, result.parameters()))
    mx.eval(result.parameters())
    result.eval()
    return result


def adapter(name: str, seed: int = 0, **changes: Any) -> Adapter:
    """The same behind the forward contract."""
    return Adapter(module(name, seed, **changes), CONFIGS[name] | changes)


def write_checkpoint(folder: Path, name: str, seed: int = 0) -> Path:
    """A whole checkpoint: config, weights, and a tokenizer of single bytes with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(module(name, seed).parameters()))
    if name == "sliding":
        weights.pop("lm_head.weight", None)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and its config: token i is byte i of the byte alphabet, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from labkit.models.detokenizer import _byte_alphabet

    vocabulary = dict(sorted(_byte_alphabet().items(), key=lambda item: item[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
