"""transformers' torch implementation as a side: the oracle that shares no code with MLX.

Nothing here needs MLX, so a golden can be made in an environment that has only torch, transformers and numpy.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from labkit.parity.forms import Form
from labkit.parity.sides import Forward, ForwardSide

MISSING = (
    "the torch side needs {missing}, which labkit does not depend on: `pip install torch transformers` into this "
    "environment, or compare with a stored golden instead (`labkit parity MODEL --against GOLDEN`, see data/goldens)"
)


class TorchUnavailable(RuntimeError):
    """torch or transformers is not installed here."""


class TorchSide(ForwardSide):
    """transformers' Qwen3_5Moe in float32 on the CPU, reading a folder that `transformers_layout.export` wrote.

    Args:
        model: a transformers causal language model in evaluation mode.
        form: in which steps it reads. Whole: transformers' chunked delta rule; incremental: its recurrent one.
        name: how reports call it.
    """

    arithmetic = "float32"

    def __init__(self, model: Any, form: Form | None = None, *, name: str = "torch", source: str = "") -> None:
        self.model = model
        self.form = form or Form()
        self.name = name
        self.source = source
        self.vocab_size = model.config.vocab_size

    @classmethod
    def open(cls, folder: str | Path, form: Form | None = None, *, threads: int = 2) -> TorchSide:
        """Load an exported folder.

        Raises:
            TorchUnavailable: if torch or transformers is missing; the message says what to do.
        """
        require_torch()
        import torch
        from safetensors import safe_open
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

        torch.set_num_threads(threads)
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("model_type", None)
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config, attn_implementation="eager")).float()
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            source = (file.metadata() or {}).get("source", "")
        if model.config.tie_word_embeddings:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model.load_state_dict(weights, strict=True)
        return cls(model.eval(), form, source=source)

    def begin(self) -> Forward:
        import torch

        past = None

        def forward(tokens: np.ndarray, position: int) -> np.ndarray:
            nonlocal past
            with torch.inference_mode():
                ids = torch.from_numpy(np.array(tokens, dtype=np.int64))[None]
                out = self.model(input_ids=ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            return out.logits[0].float().numpy()

        return forward


def require_torch() -> None:
    """Raise TorchUnavailable, with the remedy, unless torch and transformers can be imported."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise TorchUnavailable(MISSING.format(missing=" and ".join(missing)))
