"""The shipped 4-bit model as weights to train on, without MLX: a GPU machine that has torch alone can start from it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import layout

WORD = 32  # bits of the words that hold the codes, the first code in the lowest bits


def unpack(packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """packed [..., columns * bits / 32] words, scales and biases [..., columns / group] -> fp32 [..., columns]."""
    shifts = torch.arange(0, WORD, bits)
    words = packed.view(torch.int32).long() & 0xFFFFFFFF
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    grouped = codes.flatten(-2).unflatten(-1, (-1, group)).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)


def load_shipped(folder: Path) -> dict[str, torch.Tensor]:
    """The model folder's weights in fp32 under their training names, `mtp.*` included.

    Raises:
        FileNotFoundError: there is no model in `folder`.
    """
    file = folder / "model.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds neither weights-NN.safetensors of a run nor model.safetensors")
    tensors = load_file(file)
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    dense = {}
    for name, value in tensors.items():
        path = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" in tensors:
            own = settings.get(path, settings)
            scales, biases = tensors[f"{path}.scales"], tensors[f"{path}.biases"]
            value = unpack(value, scales, biases, own["group_size"], own["bits"])
        dense[name] = value.float()
    renamed = layout.transformers_from_mlx(
        dense, lambda value: value.movedim(2, 1).contiguous(), lambda gate, up: torch.cat([gate, up], dim=-2)
    )
    return {name if name.startswith("mtp.") else f"trunk.{name}": value for name, value in renamed.items()}
