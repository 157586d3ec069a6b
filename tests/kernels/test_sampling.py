"""Drawing beyond its gates: generator, distribution, mlx-lm's filters, ties, bad logits, independence of the batch."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels import sampling
from labkit.kernels.sampling import reference

TARGETS = ("simulator", "reference")


def draw(logits, target, **options) -> list[int]:
    options = {"temperature": 1.0, "seed": 0, "step": 0} | options
    return sampling.sample(mx.array(logits), target=target, **options)[0].tolist()


def critical_chi_square(degrees: int) -> float:
    """The value that chance exceeds once in a million (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.753 * spread**0.5) ** 3


def test_philox_is_random123s():
    """Its known answers, for key and counter all zeros and all ones but for our two zero counter words."""
    zero = reference.philox(mx.array([0]), mx.array([0]), mx.array([0], dtype=mx.uint64))
    assert [word.item() for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_philox_is_the_papers(counter0, counter1, seed):
    """Against the round function of the paper in Python's unbounded integers."""
    a, b, c, d = counter0, counter1, 0, 0
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (p1 >> 32) ^ b ^ key0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ d ^ key1, p0 & 0xFFFFFFFF
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    words = [np.array([counter0], np.uint32), np.array([counter1], np.uint32), np.array([seed], np.uint64)]
    got = reference.philox(*map(mx.array, words))
    assert [word.item() for word in got] == [a, b, c, d]


def test_gumbel_keeps_the_tail():
    """Against float64, over all magnitudes of the 32 bits that decide rare tokens."""
    bits = np.unique(np.concatenate([[0, 1, 2, 2**32 - 1], 2 ** np.arange(32, dtype=np.uint64) + 1])).astype(np.uint32)
    t = np.minimum((bits.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-25)
    want = -np.log(-np.log1p(-t))
    got = np.array(reference.gumbel(mx.array(bits)))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_distribution(options):
    """Chi-square over 20,000 seeds of a 12-token row, against what the filters and the temperature leave."""
    rows, logits = 20_000, np.array([1.2, 0.3, -0.5, 2.0, 0.1, -2.0, 1.0, 0.9, -1.0, 0.0, 1.5, -0.2], np.float32)
    token, _ = sampling.sample(
        mx.broadcast_to(mx.array(logits), (rows, 12)),
        **{"temperature": 1.0, "seed": mx.arange(rows), "step": 7} | options,
        target="reference",
    )
    seen = np.bincount(np.array(token), minlength=12)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p)
    keep = np.zeros(12, bool)
    above = 0.0
    for rank, i in enumerate(order):
        keep[i] = (
            rank < options.get("top_k", 12)
            and above < options.get("top_p", 2.0)
            and p[i] >= options.get("min_p", 0.0) * p.max()
        )
        above += p[i]
    want = np.where(keep, p ** (1 / options.get("temperature", 1.0)), 0)
    want *= rows / want.sum()
    assert seen[~keep].sum() == 0
    chi_square = ((seen - want)[keep] ** 2 / want[keep]).sum()
    assert chi_square < critical_chi_square(keep.sum() - 1)


def test_distribution_of_the_simulated_kernel():
    """The same of the kernel's own text, over steps instead of seeds, across a chunk's border."""
    rows, vocabulary = 400, 1200
    logits = np.full(vocabulary, -np.inf, np.float32)
    logits[[3, 700, 1023, 1024, 1199]] = np.log([0.1, 0.2, 0.3, 0.25, 0.15])
    token, logprob = sampling.sample(
        mx.broadcast_to(mx.array(logits), (rows, vocabulary)),
        temperature=1.0,
        seed=99,
        step=mx.arange(rows),
        target="simulator",
    )
    seen = np.bincount(np.array(token), minlength=vocabulary)
    p = np.exp(logits)
    assert seen.sum() == seen[p > 0].sum()
    assert ((seen - rows * p)[p > 0] ** 2 / (rows * p[p > 0])).sum() < critical_chi_square(4)
    np.testing.assert_allclose(np.array(logprob), logits[np.array(token)], atol=1e-5)


def test_neighbouring_seeds_steps_and_tokens_are_independent():
    """Correlation of the noise along each coordinate within 5 sigma of none."""
    seeds = mx.arange(64, dtype=mx.uint64)
    by_seed = np.array(reference.gumbel(reference.noise(seeds, mx.zeros((64,), mx.uint32), 1024)), np.float64)
    by_step = np.array(reference.gumbel(reference.noise(mx.zeros((64,), mx.uint64), mx.arange(64), 1024)), np.float64)
    for noise in (by_seed, by_step, by_seed.T, by_step.T):
        centred = noise - noise.mean()
        correlation = (centred[1:] * centred[:-1]).mean() / centred.var()
        assert abs(correlation) < 5 / centred[1:].size ** 0.5
    assert not np.array_equal(by_seed[1:], by_step[1:])
    assert by_seed[0].tolist() == by_step[0].tolist()


@pytest.mark.parametrize("target", TARGETS)
def test_a_draw_depends_on_seed_and_step_alone(target):
    """The same row alone, among neighbours, and in another place of the batch."""
    logits = mx.random.normal((3, 1500))
    options = {"top_k": 50, "top_p": 0.9}
    together = draw(logits, target, seed=[5, 6, 7], step=[1, 2, 3], **options)
    turned = draw(logits[::-1], target, seed=[7, 6, 5], step=[3, 2, 1], **options)
    alone = [draw(logits[i : i + 1], target, seed=5 + i, step=1 + i, **options)[0] for i in range(3)]
    assert together == alone == turned[::-1]
    others = {draw(logits[:1], target, seed=5, step=step, temperature=2.0)[0] for step in range(12)}
    assert len(others) > 6, "another step draws anew"


@pytest.mark.parametrize(("name", "value"), [("top_k", 9), ("top_p", 0.7), ("min_p", 0.2)])
def test_filters_keep_what_mlx_lm_keeps(name, value):
    from mlx_lm import sample_utils

    logits = mx.random.normal((6, 300)) * 2
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    want = getattr(sample_utils, f"apply_{name}")(logprobs, value) != -mx.inf
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {name: value}
    assert mx.array_equal(reference.above_floor(logits, mx.full((6,), value)), want) == (name == "min_p")
    kept = reference.kept(logits, *(mx.full((6,), options[key]) for key in ("top_k", "top_p", "min_p")))
    assert mx.array_equal(kept, want)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 5, 40, 150]),
    st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.sampled_from([0.2, 1.0, 4.0]),
)
def test_kernel_draws_what_the_sorted_reference_draws(seed, top_k, top_p, min_p, temperature, spread):
    """Coarse logits, so that ties stand at every filter's bound; two chunks and a tail."""
    rng = np.random.default_rng(seed)
    logits = mx.array(np.round(rng.normal(0, spread, (2, 150)) * 4) / 4, dtype=mx.float32)
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature, "seed": seed, "step": 1}
    assert draw(logits, "simulator", **options) == draw(logits, "reference", **options)


