"""The probe model on the CPU, and its torch goldens."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.parity.goldens import GoldenSide
from labkit.parity.probe import write_probe
from labkit.parity.sides import MlxLmSide
from labkit.resources import data_folder


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Goldens are float32 on a CPU; a GPU may compute float32 products in tf32."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture(scope="session")
def probe_folder(tmp_path_factory):
    return write_probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def probe_model(probe_folder):
    with mx.stream(mx.cpu):
        return MlxLmSide.open(probe_folder, dtype="float32").model


@pytest.fixture(scope="session")
def goldens() -> dict[str, GoldenSide]:
    """The probe's torch goldens by form."""
    folder = data_folder() / "goldens" / "probe"
    return {form: GoldenSide(folder / f"torch-{form}.safetensors") for form in ("whole", "incremental")}


@pytest.fixture(scope="session")
def speaking_probe(tmp_path_factory):
    """The probe with a tokenizer of 256 single bytes, so that `labkit.load` takes it."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = write_probe(tmp_path_factory.mktemp("speaking"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": alphabet[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
