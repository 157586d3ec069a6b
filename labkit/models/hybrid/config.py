"""What a Qwen3.5/3.6 checkpoint's config.json says of the text model: read once, checked, nothing guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.models.files import LoadError

FAMILIES = ("qwen3_5", "qwen3_5_moe")
"""mlx-lm's names of the architecture, with dense and with sparse MLPs."""

ATTENTION, LINEAR = "full_attention", "linear_attention"
CONV_TAPS = 4
MAX_EXPERTS, MAX_TOP_K = 512, 32


class NotSpecialised(LoadError):
    """The specialised graph does not cover a checkpoint: the adapter may."""


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of the text model, under the checkpoint's own words where they are clear.

    Attributes:
        layer_kinds: "linear_attention" or "full_attention", one a layer.
        hidden: width of the residual stream. vocabulary: rows of the embedding. eps: of every RMS norm.
        tied: whether the embedding is the head too.
        query_heads, kv_heads, head_dim: of full attention. rotary: rotated values of a head. rope_base: of its angles.
        key_heads, value_heads, key_dim, value_dim: of Gated DeltaNet.
        intermediate: width of dense MLPs; 0 with experts.
        experts, top_k, expert_width, shared_width: of sparse MLPs; 0 experts if dense.
        renormalise: whether the chosen experts' weights are made to sum to 1.
        notes: what the checkpoint holds and this text model leaves out.
    """

    layer_kinds: tuple[str, ...]
    hidden: int
    vocabulary: int
    eps: float
    tied: bool
    query_heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    rope_base: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    intermediate: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    renormalise: bool
    notes: tuple[str, ...] = ()

    @property
    def sparse(self) -> bool:
        """Whether the MLPs are experts."""
        return self.experts > 0

    @property
    def conv_channels(self) -> int:
        """Channels of a DeltaNet layer's convolution: all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def delta_width(self) -> int:
        """Outputs of a DeltaNet layer's recurrence."""
        return self.value_heads * self.value_dim

    @property
    def delta_fits_kernels(self) -> bool:
        """Whether DeltaNet's kernels take heads of these sizes."""
        return all(32 <= dim <= 256 and dim % 32 == 0 for dim in (self.key_dim, self.value_dim))

    @property
    def attention_fits_kernels(self) -> bool:
        """Whether decode attention's kernels take heads of this size."""
        return self.head_dim % 32 == 0 and self.head_dim <= 512

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> HybridConfig:
        """From a parsed config.json.

        Raises:
            NotSpecialised: another architecture, or a switch of this one that no public checkpoint uses.
            LoadError: entries that are missing or contradict each other.
        """
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise NotSpecialised(f"model_type {family!r} has no specialised graph; {', '.join(FAMILIES)} have")
        text = config.get("text_config", config)
        _refuse_switches(text)
        take = _Reader(text)
        experts = text.get("num_experts") or 0
        head_dim = text.get("head_dim") or take.count("hidden_size") // take.count("num_attention_heads")
        rope = _rope(text)
        sizes = cls(
            layer_kinds=_layer_kinds(text, take.count("num_hidden_layers")),
            hidden=take.count("hidden_size"),
            vocabulary=take.count("vocab_size"),
            eps=float(take.value("rms_norm_eps")),
            tied=bool(text.get("tie_word_embeddings", False)),
            query_heads=take.count("num_attention_heads"),
            kv_heads=take.count("num_key_value_heads"),
            head_dim=head_dim,
            rotary=int(head_dim * rope.get("partial_rotary_factor", 0.25)),
            rope_base=float(rope["rope_theta"]),
            key_heads=take.count("linear_num_key_heads"),
            value_heads=take.count("linear_num_value_heads"),
            key_dim=take.count("linear_key_head_dim"),
            value_dim=take.count("linear_value_head_dim"),
            intermediate=0 if experts else take.count("intermediate_size"),
            experts=experts,
            top_k=take.count("num_experts_per_tok") if experts else 0,
            expert_width=take.count("moe_intermediate_size") if experts else 0,
            shared_width=take.count("shared_expert_intermediate_size") if experts else 0,
            renormalise=bool(text.get("norm_topk_prob", True)),
            notes=_notes(config, text),
        )
        sizes._check()
        return sizes

    def _check(self) -> None:
        for few, many, what in (
            (self.kv_heads, self.query_heads, "query heads and key-value heads"),
            (self.key_heads, self.value_heads, "DeltaNet's value heads and key heads"),
        ):
            if many % few:
                raise LoadError(f"{what}: {many} is not a multiple of {few}")
        if self.rotary % 2 or not 2 <= self.rotary <= self.head_dim:
            raise LoadError(f"{self.rotary} rotary values of a head of {self.head_dim}: an even part of it is needed")
        if self.experts and not (self.top_k <= min(self.experts, MAX_TOP_K) and self.experts < MAX_EXPERTS):
            raise NotSpecialised(
                f"{self.top_k} of {self.experts} experts: routing takes up to {MAX_TOP_K} of fewer than {MAX_EXPERTS}"
            )


