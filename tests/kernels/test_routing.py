"""Routing beyond its gates: the stable order, the block map's promises, mlx-lm's own choices, edges."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.kernels import routing, simulator
from labkit.kernels.routing import reference
from labkit.kernels.routing.launches import (
    CHOOSE_EXPERTS,
    COUNT_EXPERTS,
    FEW,
    GROUP_ROWS,
    choose_experts_call,
    count_experts_call,
    group_rows_call,
    tokens_per_block,
)

TARGETS = ("simulator", "reference")


def check_groups(groups: routing.Groups, indices: np.ndarray, experts: int) -> None:
    """All that the grouped matmul relies on."""
    flat = indices.reshape(-1)
    order, inverse = np.array(groups.order), np.array(groups.inverse)
    offsets, block_map = np.array(groups.offsets), np.array(groups.block_map)
    np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(inverse[order], np.arange(flat.size))
    np.testing.assert_array_equal(np.diff(offsets), np.bincount(flat, minlength=experts))
    assert offsets[0] == 0
    assert len(block_map) == routing.max_blocks(flat.size, experts, groups.tile)
    used = block_map[block_map[:, 2] > 0]
    assert (block_map[len(used) :] == 0).all(), "entries in use come first, the others are zero"
    assert (used[:, 2] <= groups.tile).all()
    assert used[:, 2].sum() == flat.size
    covered = np.concatenate([np.arange(row, row + rows) for _, row, rows, _ in used])
    np.testing.assert_array_equal(covered, np.arange(flat.size))
    for expert, row, rows, _ in used:
        assert offsets[expert] <= row
        assert row + rows <= offsets[expert + 1]
        assert (row - offsets[expert]) % groups.tile == 0
        assert rows == groups.tile or row + rows == offsets[expert + 1], "only an expert's last block is not full"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "tile"),
    [(1, 8, 256, 1), (33, 3, 40, 16), (200, 8, 256, 32), (31, 16, 512, 5), (64, 1, 1, 16)],
)
def test_order_is_numpys_stable_one(target, tokens, k, experts, tile):
    rng = np.random.default_rng(tokens)
    indices = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], np.int32)
    check_groups(routing.group_rows(mx.array(indices), experts, tile, target=target), indices, experts)


@pytest.mark.parametrize("target", TARGETS)
def test_everybody_chooses_one_expert(target):
    indices = np.full((150, 2), 5, np.int32)
    indices[:, 1] = 7
    groups = routing.group_rows(mx.array(indices), 8, 16, target=target)
    check_groups(groups, indices, 8)
    assert (np.array(groups.offsets) == [0, 0, 0, 0, 0, 0, 150, 150, 300]).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_hold_their_promises(data):
    experts = data.draw(st.integers(1, 20), label="experts")
    k = data.draw(st.integers(1, experts), label="k")
    tokens = data.draw(st.integers(1, 30), label="tokens")
    tile = data.draw(st.integers(1, 40), label="tile")
    row = st.lists(st.integers(0, experts - 1), min_size=k, max_size=k)
    indices = np.array(data.draw(st.lists(row, min_size=tokens, max_size=tokens)), np.int32)
    check_groups(routing.group_rows(mx.array(indices), experts, tile, target="reference"), indices, experts)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 100), st.integers(1, 50))
def test_simulated_groups_hold_their_promises(seed, tokens, tile):
    """One compiled text, whatever the number of tokens, the load and the tile."""
    rng = np.random.default_rng(seed)
    load = rng.dirichlet(np.full(11, rng.choice([0.05, 1.0, 50.0])))
    indices = rng.choice(11, size=(tokens, 4), p=load).astype(np.int32)
    check_groups(routing.group_rows(mx.array(indices), 11, tile, target="simulator"), indices, 11)


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1, 75])
def test_one_launch_and_two_give_the_same(tokens):
    """Both sides of the switch between forms agree with the parts, and the simulator with the reference."""
    logits = mx.random.normal((tokens, 24))
    for target in TARGETS:
        routed = routing.route(logits, 4, 8, target=target)
        indices, weights = routing.choose_experts(logits, 4, target=target)
        assert mx.array_equal(routed.indices, indices)
        assert mx.array_equal(routed.weights, weights)
        check_groups(routed.groups, np.array(indices), 24)


@pytest.mark.parametrize("target", TARGETS)
def test_choice_is_mlx_lms(target):
    """Qwen's block: softmax over all, the k best, renormalised."""
    logits = mx.random.normal((20, 64))
    gates = mx.softmax(logits, axis=-1, precise=True)
    best = np.sort(np.array(mx.argpartition(gates, kth=-8, axis=-1)[..., -8:]), axis=-1)
    indices, weights = routing.choose_experts(logits, 8, target=target)
    np.testing.assert_array_equal(np.sort(np.array(indices), axis=-1), best)
    scores = mx.take_along_axis(gates, indices, axis=-1)
    np.testing.assert_allclose(weights, scores / scores.sum(axis=-1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_choice_is_deepseeks(target):
    """Sigmoid scores, the correction bias only in the choosing, and the scaling factor."""
    from mlx_lm.models.deepseek_v3 import group_expert_select

    logits, bias = mx.random.normal((20, 64)), mx.random.normal((64,))
    best, scores = group_expert_select(logits, bias, 6, 1, 1, 2.5, True)
    indices, weights = routing.choose_experts(
        logits, 6, scoring="sigmoid", bias=bias, renormalise=True, scale=2.5, target=target
    )
    by_expert = np.argsort(np.array(best), axis=-1)
    mine = np.argsort(np.array(indices), axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.array(best), by_expert, -1), np.take_along_axis(np.array(indices), mine, -1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.array(weights), mine, -1), np.take_along_axis(np.array(scores), by_expert, -1), rtol=5e-6
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_bad_logits_give_finite_weights_and_distinct_experts(target, scoring, renormalise):
    rows = np.zeros((5, 12), np.float32)
    rows[0] = np.nan
    rows[1] = -np.inf
    rows[2] = np.inf
    rows[3, :3] = np.inf, np.nan, -np.inf
    rows[4, 1] = np.nan
    indices, weights = routing.choose_experts(
        mx.array(rows), 4, scoring=scoring, renormalise=renormalise, target=target
    )
    assert np.isfinite(np.array(weights)).all()
    assert all(len(set(row)) == 4 for row in np.array(indices).tolist())
    assert np.array(indices)[0].tolist() == [0, 1, 2, 3], "equal scores go by number"
    assert 1 not in np.array(indices)[4]


@pytest.mark.parametrize("target", TARGETS)
def test_minus_zero_is_zero(target):
    rows = np.zeros((2, 6), np.float32)
    rows[:, ::2] = -0.0
    rows[1] -= 1
    indices, _ = routing.choose_experts(mx.array(rows), 4, bias=mx.ones((6,)), target=target)
    assert np.array(indices).tolist() == [[0, 1, 2, 3]] * 2
    indices, _ = routing.choose_experts(mx.array(rows[:1]), 4, target=target)
    assert np.array(indices).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("target", TARGETS)
def test_columns_past_the_experts_are_ignored(target):
    logits = mx.random.normal((3, 17))
    logits[:, 16] = 100.0
    inside = routing.choose_experts(logits[:, :16], 4, target=target)
    for got, want in zip(routing.choose_experts(logits, 4, experts=16, target=target), inside, strict=True):
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("tokens", [2, FEW + 3])
def test_routing_can_be_compiled(tokens):
    """Nothing in the operation reads an array on the host."""

    def arrays(logits):
        routed = routing.route(logits, 3, 4)
        return [routed.indices, routed.weights, routed.groups.order, routed.groups.block_map]

    indices, *_ = mx.compile(arrays)(mx.random.normal((tokens, 12)))  # traced alone: evaluating it compiles C++
    assert indices.shape == (tokens, 3)


def test_block_of_tokens_fits_threadgroup_memory():
    for tokens in (1, 4096, 8192, 65536, 1 << 20):
        for k in (1, 3, 8, 16, 32):
            assert tokens_per_block(tokens, k) * k <= 4096
            assert tokens_per_block(tokens, k) * k % 4 == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: routing.choose_experts(mx.zeros((2, 3, 4)), 1), r"\[T, L\].*\(2, 3, 4\)"),
        (lambda: routing.choose_experts(mx.zeros((2, 4)), 5), "k must be 1 to 4 for 4 experts, not 5"),
        (lambda: routing.choose_experts(mx.zeros((2, 600)), 5), "experts must be 1 to 512"),
        (lambda: routing.choose_experts(mx.zeros((2, 4)), 2, scoring="tanh"), "'tanh'"),
        (lambda: routing.choose_experts(mx.zeros((2, 4)), 2, bias=mx.zeros((3,))), r"bias needs shape \(4,\)"),
        (lambda: routing.route(mx.zeros((2, 4)), 2, 0), "a tile has at least one row, not 0"),
        (lambda: routing.group_rows(mx.zeros((2, 4)), 8, 16), "int32 or uint32"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_barrier_is_needed():
    """Without any one of them the simulator finds a race, or the wild write that comes of it first."""
    indices = mx.random.randint(0, 40, (40, 2))
    counting = count_experts_call(indices, 40)
    (counts,) = COUNT_EXPERTS(**counting, target="reference")
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    for kernel, call in (
        (CHOOSE_EXPERTS, choose_experts_call(mx.random.normal((40, 40)), 2)),
        (COUNT_EXPERTS, counting),
        (GROUP_ROWS, group_rows_call(indices, counts, 40, 4)),
    ):
        parts = kernel.text.source.split(barrier)
        assert len(parts) > 1
        for i in range(1, len(parts)):
            mutant = replace(kernel.text, source=barrier.join(parts[:i]) + barrier.join(parts[i:]))
            run = simulator.run(mutant, kernel.launch(**call), check=True)
            assert not run.clean, f"{kernel.name} without barrier {i}"


def test_reference_orders_floats_by_bits():
    values = np.array([-np.inf, -3.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, np.inf], np.float32)
    keys = np.array(reference.ordered_bits(mx.array(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
