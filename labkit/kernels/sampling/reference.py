"""Choosing tokens in plain MLX ops: the oracles of the sampling kernels."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.signature import Launch

LARGEST = 3.402823466e38
COLDEST = 1e-6
"""Below this temperature nothing is drawn."""


def argmax(launch: Launch) -> list[mx.array]:
    """The index of each row's largest number; the first of equals, and 0 where there is no number."""
    logits = launch.inputs[0].astype(mx.float32)
    is_number = mx.logical_not(mx.isnan(logits))
    largest = mx.max(mx.where(is_number, logits, -mx.inf), axis=-1, keepdims=True)
    # mx.argmax of a boolean row is the first True, or 0 if there is none.
    return [mx.argmax(is_number & (logits == largest), axis=-1)]


def sample_chunks(launch: Launch) -> list[mx.array]:
    """Per chunk: the largest logit, sum of exp(logit - largest), best score, and its token (2^32 - 1 without any)."""
    logits, mask, temperature, seeds, steps, *_ = launch.inputs
    template = dict(launch.template)
    rows, vocabulary = logits.shape
    size = 4 * template["THREADS"]
    x = allowed_logits(logits, mask if template["MASKED"] else None)
    score = scores(x, temperature, seeds, steps)
    padding = ((0, 0), (0, -vocabulary % size))
    x, score = (mx.pad(array, padding, constant_values=-mx.inf).reshape(rows, -1, size) for array in (x, score))
    largest = x.max(axis=-1)
    total = mx.exp(x - mx.maximum(largest, -LARGEST)[..., None]).sum(axis=-1)
    best = score.max(axis=-1)
    token = mx.argmax(score, axis=-1) + size * mx.arange(x.shape[1])
    return [largest, total, best, mx.where(best == -mx.inf, 0xFFFFFFFF, token.astype(mx.int64)).astype(mx.uint32)]


def sample_rows(launch: Launch) -> list[mx.array]:
    """The draw of each row and its log-probability, by sorting. The chunks' results are not needed here."""
    logits, mask, temperature, top_k, top_p, min_p, seeds, steps = launch.inputs[:8]
    template = dict(launch.template)
    x = allowed_logits(logits, mask if template["MASKED"] else None)
    keep = kept(x, top_k, top_p, min_p) if template["FILTERED"] else above_floor(x, min_p)
    score = mx.where(keep, scores(x, temperature, seeds, steps), -mx.inf)
    token = mx.argmax(score, axis=-1, keepdims=True)
    largest = x.max(axis=-1, keepdims=True)
    nothing = largest[:, 0] == -mx.inf
    below = x - mx.maximum(largest, -LARGEST)
    total = mx.exp(below).sum(axis=-1, keepdims=True)
    logprob = mx.take_along_axis(below, token, axis=-1) - mx.log(total)
    return [mx.where(nothing, 0, token[:, 0]).astype(mx.uint32), mx.where(nothing, -mx.inf, logprob[:, 0])]


