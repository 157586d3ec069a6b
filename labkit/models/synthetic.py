"""Models of a named real shape with random quantised weights: what a step costs, without a download."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from labkit import devices, resources
from labkit.models import files
from labkit.models.adapter import Adapter
from labkit.models.contract import Model
from labkit.models.files import LoadError
from labkit.models.loading import LoadedModel, _read_tokenizer
from labkit.models.random_weights import ROUTER, draw_weights
from labkit.models.tokenizer import Tokenizer
from labkit.models.zoo import tiny_hybrid


@dataclass(frozen=True)
class SyntheticModel(LoadedModel):
    """A model with random weights, in the form of a loaded one.

    `tokenizer` is tiny-hybrid's (None where the vocabulary is smaller): ids are valid, texts mean nothing.

    Attributes:
        module: mlx-lm's module with these weights.
        identity: what the weights follow from.
    """

    module: Any = None
    identity: str = ""

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over what the weights follow from: config, dtype, skew and seed."""
        return hashlib.sha256(self.identity.encode()).hexdigest()


def synthetic(
    shape: str | Path | Mapping[str, Any],
    *,
    layers: int | None = None,
    bits: int | None = 4,
    skew: float = 0.0,
    seed: int = 0,
    dtype: mx.Dtype | None = None,
    graph: Literal["adapter", "specialised", "native"] = "adapter",
    **sizes: Any,
) -> SyntheticModel:
    """A model of a real shape with random weights, built on the device one layer at a time.

    Args:
        shape: a name of `data/configs` ("qwen3.6-35b-a3b") or of an embedded model, a folder or file with a
            config.json, or a parsed config, of any family that mlx-lm knows.
        layers: fewer (or more) of them than the shape has.
        bits: of quantised weights, in the config's groups: 2, 3, 4, 6 or 8; None leaves all weights in `dtype`.
        skew: how unevenly the router chooses: the spread of the logarithm of its rows' lengths. 0 is even; at 1 the
            busiest tenth of the experts gets about a third of all choices.
        seed: of everything drawn; MLX's global random state is left as it was.
        dtype: of floating weights and activations. Default: float32 on a CPU, bfloat16 on a GPU.
        graph: who computes: mlx-lm's module behind the adapter, or labkit's own graphs, which share with the module
            whatever they need not lay out anew.
        sizes: other entries of the text config, such as num_experts=16.

    Raises:
        LoadError: no such shape, a graph that does not cover it, sizes that do not fit together, or weights that do
            not fit this device.
    """
    name, config = read_shape(shape)
    config = _with_sizes(config, layers, bits, sizes)
    if dtype is None:
        dtype = getattr(mx, devices.this_device().dtype)
    with _random_state():
        try:
            module = build_module(config, dtype=str(dtype).rsplit(".", 1)[-1])
        except (ValueError, TypeError, KeyError) as error:
            raise LoadError(f"no model of shape {name} with {sizes or 'these sizes'}: {error}") from error
        size = _stored(module)
        files.check_fits(name, size)
        draw_weights(module, skew, seed)
    module.eval()
    identity = json.dumps([config, str(dtype), skew, seed], sort_keys=True)
    model = _graph(module, config, graph)
    return SyntheticModel(model, _tokenizer(config), config, Path(name), name, size, module, identity)


