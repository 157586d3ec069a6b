"""The whole model on an NVIDIA GPU, in bf16 and fp32, against mlx-lm's module in fp32 on the CPU, on equal weights.

    LABKIT_TEST_OUTCOMES=outcomes.jsonl python -m pytest -m cuda --maxfail=8 tests/models/hybrid/test_cuda.py

The first tests say whether the machine multiplies floats exactly and whether one model, built and read once, is right;
the rest compile more and more kernels. In one process: each compiles all kernels anew. The file has a line a test, with
all that was measured, whether it passed or not; a failure names the first position that is too far off.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from labkit.models import Rows
from labkit.models.hybrid import Hybrid
from tests.models.hybrid.small import DENSE, SWITCHES, TEXT, config, prompt, random_module, with_variants

pytestmark = pytest.mark.cuda

REAL_HEADS = {
    **TEXT,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
"""The head sizes of the real models, whose kernels use tensor cores, at a fraction of their width."""

DENSE_HEADS = {**REAL_HEADS, "num_experts": 0, "num_experts_per_tok": 0}
SHAPES = {"real-heads": REAL_HEADS, "dense-heads": DENSE_HEADS, "small": TEXT, "dense": DENSE}
TOLERANCE = 5e-3
"""In fp32, at every position, of logits whose standard deviation is 1.7."""
MEDIAN = {False: 0.3, True: 0.7}
"""In bf16, of the positions of a dense and of a sparse model. mlx-lm's own bf16 on a CPU: 0.11 at most, with dense
weights that are not quantised, and 0.31. A wrong computation is several off at every position."""
FAR, FEW = 0.8, 1 / 16
"""In bf16 a dense model may have this share of positions that far off: random weights magnify some roundings, and
mlx-lm's own bf16 has two of 64 positions at 0.87 for one prompt of six. In a sparse one they are no sign of anything,
since random routers hold many near ties, and another expert is another function."""
DTYPES = pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=["bf16", "fp32"])
WIDTHS = {4: [20, 1, 1, 9, 1, 3, 8, 5, 1, 1, 14], 8: [30, 1, 3, 30], None: [30, 1, 3, 30]}
"""Of the forwards that read 64 tokens, by bits of the weights: each number up to 8 compiles its own kernels."""


@dataclass
class Pair:
    """The specialised graph on the GPU, and mlx-lm's module in fp32 for the CPU."""

    hybrid: Hybrid
    reference: Any
    dtype: mx.Dtype
    sparse: bool

    def expected(self, tokens: mx.array) -> mx.array:
        """The reference's logits of whole rows [B, L]."""
        return on_cpu(lambda: self.reference(tokens))


@cache
def pair(shape: str, dtype: mx.Dtype, bits: int | None = 4) -> Pair:
    from labkit.parity.sides import cast_floating

    settings = config(SHAPES[shape])
    module, reference = (on_cpu(lambda: random_module(settings, bits=bits)) for _ in range(2))
    cast_floating(module, dtype)
    cast_floating(reference, dtype)
    cast_floating(reference, mx.float32)
    mx.eval(module.parameters(), reference.parameters())
    sparse = settings["text_config"]["num_experts"] > 0
    return Pair(Hybrid.from_module(module, settings, dtype), reference, dtype, sparse)