def allowed_logits(logits: mx.array, mask: mx.array | None) -> mx.array:
    """fp32 [B, V]: -inf where the mask's bit is clear and for NaN, the largest float for +inf."""
    x = logits.astype(mx.float32)
    if mask is not None:
        token = mx.arange(logits.shape[-1], dtype=mx.uint32)
        x = mx.where((mask[:, token // 32] >> (token % 32)) & 1, x, -mx.inf)
    x = mx.where(mx.isnan(x), -mx.inf, mx.minimum(x, LARGEST))
    return mx.where(x == 0, 0.0, x)  # one zero: sorting by bits would part two


def kept(x: mx.array, top_k: mx.array, top_p: mx.array, min_p: mx.array) -> mx.array:
    """bool [B, V]: tokens that pass all three filters, which look at the untempered distribution, as in mlx-lm."""
    vocabulary = x.shape[-1]
    by_mass, by_number = (top_p > 0) & (top_p < 1), (top_k > 0) & (top_k < vocabulary)
    # From the most likely token on, the lower one among equals: keys that no two tokens of a row share.
    bits = x.view(mx.uint32)
    ordered = mx.where(bits >> 31, ~bits, bits | 0x80000000).astype(mx.int64)
    keys = -((ordered << 20) | mx.arange(vocabulary - 1, -1, -1).astype(mx.int64))
    ranked_keys = mx.sort(keys, axis=-1)
    ordered = (-ranked_keys >> 20).astype(mx.uint32)
    ranked = mx.where(ordered >> 31, ordered & 0x7FFFFFFF, ~ordered).view(mx.float32)
    mass = mx.exp(ranked - mx.maximum(ranked[:, :1], -LARGEST))
    before = mx.cumsum(mass, axis=-1) - mass
    # Equal logits stand or fall together: what counts is the mass above the first of them.
    fresh = mx.concatenate([mx.ones((x.shape[0], 1), mx.bool_), ranked[:, 1:] != ranked[:, :-1]], axis=-1)
    above = mx.cummax(mx.where(fresh, before, 0), axis=-1)
    passing = ~by_mass[:, None] | (above < top_p[:, None] * mass.sum(axis=-1, keepdims=True))
    passing &= ~by_number[:, None] | (mx.arange(vocabulary) < top_k[:, None])
    last = mx.maximum(passing.sum(axis=-1, keepdims=True) - 1, 0)  # those that pass come first
    return above_floor(x, min_p) & (keys <= mx.take_along_axis(ranked_keys, last, axis=-1))


def above_floor(x: mx.array, min_p: mx.array) -> mx.array:
    """bool [B, V]: tokens that pass min-p."""
    drop = mx.where(min_p > 0, mx.log(mx.maximum(min_p, 1e-38)), -mx.inf)
    return x >= x.max(axis=-1, keepdims=True) + drop[:, None]


def scores(x: mx.array, temperature: mx.array, seeds: mx.array, steps: mx.array) -> mx.array:
    """Gumbel-max scores [B, V]: logits / temperature + noise of (seed, step, token); logits where nothing is drawn."""
    draws = (temperature >= COLDEST)[:, None]
    inverse = 1.0 / mx.where(draws, temperature[:, None], 1.0)
    noisy = mx.maximum(x * inverse + gumbel(noise(seeds, steps, x.shape[-1])), -LARGEST)
    return mx.where(draws & (x != -mx.inf), noisy, x)


def gumbel(bits: mx.array) -> mx.array:
    """-log(-log(1 - t)), t = (bits + 1/2) / 2^32, with the relative accuracy of small t kept."""
    t = (bits.astype(mx.float32) + 0.5) * 2.0**-32
    u = mx.maximum(1.0 - t, 2.0**-25)
    whole = u == 1.0
    return -mx.log(mx.where(whole, t, -mx.log(u) * (t / mx.where(whole, 1.0, 1.0 - u))))


def noise(seeds: mx.array, steps: mx.array, vocabulary: int) -> mx.array:
    """uint32 [B, V]: token 128 s + 32 j + l has word j of Philox at counter (32 s + l, step, 0, 0), key (seed)."""
    strips = -(-vocabulary // 128)
    words = philox(mx.arange(32 * strips, dtype=mx.uint32)[None], steps[:, None], seeds[:, None])
    by_token = mx.stack([word.reshape(-1, strips, 32) for word in words], axis=2)
    return by_token.reshape(seeds.shape[0], -1)[:, :vocabulary]


def philox(counter0: mx.array, counter1: mx.array, seed: mx.array) -> list[mx.array]:
    """Philox4x32-10 at counter (counter0, counter1, 0, 0) and the two halves of a 64-bit seed: four uint32 arrays."""
    a, b = (counter.astype(mx.uint32) for counter in mx.broadcast_arrays(counter0, counter1))
    c = d = mx.zeros_like(a)
    seed = seed.astype(mx.uint64)
    key0, key1 = (seed & 0xFFFFFFFF).astype(mx.uint32), (seed >> 32).astype(mx.uint32)
    for _ in range(10):
        first, second = a.astype(mx.uint64) * 0xD2511F53, c.astype(mx.uint64) * 0xCD9E8D57
        a, b = (second >> 32).astype(mx.uint32) ^ b ^ key0, second.astype(mx.uint32)
        c, d = (first >> 32).astype(mx.uint32) ^ d ^ key1, first.astype(mx.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return [a, b, c, d]
