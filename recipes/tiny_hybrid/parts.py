"""Weights in several safetensors files, each below a size limit, and back."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LIMIT = 15 * 2**20  # bytes a file


def save_parts(
    tensors: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype = torch.bfloat16, limit: int = LIMIT
) -> list[Path]:
    """Write `tensors` as `dtype` into weights-NN.safetensors; a tensor above the limit is an error."""
    groups, used = [{}], 0
    for name, tensor in tensors.items():
        tensor = tensor.to(dtype).contiguous().clone()
        size = tensor.numel() * tensor.element_size()
        if size > limit:
            raise ValueError(f"{name} has {size} bytes, more than the {limit} of one file")
        if used + size > limit:
            groups.append({})
            used = 0
        groups[-1][name] = tensor
        used += size
    paths = [folder / f"weights-{number:02d}.safetensors" for number in range(len(groups))]
    for path, group in zip(paths, groups, strict=True):
        save_file(group, path, metadata={"format": "pt"})
    return paths


def load_parts(folder: Path) -> dict[str, torch.Tensor]:
    paths = sorted(folder.glob("weights-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no weights-NN.safetensors in {folder}: train first")
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}
