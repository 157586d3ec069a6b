"""Folders and files that lie: each is refused in words, quickly, and none runs code or allocates for its lie."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

import labkit
from labkit.models import LoadError
from tests.models.test_loading import llama_gguf

NORM = "model.norm.weight"


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def refusal(what: object, **options: object) -> str:
    with pytest.raises(LoadError) as caught:
        labkit.load(what, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["", " ", "x" * 5000, "a\0b", "../x", "\ud800", "~nobody/x", "モデル", "/dev/zero", None]
)
def test_names_that_are_no_models(name):
    message = refusal(name)
    assert "labkit knows tiny-hybrid" in message
    assert len(message) < 500


@pytest.mark.parametrize("name", ["Tiny-Hybrid", "TINY_HYBRID", "tiny-hybrid/", " tiny-hybrid"])
def test_near_misses_are_named(name):
    assert "did you mean tiny-hybrid" in refusal(name)


@pytest.mark.parametrize("dtype", ["float16", 3, mx.int32, mx.complex64, mx.bool_])
def test_only_floating_dtypes_are_taken(checkpoint, dtype):
    assert "dtype must be one of" in refusal(checkpoint, dtype=dtype)


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rms_norm_eps": float("nan")}, "NaN"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 10**10}, "10000000000"),
        ({"vocab_size": 10**12}, "1000000000000"),
        ({"num_hidden_layers": 2**31}, "2147483648 layers"),
        ({"num_attention_heads": 0}, "zero"),
        ({"text_config": "x"}, "text_config"),
        ({"text_config": None}, "text_config"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"model_type": "../../x"}, "../../x"),
        ({"model_type": "cache"}, "cache"),
    ],
)
def test_configs_with_wrong_values(folder, change, word):
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    assert word in refusal(folder)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"null", b"[]", b"", b"\xff\xfe{"])
def test_configs_that_are_no_objects(folder, raw):
    (folder / "config.json").write_bytes(raw)
    assert "config.json" in refusal(folder)


# -- safetensors -------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict], dict | bytes]) -> None:
    """Change the header of the folder's weights; the data stay."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]))
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [64]},
        {"shape": [-32]},
        {"shape": ["32"]},
        {"shape": [32.0]},
        {"shape": [True]},
        {"shape": [2**62]},
        {"shape": []},
        {"shape": None},
        {"dtype": "F16"},
        {"dtype": "F8_E4M3"},
        {"data_offsets": [-4, 124]},
        {"data_offsets": [128, 0]},
        {"data_offsets": [0, 128]},
        {"data_offsets": [0.0, 128.0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 0]},
        {"data_offsets": [2**62, 2**62 + 128]},
    ],
    ids=str,
)
def test_headers_that_lie_about_a_tensor(folder, lie):
    rewrite(folder, lambda header: header | {NORM: header[NORM] | lie})
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "damaged header" in message or "cut short" in message


@pytest.mark.parametrize("header", [b"[]", b"null", b"[" * 200_000, {}, {NORM: None}, {NORM: [1]}], ids=repr)
def test_headers_that_list_no_tensors(folder, header):
    rewrite(folder, lambda _: header)
    refusal(folder)


def test_what_is_missing_or_too_much_is_named(folder):
    rewrite(folder, lambda header: {name: entry for name, entry in header.items() if name != NORM})
    assert NORM in refusal(folder)


@pytest.mark.parametrize("stand_in", ["folder", "dangling link", "pipe"])
def test_weights_that_are_no_file(folder, stand_in):
    path = folder / "model.safetensors"
    path.unlink()
    {"folder": path.mkdir, "dangling link": lambda: path.symlink_to("gone"), "pipe": lambda: os.mkfifo(path)}[
        stand_in
    ]()
    assert "is no file" in refusal(folder)


def test_a_link_to_the_weights_is_as_good_as_the_weights(folder):
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to("blob")
    assert labkit.load(folder).weights_bytes > 0


@pytest.mark.parametrize("index", [b"[]", b"3", b'{"weight_map": [1]}', b'{"weight_map": {"a": "../x"}}', b"\xff"])
def test_a_broken_index_of_shards(folder, index):
    (folder / "model.safetensors.index.json").write_bytes(index)
    refusal(folder)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(folder, monkeypatch):
    def asked(*_):
        raise AssertionError("transformers asked whether to run the code")

    monkeypatch.setattr("builtins.input", asked)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    (folder / "own.py").write_text("raise SystemExit('was run')")
    assert "custom code" in refusal(folder)


def test_another_models_tokenizer(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"token{i}": 1000 + i for i in range(500)}
    path.write_text(json.dumps(content))
    assert "756 tokens and the model 288" in refusal(folder)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'])
def test_tokenizers_that_cannot_be_read(folder, raw):
    (folder / "tokenizer.json").write_bytes(raw)
    assert "tokenizer" in refusal(folder)


def test_only_the_remark_on_rotary_keys_is_kept_from_the_reader(folder, caplog):
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 9999}))
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        labkit.load(folder)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "rope_parameters" not in caplog.text
    assert "eos_token_id" in caplog.text, "transformers' other warnings must pass"


# -- GGUF --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": "4"},
        {"llama.embedding_length": 64.0},
        {"llama.block_count": 2**31 - 1},
        {"llama.block_count": 0},
        {"llama.context_length": "x"},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.expert_count": "x"},
        {"general.architecture": 3},
        {"general.alignment": 0},
        {"general.alignment": 7},
        {"general.alignment": "x"},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.tokens": "abc"},
        {"tokenizer.ggml.tokens": ["a"]},
        {"tokenizer.ggml.scores": [1.0]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.eos_token_id": 99999},
        {"tokenizer.ggml.eos_token_id": "x"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]},
    ],
    ids=str,
)
def test_ggufs_with_wrong_values_leave_no_folder_behind(tmp_path, monkeypatch, change):
    monkeypatch.setenv("LABKIT_CACHE_DIR", str(tmp_path / "cache"))
    refusal(llama_gguf(tmp_path / "bad.gguf", "Q4_0", **change))
    assert not [*(tmp_path / "cache").rglob("*.*")]


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", 8, 2**60),
        struct.pack("<IQ", 0, 2**62),
        struct.pack("<IQ", 9, 1) * 5000,
        struct.pack("<IQ", 77, 1),
    ],
    ids=["strings", "bytes", "nested", "unknown kind"],
)
def test_gguf_arrays_that_are_longer_than_the_file(tmp_path, value):
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "a.gguf").write_bytes(header + value + bytes(100))
    assert "damaged" in refusal(tmp_path / "a.gguf")
