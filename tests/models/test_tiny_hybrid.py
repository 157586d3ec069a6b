"""The shipped model: its shape, its tokenizer and chat template, its quality on a slice of held-out text, in stock mlx-
lm.
"""

import json
import math
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "models" / "tiny-hybrid"
HELDOUT = ROOT / "data" / "heldout"
CONFIG = json.loads((FOLDER / "config.json").read_text())
MIB = 2**20


@pytest.fixture(scope="module")
def loaded():
    from mlx_lm import load

    with mx.stream(mx.cpu):
        model, tokenizer = load(str(FOLDER))
    floats = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p
    model.update(tree_map(floats, model.parameters()))
    return model, tokenizer


@pytest.fixture(scope="module")
def tensors():
    return mx.load(str(FOLDER / "model.safetensors"))


def unpacked_shape(name: str, tensors: dict) -> tuple[int, ...]:
    """Shape of a stored tensor before packing."""
    path = name.removesuffix(".weight")
    shape = tensors[name].shape
    if f"{path}.scales" in tensors:
        bits = CONFIG["quantization"].get(path, CONFIG["quantization"])["bits"]
        shape = (*shape[:-1], shape[-1] * 32 // bits)
    return tuple(shape)


def matrices(tensors: dict) -> dict[str, tuple[int, ...]]:
    stored = [name for name in tensors if not name.endswith((".scales", ".biases"))]
    return {name: unpacked_shape(name, tensors) for name in stored}


def test_folder_is_complete_and_small():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    needed = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "MODEL_CARD.md",
    }
    assert needed <= set(sizes)
    assert sizes["model.safetensors"] <= 19 * MIB
    assert sum(sizes.values()) <= 20 * MIB


def test_trunk_has_24_to_32_million_parameters(tensors):
    count = lambda head: sum(
        math.prod(shape) for name, shape in matrices(tensors).items() if name.startswith("mtp.") is head
    )
    assert 24e6 <= count(False) <= 32e6
    assert count(True) > 1e6


def test_architecture_is_the_real_one_in_small():
    assert CONFIG["model_type"] == "qwen3_5_moe"
    assert CONFIG["linear_key_head_dim"] == CONFIG["linear_value_head_dim"] == 128
    assert CONFIG["linear_num_value_heads"] == 2 * CONFIG["linear_num_key_heads"]
    assert CONFIG["linear_conv_kernel_dim"] == 4
    assert CONFIG["head_dim"] == 256
    assert CONFIG["num_attention_heads"] == 8 * CONFIG["num_key_value_heads"]
    assert CONFIG["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert (CONFIG["num_experts"], CONFIG["num_experts_per_tok"]) == (32, 4)
    assert CONFIG["num_hidden_layers"] == 8
    assert CONFIG["full_attention_interval"] == 4
    assert CONFIG["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2


def test_every_matrix_side_is_a_multiple_of_64(tensors):
    per_head = ("in_proj_a.weight", "in_proj_b.weight", "shared_expert_gate.weight", "mlp.gate.weight", "conv1d.weight")
    for name, shape in matrices(tensors).items():
        if len(shape) >= 2 and not name.endswith(per_head):
            assert all(side % 64 == 0 for side in shape[-2:]), (name, shape)
        if name.endswith(("mlp.gate.weight", "in_proj_a.weight", "in_proj_b.weight", "shared_expert_gate.weight")):
            assert shape[-1] % 64 == 0, (name, shape)


def test_quantisation_is_mlx_lms_own(tensors):
    settings = CONFIG["quantization"]
    assert (settings["group_size"], settings["bits"]) == (64, 4)
    eight = {path for path, value in settings.items() if isinstance(value, dict) and value["bits"] == 8}
    routers = {
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    }
    assert eight == routers
    assert len(routers) == 2 * (8 + 1)


def test_stock_mlx_lm_loads_the_trunk_and_leaves_the_head(loaded, tensors):
    model, _ = loaded
    names = {name for name, _ in tree_flatten(model.parameters())}
    assert names == {name for name in tensors if not name.startswith("mtp.")}
    for part in (
        "fc.weight",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
        "norm.weight",
        "layers.0.self_attn.q_proj.weight",
    ):
        assert f"mtp.{part}" in tensors


@pytest.mark.parametrize("path", sorted(HELDOUT.glob("*.txt")), ids=lambda path: path.stem)
def test_tokenizer_returns_every_held_out_text(path, loaded):
    _, tokenizer = loaded
    text = path.read_text()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(text.encode()) / len(ids) > 2.0


def test_any_bytes_survive_the_tokenizer(loaded):
    _, tokenizer = loaded
    text = "naïve Ωmega 漢字 🙂\t\x00 end\r\n  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_single_ids(loaded):
    _, tokenizer = loaded
    for token in (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ):
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in tokenizer.eos_token_ids
    assert CONFIG["vocab_size"] == 8192 == len(tokenizer.get_vocab())


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_chat_template_with_thinking_on_and_off(loaded):
    _, tokenizer = loaded
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render(tokenizer, messages) == head
    assert render(tokenizer, messages, enable_thinking=False) == head + "\n</think>\n\n"


def test_chat_template_forgets_the_thoughts_of_earlier_turns(loaded):
    _, tokenizer = loaded
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
        {"role": "user", "content": "Sure?"},
    ]
    text = render(tokenizer, messages, enable_thinking=False)
    assert "<|im_start|>assistant\n2<|im_end|>\n" in text
    assert "one and one" not in text


def test_chat_template_renders_tools_calls_and_answers(loaded):
    _, tokenizer = loaded
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": parameters}}
    ]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = render(tokenizer, messages, tools=tools, enable_thinking=False)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(tools[0], ensure_ascii=False)}\n</tools>" in text
    arguments = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    called = f"<tool_call>\n<function=get_weather>\n{arguments}</function>\n</tool_call><|im_end|>\n"
    assert called in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def bits_per_byte(model, tokenizer, text: str) -> float:
    ids = [CONFIG["pad_token_id"], *tokenizer.encode(text, add_special_tokens=False)]
    logits = model(mx.array([ids[:-1]]))[0]
    chosen = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    nats = (mx.logsumexp(logits, axis=-1) - chosen).sum().item()
    return nats / math.log(2) / len(text.encode())


