"""From tokens to logits over the weights, without caches: the layers that a chunk and a decode step walk through."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from labkit.kernels.fused import residual_rms_norm
from labkit.kernels.targets import device_target
from labkit.models.contract import LogitsFor, Output, select_columns
from labkit.models.hybrid.attention_layer import AttentionLayer
from labkit.models.hybrid.config import LINEAR, HybridConfig
from labkit.models.hybrid.delta_layer import MAX_STEP, DeltaLayer
from labkit.models.hybrid.experts import Experts
from labkit.models.hybrid.mlp import DenseBlock
from labkit.models.hybrid.packing import LayerWeights, ModelWeights
from labkit.models.hybrid.plan import Step
from labkit.models.hybrid.sending import Sending


class Layer:
    """One block: `mixer` reads and writes the layer's cache, `mlp` holds the norm between them."""

    def __init__(self, kind: str, config: HybridConfig, weights: LayerWeights):
        self.kind = kind
        self.input_norm = weights.input_norm
        self.mixer = (DeltaLayer if kind == LINEAR else AttentionLayer)(config, weights.mixer)
        self.mlp = (Experts if config.sparse else DenseBlock)(config, weights.mlp, weights.post_norm)


class Graph:
    """Embedding, layers and head. It knows neither caches nor whoever calls it.

    Attributes:
        layers: in order. stream: dtype of the residual stream.
    """

    def __init__(self, config: HybridConfig, weights: ModelWeights, stream: mx.Dtype):
        self.config, self.weights, self.stream = config, weights, stream
        self.layers = [Layer(kind, config, w) for kind, w in zip(config.layer_kinds, weights.layers, strict=True)]

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens [B, L] -> [B, L, D]."""
        return self.weights.embedding.rows(tokens, self.stream)

    def through(self, x: mx.array, mix: Callable[[int, mx.array], mx.array], step: Step) -> tuple[mx.array, mx.array]:
        """All blocks: the residual stream before the last addition, and what is to be added.

        Args:
            x: [B, L, D] or [B * L, D]. mix: a layer's number and its mixer's projections of the normalised input -> the
                mixer's output.
        """
        stream, update = x, None
        sending = Sending() if device_target() is not None and step.length > MAX_STEP else None
        for index, layer in enumerate(self.layers):
            stream, projected = self._project(layer, update, stream, step)
            stream, update = layer.mlp(mix(index, projected), stream, step)
            del projected  # large for a prompt: not to be held while the next layer is built
            # Not the last layer: where no logits are asked for, nobody needs what comes behind its mixer.
            if sending and index < len(self.layers) - 1:
                sending.send(stream, update)
        return stream, update

    def _project(
        self, layer: Layer, update: mx.array | None, stream: mx.array, step: Step
    ) -> tuple[mx.array, mx.array]:
        """The stream with what is to be added, if there is something, and the mixer's projections of its norm."""
        return step.plan.norm_product(update, stream, layer.input_norm, self.config.eps, layer.mixer.weights.inputs)

    def head(
        self,
        stream: mx.array,
        update: mx.array,
        lengths: mx.array | None,
        logits: LogitsFor,
        hidden: bool,
        step: Step,
    ) -> Output:
        """The last norm and the head, for the columns asked for."""
        if logits is None and not hidden:
            return Output(None, None)
        if not hidden:
            stream, update = (select_columns(part, logits, lengths) for part in (stream, update))
        _, states = residual_rms_norm(update, stream, self.weights.norm, self.config.eps)
        if logits is None:
            return Output(None, states)
        chosen = select_columns(states, logits, lengths) if hidden else states
        # As float32: 16 bits know a logit between 16 and 32 to an eighth only, which flips tokens.
        return Output(step.plan.product(chosen, self.weights.head, mx.float32), states if hidden else None)