def on_cpu(compute):
    """On the CPU, operation by operation: fused ones would need a C++ compiler there."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    try:
        result = compute()
        if isinstance(result, mx.array):
            mx.eval(result)
        return result
    finally:
        mx.enable_compile()
        mx.set_default_device(device)


_recorded: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def recorded(record_property):
    """What `close` finds goes into the record of outcomes."""
    _recorded.clear()
    record_property("measured", _recorded)


def close(both: Pair, ours: mx.array, wanted: mx.array, what: str) -> None:
    """In fp32 every position is within the tolerance; in bf16 the median is, and of a dense model nearly all are."""
    ours = on_cpu(lambda: ours.astype(mx.float32))
    far = on_cpu(lambda: mx.abs(ours - wanted).max(axis=-1)).reshape(-1).tolist()
    median = sorted(far)[len(far) // 2]
    _recorded[what] = {"largest": float(f"{max(far):.3g}"), "median": float(f"{median:.3g}")}
    found = f"{what}: largest difference {max(far):.3g}, median {median:.3g} of {len(far)} positions"
    assert all(map(math.isfinite, far)), found
    exact = both.dtype == mx.float32
    bound = TOLERANCE if exact else FAR
    bad = [index for index, value in enumerate(far) if value > bound]
    allowed = 0 if exact else int(FEW * len(far))
    if exact or not both.sparse:
        assert len(bad) <= allowed, f"{found}; {len(bad)} beyond {bound}, first {bad[0]} with {far[bad[0]]:.3g}"
    if not exact and len(far) >= 16:
        assert median <= MEDIAN[both.sparse], found
    assert exact or not both.sparse or len(far) >= 16, "too few positions for a median"


def run(model: Hybrid, tokens: mx.array, widths: list[int]) -> mx.array:
    """Logits of every position of a row [1, sum of widths], in forwards of these widths."""
    caches, position, parts = model.make_caches(), 0, []
    for width in widths:
        out = model(tokens[:, position : position + width], caches, Rows.single(position), logits="all").logits
        mx.eval(out)
        parts.append(out)
        position += width
    return mx.concatenate(parts, axis=1)


def _weights(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(7)) / shape[-1] ** 0.5


def _product(x: mx.array, n: int) -> mx.array:
    return x @ _weights(n, 256).T


def _quantised(x: mx.array, n: int, bits: int) -> mx.array:
    packed = mx.quantize(_weights(n, 256), group_size=64, bits=bits)
    return mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=bits)


def _gathered(x: mx.array, sort: bool) -> mx.array:
    experts, rows = _weights(16, 128, 256).swapaxes(-1, -2), mx.expand_dims(x, 1)
    chosen = mx.arange(x.shape[0]) * 16 // x.shape[0] if sort else mx.arange(x.shape[0]) % 16
    return mx.gather_mm(rows, experts, rhs_indices=chosen.astype(mx.uint32), sorted_indices=sort)


def _attention(x: mx.array) -> mx.array:
    q = x.reshape(1, -1, 8, 256).swapaxes(1, 2)
    k = v = q[:, :1]
    sees = mx.tril(mx.ones((q.shape[2], q.shape[2]), mx.bool_))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / 16, mask=sees)


OPERATIONS = {
    "product, 64 rows": (64, lambda x: _product(x, 512)),
    "product, 1 row": (1, lambda x: _product(x, 512)),
    "product, 3 rows": (3, lambda x: _product(x, 512)),
    "4 bits, 64 rows": (64, lambda x: _quantised(x, 512, 4)),
    "4 bits, 1 row": (1, lambda x: _quantised(x, 512, 4)),
    "8 bits, 8 rows": (8, lambda x: _quantised(x, 512, 8)),
    "gathered": (32, lambda x: _gathered(x, False)),
    "gathered, sorted": (256, lambda x: _gathered(x, True)),
    "attention": (64, _attention),
    "norm": (64, lambda x: mx.fast.rms_norm(x, mx.ones((256,)), 1e-6)),
}


WRONG_IN_MLX = "gathered, sorted"
"""In MLX 0.32.4: off by as much as the values are large. Not taken (`labkit.models.hybrid.experts`); if it is right one
day, the test says so, and the detour can go."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.xfail(strict=True, reason="MLX's fault")) if n == WRONG_IN_MLX else n
        for n in OPERATIONS
    ],
)
def test_mlx_computes_floats_as_on_a_cpu(cuda_device, name):
    """MLX's own operations in the graph, in fp32: what is coarse here is coarse in every test below."""
    rows, compute = OPERATIONS[name]
    x = on_cpu(lambda: mx.random.normal((rows, 256), key=mx.random.key(rows)))
    wanted, got = on_cpu(lambda: compute(x)), compute(x)
    mx.eval(got)
    error = on_cpu(lambda: mx.abs(got - wanted).max()).item()
    _recorded["largest"] = float(f"{error:.3g}")
    assert error <= 2e-5, f"{name}: {error:.3g} of values near 1, with MLX_ENABLE_TF32={os.environ['MLX_ENABLE_TF32']}"


def test_a_chunk_and_a_step(cuda_device):
    """The fewest kernels that say whether a whole model is right."""
    both, tokens = pair("real-heads", mx.bfloat16), prompt(25)
    expected = both.expected(tokens)
    close(both, run(both.hybrid, tokens, [25]), expected, "one chunk")
    uncompiled = with_variants(both.hybrid, compiled=False)
    close(both, run(uncompiled, tokens, [24, 1]), expected, "a chunk and a step")
    close(both, run(both.hybrid, tokens, [24, 1]), expected, "a chunk and a compiled step")