@pytest.mark.parametrize("target", TARGETS)
def test_ties_go_to_the_lower_token(target):
    logits = np.zeros((1, 300), np.float32)
    assert draw(logits, target, temperature=0.0) == [0]
    assert draw(logits, target, top_k=1, seed=3) == [0]
    assert {draw(logits, target, top_k=2, seed=s)[0] for s in range(12)} == {0, 1}
    # top-p cannot part equals, as in mlx-lm.
    assert max(draw(logits, target, top_p=0.01, seed=s)[0] for s in range(6)) > 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-5, 1.0])
def test_bad_logits(target, temperature):
    """NaN is never drawn; rows without a number give token 0 and -inf, not NaN and not an index outside."""
    rows = np.full((5, 130), -np.inf, np.float32)
    rows[0] = np.nan
    rows[2, [7, 9]] = np.nan, -1e38
    rows[3, [5, 6]] = np.inf, 3.0
    rows[4, [1, 128]] = -3e38, -3.1e38
    tokens, logprobs = sampling.sample(
        mx.array(rows), temperature=temperature, seed=1, step=2, top_k=3, top_p=0.9, min_p=0.1, target=target
    )
    assert tokens.tolist() == [0, 0, 9, 5, 1]
    assert not np.isnan(np.array(logprobs)).any()
    assert np.array(logprobs)[2:].tolist() == [0, 0, 0]
    assert np.array(logprobs)[:2].tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize("target", TARGETS)
def test_mask_permits(target):
    """Only permitted tokens are drawn; filters and log-probabilities see the masked row; one row permits nothing."""
    logits = mx.random.normal((2, 1100))
    allowed = [3, 31, 32, 1055, 1099]
    words = np.zeros((2, 35), np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << (token % 32))
    drawn = set()
    for seed in range(16):
        tokens, logprobs = sampling.sample(
            logits, temperature=3.0, seed=seed, step=0, top_k=4, mask=mx.array(words), target=target
        )
        drawn.add(tokens[0].item())
        assert tokens[1].item() == 0
        assert logprobs[1].item() == -np.inf
    values = np.array(logits)[0, allowed]
    assert drawn <= {allowed[i] for i in np.argsort(-values)[:4]}
    assert len(drawn) > 1
    expected = values - np.log(np.exp(values).sum())
    assert abs(logprobs[0].item() - expected[allowed.index(tokens[0].item())]) < 1e-5


@pytest.mark.parametrize("target", TARGETS)
def test_greedy_is_argmax(target):
    logits = mx.random.normal((4, 700)).astype(mx.bfloat16)
    assert draw(logits, target, temperature=0.0, top_k=5, top_p=0.1) == sampling.argmax(logits, target=target).tolist()


def test_a_step_can_be_compiled():
    """Nothing in the operation reads an array on the host."""

    def step(logits, seed, step):
        return sampling.sample(logits, temperature=0.9, seed=seed, step=step, top_p=mx.array([0.8]))

    # Traced, and not evaluated: on a CPU that has a C++ compiler at work for half a minute.
    tokens, _ = mx.compile(step)(mx.random.normal((1, 200)), mx.array([3], dtype=mx.uint64), mx.array([0]))
    assert tokens.shape == (1,)


def test_every_step_of_a_generation_is_on_the_device():
    """Rows' parameters may be arrays, and a token array feeds on without being read."""
    tokens, _ = sampling.sample(
        mx.random.normal((2, 64)),
        temperature=mx.array([0.5, 1.0]),
        seed=[1, 2**63 + 5],
        step=mx.array([4, 4]),
        top_k=mx.array([3, 0]),
    )
    assert tokens.shape == (2,)
    assert tokens.dtype == mx.uint32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": mx.zeros((4,))}, r"\[B, V\].*\(4,\)"),
        ({"temperature": [1.0, 2.0, 3.0]}, r"temperature needs one value, or one for each of 2 rows, not shape \(3,\)"),
        ({"seed": [1, -1]}, r"seed must fit in .*uint64, not \[1, -1\]"),
        ({"mask": mx.zeros((2, 1), mx.uint32)}, r"mask needs shape \(2, 2\)"),
        ({"mask": mx.zeros((2, 2), mx.int32)}, "uint32"),
    ],
)
def test_bad_arguments_are_named(change, message):
    options = {"logits": mx.zeros((2, 40)), "temperature": 1.0, "seed": 0, "step": 0} | change
    with pytest.raises(ValueError, match=message):
        sampling.sample(options.pop("logits"), **options)
