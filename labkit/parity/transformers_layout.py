"""A quantised mlx-lm checkpoint of the qwen3_5_moe family, spelled out for transformers: exactly dequantised float32
weights under transformers' names, so that torch computes with the very numbers that MLX computes with.

Four things differ between the two layouts, and some are silently wrong if forgotten: transformers stores a norm's
weight less one (all but the gated norm), a convolution as [channels, 1, taps], the experts' gate and up projections in
one tensor, and no prefix before "model.".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.parity.fingerprints import BESIDE_THE_TRUNK, trunk_fingerprint

if TYPE_CHECKING:
    import mlx.core as mx

PREFIX = "language_model."
SHIFTED_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


def export(model_folder: str | Path, target: str | Path) -> Path:
    """Write `target`/model.safetensors and config.json from the mlx-lm folder `model_folder`.

    The fingerprint of the weights is kept in the file's metadata, so that a golden can name the weights it came from.

    Raises:
        ValueError: if the model is not of the qwen3_5_moe family.
    """
    import mlx.core as mx

    source, target = Path(model_folder), Path(target)
    config = json.loads((source / "config.json").read_text())
    if config.get("model_type") != "qwen3_5_moe":
        raise ValueError(
            f"{source} is a {config.get('model_type')!r} model; only 'qwen3_5_moe' can be spelled out for transformers"
        )
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    with mx.stream(mx.cpu):
        renamed = to_transformers(dequantised(weights, config.get("quantization", {})))
        mx.eval(renamed)
    target.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "source": trunk_fingerprint(source)}
    mx.save_safetensors(str(target / "model.safetensors"), renamed, metadata=metadata)
    text = dict(config.get("text_config", config), model_type="qwen3_5_moe_text")
    text.pop("quantization", None)
    interval = text.get("full_attention_interval", 4)
    text["layer_types"] = [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(text["num_hidden_layers"])
    ]
    (target / "config.json").write_text(json.dumps(text, indent=2) + "\n")
    return target


def dequantised(weights: dict[str, mx.array], quantization: dict) -> dict[str, mx.array]:
    """mlx-lm's weights with every packed matrix as float32 codes * scales + biases, and the rest cast to float32."""
    import mlx.core as mx

    dense = {}
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if kind in ("scales", "biases") and f"{module}.weight" in weights:
            continue
        if kind == "weight" and f"{module}.scales" in weights:
            own = quantization.get(module)
            layout = own if isinstance(own, dict) else quantization
            if layout.get("mode", "affine") != "affine":
                raise ValueError(f"{module} is quantised as {layout['mode']!r}; only affine groups can be spelled out")
            scales, biases = (weights[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            value = mx.dequantize(value, scales, biases, layout["group_size"], layout["bits"])
        dense[name] = value.astype(mx.float32)
    return dense


def to_transformers(dense: dict[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm's names and shapes of a dense qwen3_5_moe to those of transformers' Qwen3_5MoeForCausalLM."""
    import mlx.core as mx

    renamed = {}
    for name, value in dense.items():
        if name.startswith(BESIDE_THE_TRUNK):
            continue
        name = name.removeprefix(PREFIX)
        if ".switch_mlp.up_proj." in name:
            continue  # goes with its gate
        if ".switch_mlp.gate_proj." in name:
            up = dense[PREFIX + name.replace("gate_proj", "up_proj")]
            value = mx.concatenate([value, up], axis=-2)
            name = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
        elif ".switch_mlp.down_proj." in name:
            name = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
        elif name.endswith("conv1d.weight"):
            value = mx.contiguous(value.moveaxis(2, 1))
        elif name.endswith(SHIFTED_NORMS):
            value = value - 1.0
        renamed[name] = value
    return renamed