@pytest.mark.parametrize(("name", "start", "bound"), [("mark_web", 2000, 1.5), ("sqlite_pages", 6000, 1.5)])
def test_held_out_bits_per_byte_on_a_slice(name, start, bound, loaded):
    model, tokenizer = loaded
    text = (HELDOUT / f"{name}.txt").read_text()[start : start + 1000]
    assert bits_per_byte(model, tokenizer, text) < bound


def greedy(model, ids: list[int], count: int) -> list[int]:
    cache, tokens, found = model.make_cache(), mx.array([ids]), []
    for _ in range(count):
        token = model(tokens, cache=cache)[0, -1].argmax().item()
        found.append(token)
        tokens = mx.array([[token]])
    return found


BEGINNINGS = [
    "Paul and Silas went through the city, and when they had come to",
    "The king of Israel said to his servants,",
    "The UNIQUE constraint is used to",
    "If the optional WHERE clause is omitted, then",
    "This module provides a class that",
]


def test_greedy_continuations_are_deterministic_english_and_mostly_not_degenerate(loaded):
    """A model of this size repeats itself behind some beginnings (its card shows one); it must not behind most."""
    model, tokenizer = loaded
    known = set(re.findall(r"[a-z]+", " ".join(path.read_text().lower() for path in HELDOUT.glob("*.txt"))))
    varied = 0
    for prompt in BEGINNINGS:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        first = greedy(model, ids, 30)
        assert first[:12] == greedy(model, ids, 12)
        words = re.findall(r"[a-z]+", tokenizer.decode(first).lower())
        assert len(words) >= 8, prompt
        if prompt in BEGINNINGS[:2]:  # the others' answers are of manuals, whose words the texts held out need not know
            assert sum(word in known for word in words) >= 0.8 * len(words), words
        varied += len(set(words)) >= 0.6 * len(words)
    assert varied >= 3


def test_a_chat_turn_ends(loaded):
    model, tokenizer = loaded
    prompt = render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}], enable_thinking=False)
    ids = greedy(model, tokenizer.encode(prompt, add_special_tokens=False), 40)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in ids
    assert "Paris" in tokenizer.decode(ids[: ids.index(end)])
