"""Weights in several safetensors files, each below a size limit, and back.

Every file says in its metadata how many there are and which step they hold, so that a run that was killed while it
wrote leaves nothing that could pass for whole.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

LIMIT = 15 * 2**20  # bytes a file


def save_parts(
    tensors: "dict[str, torch.Tensor]",
    folder: Path,
    step: int,
    dtype: "torch.dtype | None" = None,
    limit: int = LIMIT,
) -> list[Path]:
    """Write `tensors` as `dtype` (bfloat16 by default) into weights-NN.safetensors; a tensor above the limit is an
    error. Parts of an earlier step that there are too many of are removed.
    """
    import torch
    from safetensors.torch import save_file

    groups, used = [{}], 0
    for name, tensor in tensors.items():
        tensor = tensor.to(dtype or torch.bfloat16).contiguous().clone()
        size = tensor.numel() * tensor.element_size()
        if size > limit:
            raise ValueError(f"{name} has {size} bytes, more than the {limit} of one file")
        if used + size > limit:
            groups.append({})
            used = 0
        groups[-1][name] = tensor
        used += size
    paths = [folder / f"weights-{number:02d}.safetensors" for number in range(len(groups))]
    said = {"format": "pt", "step": str(step), "parts": str(len(paths))}
    for path, group in zip(paths, groups, strict=True):
        scratch = path.with_suffix(".new")
        save_file(group, scratch, metadata=said)
        os.replace(scratch, path)
    for old in set(folder.glob("weights-*.safetensors")) - set(paths):
        old.unlink()
    return paths


def whole_parts(folder: Path) -> list[Path]:
    """The files of one set of weights, in order.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are not all there, or come from different steps.
    """
    paths = sorted(folder.glob("weights-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no weights-NN.safetensors in {folder}: train first")
    said = []
    for path in paths:
        try:
            with safe_open(path, framework="np") as file:
                said.append(file.metadata() or {})
        except SafetensorError as error:
            raise ValueError(f"{path} is not whole ({error}): the run was stopped while it wrote") from error
    if len({one.get("step") for one in said}) > 1 or said[0].get("parts", str(len(paths))) != str(len(paths)):
        found = ", ".join(f"{path.name} of step {one.get('step')}" for path, one in zip(paths, said, strict=True))
        raise ValueError(f"{folder} holds no whole set of weights ({found}): the run was stopped while it wrote")
    return paths


def load_parts(folder: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of the set in `folder`, under its training name. Raises as `whole_parts`."""
    from safetensors.torch import load_file

    return {name: tensor for path in whole_parts(folder) for name, tensor in load_file(path).items()}