class _Reader:
    """Entries of a text config that must be there."""

    def __init__(self, text: Mapping[str, Any]):
        self._text = text

    def value(self, key: str) -> Any:
        if self._text.get(key) is None:
            raise LoadError(f"the config names no {key}: it is not a whole Qwen3.5 config")
        return self._text[key]

    def count(self, key: str) -> int:
        value = self.value(key)
        if type(value) is not int or value < 1:
            raise LoadError(f"{key} must be a whole number of at least 1, not {value!r}")
        return value


def _layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    listed, interval = text.get("layer_types"), text.get("full_attention_interval")
    if listed is None and interval is None:
        raise LoadError(
            "the config has neither layer_types nor full_attention_interval: which layers attend would be a guess; "
            "add one of them (Qwen3.5 and 3.6 were released with full_attention_interval 4)"
        )
    regular = None
    if interval is not None:
        if type(interval) is not int or interval < 1:
            raise LoadError(f"full_attention_interval must be a whole number of at least 1, not {interval!r}")
        regular = tuple(ATTENTION if (index + 1) % interval == 0 else LINEAR for index in range(layers))
    if listed is None:
        return regular
    kinds = tuple(listed)
    if unknown := sorted({str(kind) for kind in kinds} - {ATTENTION, LINEAR}):
        raise LoadError(f"layer_types has {', '.join(unknown)}: Qwen3.5 layers are {LINEAR} or {ATTENTION}")
    if len(kinds) != layers:
        raise LoadError(f"layer_types lists {len(kinds)} layers, and num_hidden_layers is {layers}")
    if regular is not None and kinds != regular:
        raise LoadError(
            f"layer_types and full_attention_interval {interval} disagree at layer "
            f"{next(i for i, pair in enumerate(zip(kinds, regular, strict=True)) if pair[0] != pair[1])}: remove one"
        )
    return kinds


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_theta") is None:
        raise LoadError("rope_parameters with a rope_theta are needed: the angles would be a guess")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise NotSpecialised(f"rotary embedding of type {kind!r}: only the plain one has a specialised graph")
    return rope


def _refuse_switches(text: Mapping[str, Any]) -> None:
    """Switches of the architecture's family that change the graph, and that Qwen3.5 checkpoints leave alone."""
    expected = {
        "attention_bias": (False, None),
        "hidden_act": ("silu", None),
        "linear_conv_kernel_dim": (CONV_TAPS,),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "attn_output_gate": (True, None),
    }
    for key, allowed in expected.items():
        if (value := text.get(key)) not in allowed:
            raise NotSpecialised(f"{key} is {value!r}; the specialised graph is for {allowed[0]!r}")


def _notes(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if "vision_config" in config:
        notes.append("text only: the vision tower is left out, and images cannot be given")
    if text.get("mtp_num_hidden_layers") or config.get("mtp_num_hidden_layers"):
        notes.append("the multi-token prediction head is left out: tokens are drafted by nothing")
    return tuple(notes)