def read_shape(shape: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, parsed config) of a shape, as `synthetic` takes it.

    Raises:
        LoadError: no such name, folder or file; the message lists the names.
    """
    if isinstance(shape, Mapping):
        return shape.get("model_type", "config"), copy.deepcopy(dict(shape))
    data, path = resources.data_folder(), Path(shape).expanduser()
    for place in (
        data / "configs" / f"{shape}.json",
        data / "models" / str(shape) / "config.json",
        path / "config.json",
        path,
    ):
        if place.is_file():
            try:
                return str(shape), json.loads(place.read_text(encoding="utf-8"))
            except ValueError as error:
                raise LoadError(f"{place} is not a config.json ({error})") from None
    known = ", ".join(shapes())
    raise LoadError(f"no shape {str(shape)!r}: give a folder or file with a config.json, or one of {known}")


def shapes() -> list[str]:
    """The names of real shapes whose config travels with labkit, without weights."""
    return sorted(file.stem for file in (resources.data_folder() / "configs").glob("*.json"))


def build_module(config: Mapping[str, Any], *, dtype: str = "bfloat16") -> Any:
    """mlx-lm's module for `config`, freshly initialised (random values), quantised as the config says.

    MLX is lazy: shapes and storage are known at once, and nothing takes memory until something is computed with it.

    Args:
        config: a parsed config.json of a family that mlx-lm knows.
        dtype: of floating parameters; those that mlx-lm never casts stay as they are.

    Raises:
        ValueError: mlx-lm knows no such model_type.
    """
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import quantize_model

    config = copy.deepcopy(dict(config))
    family = config.get("model_type")
    try:
        code = importlib.import_module(f"mlx_lm.models.{family}")
    except ImportError:
        raise ValueError(f"mlx-lm has no model_type {family!r}") from None
    module = code.Model(code.ModelArgs.from_dict(copy.deepcopy(config)))
    keep = getattr(module, "cast_predicate", lambda path: True)
    target = getattr(mx, dtype)
    cast = lambda path, array: array.astype(target if keep(path) else mx.float32)
    module.update(tree_map_with_path(cast, module.parameters()))
    if table := config.pop("quantization", config.pop("quantization_config", None)):
        own = {path: value for path, value in table.items() if path not in ("group_size", "bits", "mode")}
        fallback = getattr(module, "quant_predicate", None) or (lambda path, layer: True)
        # mlx-lm reports the bits per weight on standard output.
        with contextlib.redirect_stdout(io.StringIO()):
            module, _ = quantize_model(
                module,
                config,
                table["group_size"],
                table["bits"],
                quant_predicate=lambda path, layer: own.get(path, fallback(path, layer)),
            )
    return module


def _with_sizes(
    config: dict[str, Any], layers: int | None, bits: int | None, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    text = config.get("text_config", config)
    if layers is not None:
        if layers < 1:
            raise LoadError(f"layers must be at least 1, not {layers}")
        text["num_hidden_layers"] = layers
        if kinds := text.get("layer_types"):
            text["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    if unknown := [key for key in sizes if key not in text]:
        raise LoadError(f"the shape has no size {unknown[0]!r}; it has {', '.join(sorted(text))}")
    text.update(sizes)
    # A checkpoint may say the same under both names.
    table = [config.pop(name, None) for name in ("quantization", "quantization_config")]
    table = table[0] or table[1] or {}
    if bits is not None:
        own = {path: value for path, value in table.items() if isinstance(value, dict) and path.endswith(ROUTER)}
        config["quantization"] = {"group_size": table.get("group_size", 64), "bits": bits, "mode": "affine"} | own
    return config


def _graph(module: Any, config: dict[str, Any], graph: str) -> Model:
    if graph == "adapter":
        text = config.get("text_config", config)
        count, every = text.get("num_hidden_layers") or 0, text.get("full_attention_interval") or 1
        if count < every:
            raise LoadError(f"mlx-lm's graph needs a layer of full attention, every {every}th: layers={count} has none")
        return Adapter(module, config)
    if graph == "specialised":
        from labkit.models.hybrid import Hybrid

        return Hybrid.from_module(module, config)
    from labkit.models.hybrid.native import NativeHybrid

    return NativeHybrid.from_module(module, config)


def _stored(module: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _tokenizer(config: Mapping[str, Any]) -> Tokenizer | None:
    vocabulary = config.get("text_config", config)["vocab_size"]
    tokenizer = _embedded_tokenizer()
    return tokenizer if tokenizer.base_vocab_size <= vocabulary else None


@cache
def _embedded_tokenizer() -> Tokenizer:
    return _read_tokenizer(tiny_hybrid())


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """mlx-lm's modules draw from MLX's global state while they are built."""
    high, low = mx.random.state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
