"""mlx-lm's generation as a live oracle: the same tokens for the same prompt and options."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step

import labkit
from labkit.engine import sampling
from labkit.engine.sampling import RowSampler, choose, draw

PROMPTS = {"one token": "x", "short": "The sea is", "three chunks": "All happy families are alike. " * 2}


def oracle(module, prompt, count, chunk, **options):
    processors = sample_utils.make_logits_processors(**options)
    steps = generate_step(
        mx.array(prompt), module, max_tokens=count, prefill_step_size=chunk, logits_processors=processors or None
    )
    return [int(token) for token, _ in islice(steps, count)]


@pytest.mark.parametrize("name", ["llama", "llama-untied", "sliding", "hybrid", "hybrid-moe", "capped", "mamba"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_mlx_lms(loaded, name, prompt):
    model = loaded(name, graph="adapter")
    tokens = model.tokenizer.encode(PROMPTS[prompt])
    engine = labkit.Engine(model, prefill_chunk=24)
    ours = engine.generate(tokens, max_tokens=20, ignore_eos=True).tokens
    assert list(ours) == oracle(model.model.module, tokens, 20, 24)


PENALTIES = {
    "bias": {"logit_bias": {5: 4.0, 9: -50.0}},
    "repetition": {"repetition_penalty": 1.4, "repetition_context_size": 4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9, "frequency_context_size": 7},
    "all": {"logit_bias": {5: 2.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_penalties_are_mlx_lms(loaded, options):
    model = loaded("llama")
    tokens = model.tokenizer.encode("abcabcabc")
    ours = labkit.Engine(model).generate(tokens, max_tokens=24, ignore_eos=True, **options).tokens
    assert list(ours) == oracle(model.model.module, tokens, 24, 2048, **options)


def filtered(monkeypatch, **options) -> mx.array:
    """The log-probabilities from which our sampler draws, caught at the draw."""
    caught = []
    monkeypatch.setattr(sampling, "draw", lambda scores, *_: caught.append(scores) or mx.argmax(scores, axis=-1))
    params = labkit.SamplingParams(**options)
    RowSampler(params, 1, xtc_special_tokens=[3])(LOGITS, mx.array([0]), 0)
    return caught[0]


LOGITS = mx.random.normal((1, 64), key=mx.random.key(4)) * 3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "min_p": 0.5, "min_tokens_to_keep": 4},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "top_k": 6, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    ],
)
def test_filters_are_mlx_lms_in_its_order(monkeypatch, options):
    names = {"temperature": "temp"}
    theirs = []
    sampler = sample_utils.make_sampler(
        **{names.get(name, name): value for name, value in options.items()}, xtc_special_tokens=[3]
    )
    with monkeypatch.context() as patch:
        patch.setattr(sample_utils, "categorical_sampling", lambda x, t: theirs.append(x * (1.0 / t)) or mx.array([0]))
        sampler(LOGITS - mx.logsumexp(LOGITS, axis=-1, keepdims=True))
    ours = filtered(monkeypatch, **options)
    assert mx.array_equal(ours, theirs[0])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**60), step=st.integers(0, 10**6), batch=st.integers(1, 4), place=st.integers(0, 3))
def test_a_rows_draw_depends_on_its_seed_and_step_alone(seed, step, batch, place):
    place = min(place, batch - 1)
    params = labkit.SamplingParams(temperature=1.0, top_p=0.95)
    alone = choose(LOGITS, mx.array([0]), [RowSampler(params, seed)], [step], [None]).token.item()
    rows = [RowSampler(params, seed if i == place else i) for i in range(batch)]
    logits = mx.random.normal((batch, 64), key=mx.random.key(seed & 0xFFFF))
    logits[place] = LOGITS[0]
    steps = [step if i == place else i for i in range(batch)]
    together = choose(logits, mx.zeros((batch,), mx.int32), rows, steps, [None] * batch).token
    assert together[place].item() == alone


def test_rows_with_the_same_options_and_rows_with_others_choose_what_they_choose_alone():
    options = [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 9, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0.0},
        {"temperature": 1.2, "min_p": 0.02},
    ]
    logits = mx.random.normal((len(options), 64), key=mx.random.key(9)) * 3
    make = lambda: [RowSampler(labkit.SamplingParams(**o), 40 + i, [1, 2]) for i, o in enumerate(options)]
    fed = mx.array([5] * len(options))
    together = choose(logits, fed, make(), list(range(len(options))), [None] * len(options))
    for i, row in enumerate(make()):
        alone = choose(logits[i : i + 1], fed[i : i + 1], [row], [i], [None])
        assert together.token[i].item() == alone.token.item()
        assert together.total[i].item() == alone.total.item()
        assert (together.logprob[i] is None) == (alone.logprob[0] is None) == (i != 3)


def test_draws_follow_the_distribution():
    params = labkit.SamplingParams(temperature=1.0)
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    rows = [RowSampler(params, seed) for seed in range(1500)]
    many = mx.repeat(logits, len(rows), axis=0)
    drawn = choose(many, mx.zeros((len(rows),), mx.int32), rows, [0] * len(rows), [None] * len(rows)).token.tolist()
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(drawn.count(token) / len(rows) - share) < 0.05
    assert len({draw(mx.zeros((1, 1000)), [RowSampler(params, 7)], [step]).item() for step in range(50)}) > 40


def test_greedy_rows_together_equal_greedy_rows_alone_ties_included():
    logits = mx.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    rows = [RowSampler(labkit.SamplingParams(), 0) for _ in range(3)]
    scored = [RowSampler(labkit.SamplingParams(logprobs=0), 0) for _ in range(3)]
    fed = mx.zeros((3,), mx.int32)
    together = choose(logits, fed, rows, [0] * 3, [None] * 3).token.tolist()
    assert together == choose(logits, fed, scored, [0] * 3, [None] * 3).token.tolist() == [1, 0, 3]


def test_logprobs(loaded):
    model = loaded("llama")
    tokens = model.tokenizer.encode("hello")
    answer = labkit.Engine(model).generate(tokens, max_tokens=4, logprobs=3, ignore_eos=True)
    steps = generate_step(mx.array(tokens), model.model.module, max_tokens=4)
    for (ours, best), (token, theirs) in zip(answer.logprobs, steps, strict=True):
        assert ours == theirs[token].item()
        assert [value for _, value in best] == sorted((v for _, v in best), reverse=True)
        assert best[0][0] == int(token)
        assert [theirs[t].item() for t, _ in best] == [value for _, value in best]
    assert labkit.Engine(model).generate(tokens, max_tokens=2).logprobs is None
    assert labkit.Engine(model).generate(tokens, max_tokens=2, logprobs=0).logprobs[0][1] is None
