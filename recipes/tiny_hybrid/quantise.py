"""Quantise trained weights as mlx-lm does and write the shipped model folder.

    python -m recipes.tiny_hybrid.quantise --weights WEIGHTS --out data/models/tiny-hybrid

Affine, 4 bits, groups of 64; the routers (mlp.gate) and shared-expert gates take 8 bits, by mlx-lm's own predicate.
The MTP head, which mlx-lm does not load, is quantised by the same rule and kept in the same file under `mtp.*`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from . import layout, parts, shape

GROUP, BITS, GATE_BITS = 64, 4, 8


def model_config(**changes: object) -> dict:
    """config.json of the dense model. Both spellings of the layer pattern: transformers reads one, mlx-lm the other."""
    config = {**shape.TRUNK, **changes}
    layers = range(config["num_hidden_layers"])
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe",
        **config,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in layers],
        "norm_topk_prob": True,
        "mtp_num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }


def quantise_head(head: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, dict]]:
    """(tensors of the MTP head with its matrices quantised, settings of those that differ from the default)."""
    found, settings = {}, {}
    for name, value in head.items():
        path = name.removesuffix(".weight")
        if value.ndim < 2 or value.shape[-1] % GROUP:
            found[name] = value
            continue
        gate = path.endswith(("mlp.gate", "shared_expert_gate"))
        bits = GATE_BITS if gate else BITS
        found[name], found[f"{path}.scales"], found[f"{path}.biases"] = mx.quantize(value, GROUP, bits)
        if gate:
            settings[path] = {"group_size": GROUP, "bits": bits}
    return found, settings


def quantise(weights: dict[str, mx.array], out: Path, **changes: object) -> None:
    """weights: transformers layout in bf16, `mtp.*` included. Writes config.json, generation_config.json and
    model.safetensors.
    """
    config = model_config(**changes)
    trunk = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
    head = {name: value for name, value in weights.items() if name.startswith("mtp.")}
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder)
        mx.save_safetensors(str(dense / "model.safetensors"), trunk, metadata={"format": "pt"})
        (dense / "config.json").write_text(json.dumps(config))
        model, _ = load_model(dense)
        model, quantised = quantize_model(model, config, GROUP, BITS)
        tensors = dict(tree_flatten(model.parameters()))
        head = layout.mlx_from_transformers(head, lambda value: mx.moveaxis(value, 2, 1))
        head, settings = quantise_head({name: value.astype(mx.bfloat16) for name, value in head.items()})
        mx.eval(tensors, head)
    quantised["quantization"] |= settings
    quantised["quantization_config"] = quantised["quantization"]
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), {**tensors, **head}, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(quantised, indent=2) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_trained(folder: Path) -> dict[str, mx.array]:
    """The training run's weight parts in transformers layout."""
    return layout.transformers_from_training(
        {name: value for path in parts.whole_parts(folder) for name, value in mx.load(str(path)).items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("data/models/tiny-hybrid"))
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    quantise(load_trained(arguments.weights), arguments.out)


if __name__ == "__main__":
    main()
