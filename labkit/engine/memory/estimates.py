"""What a request will take: its caches, which are counted, and what a step holds while it runs, which is estimated.

Estimates know shapes and nothing else: no running average, no history. So a request's need is the same before and
after a large one has passed, and it grows with `max_tokens` by the caches' own bytes and nothing more.
"""

from __future__ import annotations

from typing import Any

from labkit import devices
from labkit.engine.capacity import Budget
from labkit.models import LoadedModel
from labkit.models.adapter import Adapter
from labkit.models.hybrid import Hybrid
from labkit.models.hybrid.native import NativeHybrid

FP32 = 4


class Estimates:
    """Bytes that requests on one model need. Every method is monotone in each of its arguments.

    A graph that knows what its forwards hold says it itself (`labkit.models.hybrid.native.memory`, and on a GPU
    `labkit.models.hybrid.memory`); for others it follows from the config.

    Args:
        loaded: the model.
        budget: the sizes of its caches.
        kind: of the device; by default the one at hand. MLX's CPU back end holds the scores of attention and, under
            mlx-lm's graph, the state of a recurrent layer after every token of a chunk; the kernels of the GPUs do not.
    """

    def __init__(self, loaded: LoadedModel, budget: Budget, *, kind: devices.Kind | None = None):
        self._budget = budget
        config = loaded.config.get("text_config", loaded.config)
        on_cpu = (kind or devices.this_device().kind) == "cpu"
        knows = isinstance(loaded.model, NativeHybrid) or (isinstance(loaded.model, Hybrid) and not on_cpu)
        self._own = loaded.model.temporary_bytes if knows else None
        size = loaded.model.dtype.size
        kinds = set(loaded.model.layer_kinds)
        self._vocabulary = loaded.model.vocab_size
        heads = int(config.get("num_attention_heads") or 0)
        hidden = int(config.get("hidden_size") or config.get("d_model") or 0)
        dim = int(config.get("head_dim") or (hidden // heads if heads else 0))
        attends = bool(kinds & {"full_attention", "sliding_attention"})
        self._scores = FP32 * heads if on_cpu and attends else 0
        mixers = [0]
        if attends:
            shared = int(config.get("num_key_value_heads") or heads)
            # Queries with their gates, before and after the rotation, the output twice; keys and values twice.
            mixers.append(size * dim * (6 * heads + 4 * shared))
        if "linear_attention" in kinds:
            mixers.append(_recurrent(config, size, on_cpu and isinstance(loaded.model, Adapter)))
        # The residual before and after, its norm, and what the block returns.
        self._per_token = 4 * hidden * size + max(max(mixers), _feed_forward(config, hidden, size))
        self._attending = max(1, sum(kind != "linear_attention" for kind in loaded.model.layer_kinds))

    def caches(self, prompt_tokens: int, max_tokens: int, *, chunk: int) -> int:
        """Bytes of the caches of one request when it ends."""
        return self._budget.cache_bytes(prompt_tokens + max_tokens, chunk=min(chunk, prompt_tokens))

    def transient(self, chunk: int, context: int, *, rows: int = 1) -> int:
        """Bytes that one forward holds beside the caches: `chunk` columns whose first has `context` tokens before it,
        in each of `rows` rows.

        They are the activations of one layer, a new buffer where one layer's cache grows, and a row of logits with
        what is drawn from them.
        """
        if self._own is not None:
            drawn = 2 * FP32 * rows * self._vocabulary  # beside the logits, which the graph has counted twice
            return self._own(chunk, context=context, batch=rows, positions=1) + drawn
        columns = context + chunk
        # A buffer that grows is there twice, and one of the two is in the caches' bytes; one layer grows after another.
        growing = -(-self._budget.cache_bytes(columns, chunk=chunk) // self._attending)
        attention = columns * chunk * (self._scores + 2) if self._scores else 0  # and the mask, twice
        return rows * (chunk * self._per_token + attention + growing + 4 * FP32 * self._vocabulary)

    def prompt_step(self, prompt_tokens: int, chunk: int) -> int:
        """`transient` of the costliest step of a prompt, its last whole chunk."""
        chunk = min(chunk, prompt_tokens)
        return self.transient(chunk, prompt_tokens - chunk)

    def need(self, prompt_tokens: int, max_tokens: int, *, chunk: int) -> int:
        """Bytes that a request needs to run to its end, beside the weights: its caches, and the costliest step of its
        prompt."""
        return self.caches(prompt_tokens, max_tokens, chunk=chunk) + self.prompt_step(prompt_tokens, chunk)


def _recurrent(config: dict[str, Any], size: int, states: bool) -> int:
    """Bytes a token of a Gated DeltaNet layer."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (int(config.get(name) or 0) for name in names)
    # The convolution's input and output, keys and queries repeated for the value heads, values, gate and output;
    # most of them twice, since one's input lives until its output is there.
    width = 8 * key_heads * key_dim + value_heads * (4 * key_dim + 8 * value_dim)
    return size * width + (FP32 * value_heads * key_dim * value_dim if states else 0)


def _feed_forward(config: dict[str, Any], hidden: int, size: int) -> int:
    """Bytes a token of the widest feed-forward layer: gate, up, their product, and its experts' outputs."""
    experts = int(config.get("num_experts_per_tok") or 0)
    routed = experts * (3 * int(config.get("moe_intermediate_size") or 0) + 2 * hidden)
    shared = 3 * int(config.get("shared_expert_intermediate_size") or 0)
    every = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    dense = 3 * int(config.get("intermediate_size") or 0)
    return max(size * (routed + shared) + FP32 * 3 * every, size * dense)
