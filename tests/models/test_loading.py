"""`load`: what it takes, and that everything else is refused in words before any weight is read."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import labkit
from labkit.models import LoadError, files, gguf_convert, zoo
from labkit.models.gguf import read_gguf_header
from tests.models.gguf_writer import codes_and_scales, packed, quantised, write
from tests.settled import falls_to
from tests.tiny_models import write_checkpoint


@pytest.fixture
def damaged(checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.mark.parametrize("name", ["llama", "llama-untied", "sliding", "hybrid", "hybrid-moe", "mamba"])
def test_a_folder_in_mlx_lms_format(name, tmp_path):
    folder = write_checkpoint(tmp_path / name, name)
    loaded = labkit.load(folder, graph="adapter")
    assert loaded.path == folder
    assert loaded.model.vocab_size == 288
    assert loaded.tokenizer.eos_token_ids == {258}
    assert loaded.weights_bytes == sum(t.nbytes for t in files.read_header(folder / "model.safetensors"))
    assert len(loaded.fingerprint) == 64
    assert loaded.fingerprint == labkit.load(str(folder)).fingerprint


def test_the_fingerprint_changes_with_one_weight(damaged):
    before = labkit.load(damaged).fingerprint
    weights = mx.load(str(damaged / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    mx.save_safetensors(str(damaged / "model.safetensors"), weights)
    assert labkit.load(damaged).fingerprint != before


def test_dtypes(damaged):
    weights = {k: v.astype(mx.bfloat16) for k, v in mx.load(str(damaged / "model.safetensors")).items()}
    mx.save_safetensors(str(damaged / "model.safetensors"), weights)
    on_cpu = mx.default_device() == mx.cpu
    assert labkit.load(damaged).model.dtype == (mx.float32 if on_cpu else mx.bfloat16)
    assert labkit.load(damaged, dtype=mx.float16).model.dtype == mx.float16


def refused(what: str | Path, *words: str) -> None:
    before = mx.get_active_memory()
    with pytest.raises(LoadError) as caught:
        labkit.load(what)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert falls_to(before + 4096), "no weight may be allocated (they are some 100 kB)"


def test_unknown_names():
    refused("tiny-hybird", "did you mean tiny-hybrid", "smollm2-135m")
    refused("no such model", "labkit knows")
    refused("/nowhere/at/all", "no model")


def test_a_hub_id_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("some-owner/some-model", "some-owner/some-model", "Name or service not known", "local folder")


def test_a_hub_id_with_a_network(monkeypatch, checkpoint):
    import huggingface_hub

    asked = {}

    def fetched(name, allow_patterns):
        asked[name] = allow_patterns
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert labkit.load("some-owner/some-model").path == checkpoint
    assert "*.py" not in asked["some-owner/some-model"]


def test_an_empty_or_foreign_folder(tmp_path, damaged):
    refused(tmp_path, "config.json")
    (damaged / "config.json").write_text("{not json")
    refused(damaged, "config.json", "cannot be read")
    (damaged / "config.json").write_text('{"a": 1}')
    refused(damaged, "model_type")
    (damaged / "config.json").write_text('{"model_type": "resnet50"}')
    refused(damaged, "resnet50")
    (damaged / "config.json").write_text('{"model_type": "llama", "model_file": "own.py"}')
    refused(damaged, "own.py", "code")


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    refused(path, "is a file")


def test_no_weights_or_only_pickles(damaged):
    (damaged / "model.safetensors").rename(damaged / "weights.safetensors")
    refused(damaged, "weights.safetensors", "model*.safetensors")
    (damaged / "weights.safetensors").unlink()
    refused(damaged, "no weights")
    (damaged / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    refused(damaged, "pickle", "pytorch_model.bin", "safetensors")


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_weights_that_are_cut_short(damaged, keep):
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(damaged, "cut short" if keep != 40 else "model.safetensors")


def test_a_damaged_header(damaged):
    path = damaged / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    refused(damaged, "damaged header")


def test_missing_shards(damaged):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(damaged, "lacks 1 of 2", "model-00001-of-00002.safetensors")


def test_weights_of_another_shape(damaged):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(damaged, "do not fit together")


def test_no_tokenizer_or_a_broken_one(damaged):
    (damaged / "tokenizer.json").write_text("{}")
    refused(damaged, "tokenizer")
    (damaged / "tokenizer.json").unlink()
    refused(damaged, "no tokenizer")


def test_weights_that_do_not_fit(checkpoint, monkeypatch):
    monkeypatch.setattr(files, "memory_limit", lambda: 1000)
    refused(checkpoint, "GiB", "smaller")


def test_sizes_after_a_cast_are_what_is_checked():
    headers = [files.TensorHeader("a", "BF16", (10,), 20), files.TensorHeader("b", "U32", (3,), 12)]
    assert files.bytes_in_memory(headers, None) == 32
    assert files.bytes_in_memory(headers, 4) == 52


# -- GGUF --------------------------------------------------------------------------------------------------------------

WORDS = [chr(c) for c in range(33, 127)]


def llama_gguf(path: Path, kind: str, **changes) -> Path:
    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁", *WORDS, "▁a", "ab", "▁ab"]
    vocabulary = len(tokens)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(vocabulary)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (vocabulary - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes
    shapes = {
        "token_embd": (vocabulary, 64),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (64, 64),
        "blk.0.ffn_up": (64, 64),
        "blk.0.ffn_down": (64, 64),
    }
    tensors = {f"{name}.weight": (kind, rng.normal(size=shape)) for name, shape in shapes.items()}
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    tensors |= {f"{name}.weight": ("F32", np.ones(64)) for name in norms}
    return write(path, metadata, tensors)


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LABKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_a_llama_gguf_keeps_its_bits(kind, tmp_path, caches):
    path = llama_gguf(tmp_path / "tiny.gguf", kind)
    loaded = labkit.load(path)
    logits = loaded.model(mx.array([[5, 6, 7]]), loaded.model.make_caches(), labkit.models.Rows.single()).logits
    assert mx.isfinite(logits).all()
    weights = mx.load(str(loaded.path / "model.safetensors"))
    values = np.random.default_rng(0).normal(size=(loaded.model.vocab_size, 64))
    stored = weights["model.embed_tokens.weight"]
    if kind == "F16":
        assert np.array_equal(np.array(stored), values.astype(np.float16))
        return
    raw = np.frombuffer(quantised(kind, values), np.uint8)
    codes, scales, biases = codes_and_scales(kind, raw, 64)
    assert np.array_equal(np.array(stored), packed(codes, 8 if kind == "Q8_0" else 4))
    assert np.array_equal(np.array(weights["model.embed_tokens.scales"]), scales)
    assert np.array_equal(np.array(weights["model.embed_tokens.biases"]), biases)


def test_a_sentencepiece_tokenizer_from_a_gguf(tmp_path, caches):
    tokenizer = labkit.load(llama_gguf(tmp_path / "tiny.gguf", "Q8_0")).tokenizer
    tokens = tokenizer.encode("ab a", add_special_tokens=False)
    assert tokenizer.hf.convert_ids_to_tokens(tokens) == ["▁ab", "▁a"]
    for text in ("ab a", "déjà vu 🙂 x"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokens) == text
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.add(token) for token in tokens]
        assert "".join(pieces) + detokenizer.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_ggufs_that_are_refused(tmp_path, caches):
    refused(llama_gguf(tmp_path / "k.gguf", "Q4_K"), "Q4_K", "Q4_0, Q4_1, Q8_0")
    refused(llama_gguf(tmp_path / "g.gguf", "Q4_0", **{"general.architecture": "gemma3"}), "gemma3")
    refused(llama_gguf(tmp_path / "m.gguf", "Q4_0", **{"llama.expert_count": 8}), "experts")
    refused(llama_gguf(tmp_path / "r.gguf", "Q4_0", **{"llama.rope.scaling.type": "yarn"}), "yarn")
    refused(llama_gguf(tmp_path / "t.gguf", "Q4_0", **{"tokenizer.ggml.model": "t5"}), "t5")
    whole = llama_gguf(tmp_path / "w.gguf", "Q4_0").read_bytes()
    for keep in (3, 30, 400, len(whole) - 64):
        cut = tmp_path / f"cut{keep}.gguf"
        cut.write_bytes(whole[:keep])
        refused(cut, "gguf")
    assert not [entry for entry in (caches / "models").iterdir() if not entry.name.startswith(".")]


def test_a_gguf_that_does_not_fit_is_refused_before_it_is_converted(tmp_path, caches, monkeypatch):
    path = llama_gguf(tmp_path / "a.gguf", "Q4_0")
    monkeypatch.setattr(files, "memory_limit", lambda: 1000)
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("weights were read"))
    refused(path, "GiB", "smaller")
    assert not [entry for entry in (caches / "models").iterdir() if not entry.name.startswith(".")]


def test_header_and_file_agree(tmp_path):
    header = read_gguf_header(llama_gguf(tmp_path / "a.gguf", "Q4_1"))
    assert header.metadata["llama.block_count"] == 1
    assert {tensor.type for tensor in header.tensors} == {"Q4_1", "F32"}
    assert header.tensors[0].shape == (len(header.metadata["tokenizer.ggml.tokens"]), 64)


def test_a_changed_gguf_is_converted_again(tmp_path, caches):
    first = labkit.load(llama_gguf(tmp_path / "a.gguf", "Q4_0")).path
    second = labkit.load(llama_gguf(tmp_path / "a.gguf", "Q8_0")).path
    assert first != second


def _convert(path: str, queue: multiprocessing.Queue) -> None:
    queue.put(str(zoo.converted(Path(path), "both")))


def test_two_processes_may_convert_at_once(tmp_path, caches):
    path = llama_gguf(tmp_path / "a.gguf", "Q4_0")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_convert, args=(str(path), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {queue.get(timeout=600) for _ in processes}
    for process in processes:
        process.join()
    assert len(folders) == 1
    assert [entry.name for entry in (caches / "models").iterdir()] == [Path(folders.pop()).name]


def test_a_conversion_that_loses_the_race_takes_the_winners_folder(tmp_path, caches, monkeypatch):
    path = llama_gguf(tmp_path / "a.gguf", "Q4_0")
    target = caches / "models" / f"x-v{zoo._CONVERTER}"
    convert = gguf_convert.convert

    def overtaken(source: Path, folder: Path) -> None:
        convert(source, folder)
        shutil.copytree(folder, target)

    monkeypatch.setattr(gguf_convert, "convert", overtaken)
    assert zoo.converted(path, "x") == target
    assert list((caches / "models").iterdir()) == [target]


def test_a_conversion_that_fails_leaves_nothing(tmp_path, caches, monkeypatch):
    def fails(source: Path, folder: Path) -> None:
        (folder / "half").write_text("written")
        raise OSError("disk full")

    monkeypatch.setattr(gguf_convert, "convert", fails)
    with pytest.raises(OSError, match="disk full"):
        zoo.converted(llama_gguf(tmp_path / "a.gguf", "Q4_0"), "x")
    assert not list((caches / "models").iterdir())
