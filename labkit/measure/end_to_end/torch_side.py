"""transformers' torch model behind the face of a side: what a user of torch would reach for.

Its weights are random and of the model's shape, in float32 on a CPU and bfloat16 on a GPU: nothing packs them in 4 bits
there, so it takes four times the memory. It is a line for speed alone; whether it computes the same as MLX is the
matter of `labkit parity --against torch`.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.subject import Subject
from labkit.measure.model_tensors import HYBRID_FAMILIES, attention_layers

NAME = "torch"
LONGEST = 32768  # contexts are really read here: transformers' caches cannot be filled from outside


class TorchSide:
    """transformers' causal language model, decoding greedily with its own cache.

    Args:
        model: in evaluation mode, on its device.
    """

    warm_up_tokens: int | None = 512

    def __init__(self, model: Any, name: str = NAME):
        self.model, self.name = model, name

    @classmethod
    def open(cls, subject: Subject) -> TorchSide:
        """A model of the subject's shape with random weights.

        Raises:
            RuntimeError: torch or transformers is not installed, or has no such architecture.
        """
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise RuntimeError(
                f"--against torch needs {' and '.join(missing)}, which labkit does not depend on: "
                "`pip install torch transformers` into this environment, or leave torch out"
            )
        import torch
        import transformers

        on_gpu = torch.cuda.is_available()
        text, family = _text_config(subject.config)
        try:
            config = getattr(transformers, f"{family}TextConfig")(**text)
            architecture = getattr(transformers, f"{family}ForCausalLM")
        except AttributeError:
            raise RuntimeError(f"this transformers ({transformers.__version__}) has no {family}") from None
        torch.manual_seed(0)
        with torch.device("cuda" if on_gpu else "cpu"):
            model = architecture._from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)
        return cls(model.eval())

    def prefill(self, tokens: mx.array) -> float:
        ids = self._ids(np.array(tokens))
        begin = time.perf_counter()
        self._first(ids)
        return time.perf_counter() - begin

    def decode(self, filled: Filled, steps: int, warm_up: int) -> tuple[float, int]:
        """As `Side`; the context is read, so it has a limit, and is apart from the clock.

        Raises:
            ValueError: a longer context.
        """
        if filled.context > LONGEST:
            raise ValueError(f"contexts beyond {LONGEST:,} tokens are not read for torch")
        token, past = self._first(self._ids(np.arange(filled.context) % 97))
        for _ in range(warm_up):
            token, past = self._next(token, past)
        begin = time.perf_counter()
        for _ in range(steps):
            token, past = self._next(token, past)
        return (time.perf_counter() - begin) / steps, 0

    def _first(self, ids: Any) -> tuple[Any, Any]:
        return self._next(ids, None)

    def _next(self, ids: Any, past: Any) -> tuple[Any, Any]:
        """The likeliest next token, on the host when this returns, and the cache."""
        import torch

        with torch.inference_mode():
            output = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1:].argmax(dim=-1)
            token.cpu()
        return token, output.past_key_values

    def _ids(self, tokens: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(tokens.astype(np.int64))[None].to(self.model.device)


def _text_config(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(the text model's own config, transformers' name of its family).

    Raises:
        RuntimeError: a family that is not known here.
    """
    family = config.get("model_type")
    if family not in HYBRID_FAMILIES:
        raise RuntimeError(f"--against torch knows Qwen3.5's hybrids, not model_type {family!r}")
    text = {key: value for key, value in config.get("text_config", config).items() if key != "model_type"}
    text.pop("quantization", None)
    kinds = ("linear_attention", "full_attention")
    text["layer_types"] = [kinds[full] for full in attention_layers(config)]
    return text, "Qwen3_5Moe" if text.get("num_experts") else "Qwen3_5"
