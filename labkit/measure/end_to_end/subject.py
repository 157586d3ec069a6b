"""What a comparison is about: one set of weights, in mlx-lm's module and in labkit's graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

import labkit
from labkit import devices
from labkit.measure import model_costs
from labkit.models import synthetic
from labkit.models.contract import Model
from labkit.models.files import LoadError
from labkit.models.hybrid import Hybrid, NotSpecialised, Variants
from labkit.models.synthetic import shapes

GRAPHS = ("auto", "adapter", "specialised", "native")


@dataclass(frozen=True)
class Subject:
    """Weights and who computes with them.

    Attributes:
        name: of the model. graph: of labkit's side. model: labkit's graph. module: mlx-lm's.
        config: the checkpoint's. fingerprint: of the weights. weights_bytes: of one copy.
    """

    name: str
    graph: str
    model: Model
    module: Any
    config: dict[str, Any]
    fingerprint: str
    weights_bytes: int

    @property
    def costs(self) -> model_costs.ModelCosts:
        """What the model costs by count, in the dtype in which it runs."""
        return model_costs.of(self.config, dtype=str(self.model.dtype).rsplit(".", 1)[-1])

    def with_variants(self, variants: Variants) -> Hybrid:
        """The specialised graph on the same packed weights with other switches.

        Raises:
            LoadError: this subject's graph has no switches.
        """
        if type(self.model) is not Hybrid:
            raise LoadError(f"the {self.graph} graph of {self.name} has no switches: take --graph specialised")
        return Hybrid(self.model.weights, self.config, self.model.dtype, variants=variants)


def open_subject(
    name: str,
    *,
    graph: str = "auto",
    layers: int | None = None,
    skew: float = 0.0,
    seed: int = 0,
    dtype: mx.Dtype | None = None,
    **sizes: Any,
) -> Subject:
    """Load a model, or make one of a named shape with random weights.

    Args:
        name: anything `labkit.load` takes; or a shape of `data/configs` such as "qwen3.6-35b-a3b", or a folder with a
            config.json and no weights: then they are random.
        graph: of labkit's side: "auto", "adapter", "specialised" or "native".
        dtype: of activations, as for `labkit.load`.
        layers, skew, seed, sizes: of a synthetic model; see `labkit.models.synthetic`.

    Raises:
        LoadError: no such model, or a graph that does not cover it.
    """
    if graph not in GRAPHS:
        raise LoadError(f"graph is one of {', '.join(GRAPHS)}, not {graph!r}")
    if name in shapes() or _without_weights(Path(name).expanduser()):
        own = "native" if devices.this_device().kind == "cpu" else "specialised"
        make = partial(synthetic, name, layers=layers, skew=skew, seed=seed, dtype=dtype, **sizes)
        try:
            made = make(graph=own if graph == "auto" else graph)
        except NotSpecialised:
            if graph != "auto":
                raise
            made = make(graph="adapter")
        model = made.model
        return Subject(name, _graph_name(model), model, made.module, made.config, made.fingerprint, made.weights_bytes)
    if layers is not None or skew or sizes:
        raise LoadError(
            f"layers, skew and sizes belong to a shape without weights ({', '.join(shapes())}), not to {name}"
        )
    loaded = labkit.load(name, graph=graph, dtype=dtype)
    module = getattr(loaded.model, "module", None)
    if module is None:
        module = labkit.load(name, graph="adapter", dtype=dtype).model.module
    model, config = loaded.model, loaded.config
    return Subject(name, _graph_name(model), model, module, config, loaded.fingerprint, loaded.weights_bytes)


def _without_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))


def _graph_name(model: Model) -> str:
    return {"Adapter": "adapter", "Hybrid": "specialised", "NativeHybrid": "native"}[type(model).__name__]
