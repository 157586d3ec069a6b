"""Export the shipped model to transformers' layout: exactly dequantised fp32 weights, `mtp.*` included.

    python -m recipes.tiny_hybrid.export_transformers --model data/models/tiny-hybrid --out /tmp/tiny-hybrid-
    transformers

`Qwen3_5MoeForCausalLM.from_pretrained(OUT)` loads the result (transformers ignores `mtp.*`). With --weights the dense
weights of a training run are written instead, to measure what quantisation costs.
"""

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx

from . import layout
from .quantise import load_trained, model_config


def dequantised(folder: Path) -> dict[str, mx.array]:
    """Dense fp32 weights of an mlx-lm folder, in mlx-lm's names: scale * q + bias in fp32, with nothing rounded."""
    weights = mx.load(str(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    dense = {}
    for name, value in weights.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" in weights:
            chosen = settings.get(path, settings)
            scales, biases = (weights[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            value = mx.dequantize(value, scales, biases, chosen["group_size"], chosen["bits"])
        dense[name] = value.astype(mx.float32)
    return dense


def export(weights: dict[str, mx.array], source: dict, out: Path) -> None:
    """weights in transformers' names; `source` is a config as in the shipped folder."""
    config = {key: value for key, value in source.items() if not key.startswith("quantization")}
    config |= {"model_type": "qwen3_5_moe_text", "torch_dtype": "float32"}
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(mx.float32) for name, value in weights.items()}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_shipped(folder: Path, out: Path) -> None:
    weights = layout.transformers_from_mlx(
        dequantised(folder),
        lambda v: mx.contiguous(mx.moveaxis(v, 2, 1)),
        lambda a, b: mx.contiguous(mx.concatenate([a, b], axis=-2)),
    )
    export(weights, json.loads((folder / "config.json").read_text()), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/models/tiny-hybrid"))
    parser.add_argument("--weights", type=Path, help="export these trained weights instead of the quantised ones")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    if arguments.weights:
        export(load_trained(arguments.weights), model_config(), arguments.out)
    else:
        export_shipped(arguments.model, arguments.out)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(arguments.model / file, arguments.out / file)


if __name__ == "__main__":
    main()