@DTYPES
@pytest.mark.parametrize("bits", [4, None, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_and_steps(cuda_device, shape, bits, dtype):
    both = pair(shape, dtype, bits)
    tokens = prompt(64)
    expected = both.expected(tokens)
    close(both, run(both.hybrid, tokens, [64]), expected, "one chunk")
    close(both, run(both.hybrid, tokens, WIDTHS[bits]), expected, f"widths {WIDTHS[bits]}")


@DTYPES
def test_a_long_prompt_takes_the_forms_for_many_rows(cuda_device, dtype):
    both = pair("real-heads", dtype)
    tokens = prompt(700, 1)
    close(both, run(both.hybrid, tokens, [600, 100]), both.expected(tokens), "600 and 100")


@DTYPES
def test_decoding_past_a_full_tail(cuda_device, dtype):
    both = pair("real-heads", dtype)
    tokens = prompt(330, 2)
    close(both, run(both.hybrid, tokens, [10] + [1] * 320), both.expected(tokens), "320 single steps")


@pytest.mark.parametrize("shape", ["small", "real-heads"])
def test_compiled_steps_have_the_bits_of_uncompiled_ones(cuda_device, shape):
    both = pair(shape, mx.bfloat16)
    tokens, widths = prompt(60, 3), [20, *([1] * 32), 8]
    compiled, plain = (run(with_variants(both.hybrid, compiled=on), tokens, widths) for on in (True, False))
    assert mx.array_equal(compiled, plain), f"largest difference {mx.abs(compiled - plain).max().item():.3g}"


@DTYPES
def test_rows_of_unequal_length_that_come_and_go(cuda_device, dtype):
    both = pair("dense-heads", dtype)
    model, rows = both.hybrid, [prompt(n, n) for n in (7, 30, 12)]
    caches = []
    for row in rows:
        caches.append(model.make_caches())
        model(row, caches[-1], Rows.single(), logits=None)
    merged = [type(layer[0]).merge(layer) for layer in zip(*caches[:2], strict=True)]
    done, order = [7, 30, 12], [0, 1]
    for seed in range(40):
        if seed == 10:
            for layer, newcomer in zip(merged, caches[2], strict=True):
                layer.extend(newcomer)
            order = [0, 1, 2]
        if seed == 25:
            for layer in merged:
                layer.filter([2, 1])
            order = [2, 1]
        tokens = prompt(1, 100 + seed, batch=len(order))
        logits = model(tokens, merged, Rows.batch([done[row] for row in order])).logits
        for i, row in enumerate(order):
            rows[row] = mx.concatenate([rows[row], tokens[i : i + 1]], axis=1)
            done[row] += 1
            if seed in (0, 9, 10, 24, 25, 39):
                close(both, logits[i : i + 1], both.expected(rows[row])[:, -1:], f"step {seed}, row {row}")


@DTYPES
def test_left_padding(cuda_device, dtype):
    both = pair("dense", dtype)
    rows = [prompt(n, n) for n in (5, 40)]
    tokens = mx.concatenate([mx.concatenate([mx.zeros((1, 35), mx.int32), rows[0]], axis=1), rows[1]], axis=0)
    caches = both.hybrid.make_caches(2)
    logits = both.hybrid(tokens, caches, Rows.batch([-35, 0], left_padding=[35, 0])).logits
    step = prompt(1, 9, batch=2)
    after = both.hybrid(step, caches, Rows.batch([5, 40])).logits
    for i, row in enumerate(rows):
        close(both, logits[i : i + 1], both.expected(row)[:, -1:], f"prompt of row {i}")
        longer = mx.concatenate([row, step[i : i + 1]], axis=1)
        close(both, after[i : i + 1], both.expected(longer)[:, -1:], f"step of row {i}")


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_a_draft_is_verified_and_partly_kept(cuda_device, accepted):
    both = pair("dense-heads", mx.bfloat16)
    start, draft, token = prompt(20, 1), prompt(5, 2), prompt(1, 3)
    caches = both.hybrid.make_caches()
    both.hybrid(start, caches, Rows.single(), logits=None)
    for layer in caches:
        layer.checkpoint()
    both.hybrid(draft, caches, Rows.single(20), logits="all")
    for layer in caches:
        layer.commit(accepted)
    logits = both.hybrid(token, caches, Rows.single(20 + accepted)).logits
    whole = mx.concatenate([start, draft[:, :accepted], token], axis=1)
    close(both, logits, both.expected(whole)[:, -1:], f"after {accepted} accepted tokens")


@pytest.mark.parametrize(("name", "value"), SWITCHES)
def test_every_switch_computes_the_same(cuda_device, name, value):
    both = pair("real-heads", mx.bfloat16)
    tokens = prompt(440, 4)
    logits = run(with_variants(both.hybrid, **{name: value}), tokens, [400, 30, *([1] * 10)])
    close(both, logits, both.expected(tokens), f"{name}={value}")


@pytest.mark.parametrize("shape", ["small", "real-heads"])
def test_the_invariant_mode_gives_the_same_bits_whatever_stands_beside(cuda_device, shape):
    both = pair(shape, mx.bfloat16)
    model = Hybrid(both.hybrid.weights, both.hybrid.config, mx.bfloat16, invariant=True)
    tokens = prompt(70, 5)
    whole = run(model, tokens, [70])
    for widths in ([64, 6], [1] * 20 + [50], [33, 1, 8, 28]):
        other = run(model, tokens, widths)
        same = mx.all(whole == other, axis=-1).reshape(-1).tolist()
        assert all(same), f"widths {widths}: first other bits at position {same.index(False)}"
    longer = prompt(90, 6)
    padded = mx.concatenate([mx.concatenate([mx.zeros((1, 20), mx.int32), tokens], axis=1), longer], axis=0)
    beside = model(padded, model.make_caches(2), Rows.batch([-20, 0], left_padding=[20, 0]), logits="all").logits
    same = mx.all(whole == beside[:1, 20:], axis=-1).reshape(-1).tolist()
    assert all(same), f"beside a longer row: first other bits at position {same.index(False)}"


def test_a_step_makes_few_launches(cuda_device):
    """Kernels of a decode step and layer: the count that the design names, so that nobody adds one unseen."""
    from labkit.kernels import launch

    both = pair("real-heads", mx.bfloat16)
    model = with_variants(both.hybrid, compiled=False)
    caches = model.make_caches()
    model(prompt(5), caches, Rows.single(), logits=None)
    calls, original = [], launch.Kernel.__call__

    def counted(self, **options):
        calls.append(self.name)
        return original(self, **options)

    launch.Kernel.__call__ = counted
    try:
        mx.eval(model(prompt(1), caches, Rows.single(5), logits=None))
    finally:
        launch.Kernel.__call__ = original
    assert len(calls) <= 9 * model.num_layers, calls


@pytest.mark.parametrize("rows", [1, 4])
def test_recorded_steps_are_those_of_the_same_launches(cuda_device, rows):
    """By one CUDA graph a token against launch by launch, in bits: an even and an odd number of tokens, the second time
    from caches that lie elsewhere; then a step by the caches that came back."""
    from labkit.engine.params import SamplingParams
    from labkit.engine.replay import Replays
    from labkit.engine.sampling import RowSampler, choose
    from labkit.kernels.recording import machine_here

    machine = machine_here()
    if machine is None:
        pytest.skip("no bindings of NVIDIA's driver")
    both = pair("real-heads", mx.bfloat16)
    model = with_variants(both.hybrid, compiled=False, decode_rows="own")
    options = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 40}, {"temperature": 1.2, "top_p": 0.9}, {}]
    samplers = [RowSampler(SamplingParams(**one), seed) for seed, one in enumerate(options[:rows])]
    replays, positions = Replays(model, machine, patience=0), [20] * rows

    def started(seed: int) -> list:
        caches = model.make_caches(rows)
        model(prompt(20, seed, batch=rows), caches, Rows.batch([0] * rows), logits=None)
        for layer in caches:
            if layer.kind == "contiguous":
                layer.make_room(100)
        mx.eval([cache.state for cache in caches])
        return caches

    def step(caches: list, fed: mx.array, at: int):
        logits = model(fed[:, None], caches, Rows.batch([20 + at] * rows)).logits[:, -1]
        return choose(logits, fed, samplers, [at] * rows, [None] * rows)

    for seed, steps in ((1, 6), (2, 7)):
        direct, caches = started(seed), started(seed)
        fed = mx.array([3 + row for row in range(rows)], dtype=mx.uint32)
        chosen, wanted = fed, []
        for at in range(steps + 1):
            choice = step(direct, chosen, at)
            chosen = choice.token
            wanted.append((choice.token.tolist(), choice.total.tolist()))
        replay = None
        while replay is None:
            replay = replays.open((seed,), caches, samplers, positions, [0] * rows, fed, 100)
            assert not replays.refused, replays.refused
        got = [replay.launch() for _ in range(steps)]
        read = [(choice.token.tolist(), choice.total.tolist()) for choice in got[-2:]]
        assert read == wanted[steps - 2 : steps]
        last = step(caches, replay.close().token, steps)
        assert (last.token.tolist(), last.total.tolist()) == wanted[steps]
        for mine, theirs in zip(caches, direct, strict=True):
            for one, other in zip(mine.state, theirs.state, strict=True):
                assert not isinstance(one, mx.array) or mx.array_equal(one, other)
    assert replays.recorded == 1
    _recorded["seconds of recording"] = round(replays.seconds, 2)
