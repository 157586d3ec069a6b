"""Attention beyond its gates: the public operations, their layouts, invariance, and what they refuse."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.attention import (
    BLOCK,
    DECODE,
    decode_attention,
    decode_call,
    merge_call,
    prefill_attention,
)
from labkit.kernels.attention.launches import MERGE
from labkit.kernels.attention.split import decode_simds, parts_for

SCALE = 64**-0.5


def cache(batch=2, kv_heads=1, columns=40, width=64, dtype=mx.float32):
    return (mx.random.normal((batch, kv_heads, columns, width)).astype(dtype) for _ in range(2))


def masked_attention(queries, keys, values, first, last):
    """mx.fast's own operation under a mask built column by column."""
    column, length = mx.arange(keys.shape[2]), queries.shape[2]
    ends = mx.array(last)[:, None] - mx.arange(length - 1, -1, -1)
    mask = (column >= mx.array(first)[:, None, None]) & (column < ends[..., None])
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask[:, None])


@pytest.mark.parametrize("layout", ["general", "fixed"])
@pytest.mark.parametrize("form", ["lanes", "tensor"])
def test_equals_mlx_with_padding_unequal_lengths_and_three_new_tokens(form, layout):
    dtype = mx.float32 if form == "lanes" else mx.float16
    keys, values = cache(dtype=dtype)
    queries = mx.random.normal((2, 4, 3, 64)).astype(dtype)
    first, last = [0, 5], [40, 17]
    got = decode_attention(
        queries,
        keys,
        values,
        mx.array(last),
        first=mx.array(first),
        scale=SCALE,
        layout=layout,
        form=form,
        target="simulator",
    )
    want = masked_attention(*(x.astype(mx.float32) for x in (queries, keys, values)), first, last)
    assert got.dtype == dtype
    assert mx.abs(got.astype(mx.float32) - want).max().item() < (1e-5 if form == "lanes" else 4e-3)


def test_a_row_that_sees_nothing_gives_zeros_and_leaves_its_neighbour_alone():
    keys, values = cache()
    queries = mx.random.normal((2, 4, 1, 64))
    both = decode_attention(queries, keys, values, mx.array([30, 0]), scale=SCALE, target="simulator")
    assert mx.all(both[1] == 0).item()
    alone = decode_attention(queries[:1], keys[:1], values[:1], mx.array([30]), scale=SCALE, target="reference")
    assert mx.allclose(both[0], alone[0], atol=1e-5).item()


def test_columns_outside_the_visible_range_are_never_read():
    keys, values = cache(batch=1)
    hidden = mx.where((mx.arange(40) < 8) | (mx.arange(40) >= 21), mx.nan, 0.0)[None, None, :, None]
    queries = mx.random.normal((1, 2, 1, 64))
    options = {"first": mx.array([8]), "scale": SCALE, "target": "simulator"}
    clean = decode_attention(queries, keys, values, mx.array([21]), **options)
    poisoned = decode_attention(queries, keys + hidden, values + hidden, mx.array([21]), **options)
    assert mx.array_equal(clean, poisoned).item()


@pytest.mark.parametrize("form", ["lanes", "tensor"])
def test_fixed_blocks_give_a_row_the_same_bits_whatever_its_neighbours_and_capacity(form):
    dtype = mx.bfloat16
    keys, values = cache(batch=3, columns=BLOCK + 64, dtype=dtype)
    queries = mx.random.normal((3, 2, 1, 64)).astype(dtype)
    last = mx.array([BLOCK + 9, 33, BLOCK])
    options = {"scale": SCALE, "layout": "fixed", "form": form, "target": "simulator"}
    together = decode_attention(queries, keys, values, last, **options)
    for row in range(3):
        longer = [mx.concatenate([x[row : row + 1], mx.zeros_like(x[:1])], axis=2) for x in (keys, values)]
        alone = decode_attention(queries[row : row + 1], *longer, last[row : row + 1], **options)
        assert mx.array_equal(together[row], alone[0]).item()


def test_packing_heads_changes_requests_and_not_one_bit():
    keys, values = cache(batch=1)
    queries = mx.random.normal((1, 4, 64))
    rows = (mx.array([0], dtype=mx.int32), mx.array([37], dtype=mx.int32))
    runs = {}
    for pack in (1, 4):
        call = decode_call(queries, keys, values, *rows, scale=SCALE, parts=2, pack=pack)
        runs[pack] = simulator.run(DECODE["lanes"].text, DECODE["lanes"].launch(**call), check=True)
        assert not runs[pack].faults
    for one, four in zip(runs[1].outputs, runs[4].outputs, strict=True):
        assert mx.array_equal(one, four).item()
    reads = {
        pack: next(flow.bytes for flow in run.traffic.buffers if (flow.memory, flow.direction) == ("keys", "read"))
        for pack, run in runs.items()
    }
    assert reads[1] == 4 * reads[4]


def test_scores_far_apart_merge_soundly():
    """One part holds all the weight, the others scores hundreds below: no overflow, no vanishing sum."""
    keys, values = cache(batch=1, columns=64)
    keys[:, :, 50] = 40.0
    queries = mx.full((1, 1, 1, 64), 40.0)
    call = decode_call(
        queries[:, :, 0],
        keys,
        values,
        mx.array([0], dtype=mx.int32),
        mx.array([64], dtype=mx.int32),
        scale=1.0,
        parts=8,
    )
    partial, stats = DECODE["lanes"](**call, target="simulator")
    out = MERGE(**merge_call(partial, stats, mx.float32), target="simulator")[0]
    assert mx.allclose(out[0, 0], values[0, 0, 50], atol=1e-5).item()


@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "columns"),
    [(1, 2, 8, 131072), (4, 2, 8, 131072), (5, 2, 8, 131072), (1, 2, 8, 10), (64, 8, 1, 4096), (1, 1, 16, 1)],
)
def test_parts_fill_the_device_and_never_starve(rows, kv_heads, group, columns):
    parts = parts_for(rows, kv_heads, group, columns)
    assert 1 <= parts <= max(1, -(-columns // 128))
    if columns >= 131072:  # one wave: a few threadgroups more would take as long as a second one
        assert 128 <= parts * kv_heads * rows <= 132


def test_in_blocks_neighbours_do_not_change_how_a_part_is_summed():
    assert len({decode_simds("tensor", threadgroups, 512) for threadgroups in (1, 132, 5000)}) == 1
    assert decode_simds("tensor", 132, 0) > decode_simds("tensor", 133, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": mx.zeros((2, 3, 1, 64))}, "do not fit keys"),
        ({"queries": mx.zeros((2, 4, 64))}, "four dimensions"),
        ({"queries": mx.zeros((2, 4, 1, 64), dtype=mx.float16)}, "share a float dtype"),
        ({"values": mx.zeros((2, 2, 41, 64))}, "of one shape"),
        ({"last": mx.array([1, 2, 3])}, "one entry for each of 2 rows"),
        ({"form": "tensor"}, "16-bit floats"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    given = {
        "queries": mx.zeros((2, 4, 1, 64)),
        "keys": mx.zeros((2, 2, 40, 64)),
        "values": mx.zeros((2, 2, 40, 64)),
        "last": mx.array([40, 40]),
        "scale": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**given, target="reference")


@pytest.mark.parametrize("width", [48, 1024])
def test_head_sizes_that_no_simdgroup_divides_are_refused(width):
    with pytest.raises(ValueError, match="multiple of 32 up to 512"):
        decode_attention(
            mx.zeros((1, 1, 1, width)),
            mx.zeros((1, 1, 8, width)),
            mx.zeros((1, 1, 8, width)),
            mx.array([8]),
            scale=1.0,
            target="reference",
        )


def test_blocks_that_do_not_cover_the_cache_are_refused():
    keys, values = cache(batch=1)
    with pytest.raises(ValueError, match="do not cover"):
        decode_call(
            mx.zeros((1, 2, 64)),
            keys,
            values,
            mx.zeros((1,), mx.int32),
            mx.zeros((1,), mx.int32),
            scale=1.0,
            parts=2,
            block=16,
        )


@pytest.mark.parametrize("form", ["simdgroup", "tensor", "mlx"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(form):
    dtype = mx.float16 if form == "tensor" else mx.float32
    target = None if form == "mlx" else "simulator"
    keys, values = cache(batch=1, columns=40, dtype=dtype)
    queries = mx.random.normal((1, 2, 40, 64)).astype(dtype)
    whole = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (queries, keys, values)), scale=SCALE, mask="causal"
    )
    pieces = [
        prefill_attention(queries[:, :, a:b], keys, values, mx.array([a]), scale=SCALE, form=form, target=target)
        for a, b in ((0, 7), (7, 8), (8, 40))
    ]
    together = mx.concatenate(pieces, axis=2)
    assert together.dtype == dtype
    assert mx.abs(together.astype(mx.float32) - whole).max().item() < (4e-3 if form == "tensor" else 1e-5)


@pytest.mark.parametrize("form", ["simdgroup", "tensor"])
def test_a_chunk_of_one_token_is_decoding(form):
    dtype = mx.float32 if form == "simdgroup" else mx.bfloat16
    keys, values = cache(columns=33, dtype=dtype)
    queries = mx.random.normal((2, 4, 1, 64)).astype(dtype)
    last, first = mx.array([33, 12]), mx.array([0, 3])
    options = {"first": first, "scale": SCALE, "target": "simulator"}
    prefilled = prefill_attention(queries, keys, values, last - 1, form=form, **options)
    decoded = decode_attention(queries, keys, values, last, **options)
    tolerance = 1e-5 if dtype == mx.float32 else 1.6e-2
    assert mx.allclose(prefilled.astype(mx.float32), decoded.astype(mx.float32), atol=tolerance).item()


@pytest.mark.parametrize("form", ["simdgroup", "tensor", "mlx"])
def test_tokens_that_see_nothing_give_zeros(form):
    dtype = mx.float16 if form == "tensor" else mx.float32
    keys, values = cache(batch=1, columns=24, dtype=dtype)
    queries = mx.random.normal((1, 1, 9, 64)).astype(dtype)
    out = prefill_attention(
        queries,
        keys,
        values,
        mx.array([0]),
        first=mx.array([4]),
        scale=SCALE,
        form=form,
        target=None if form == "mlx" else "simulator",
    )
    assert mx.all(out[:, :, :4] == 0).item()
    assert mx.all(mx.isfinite(out)).item()
    assert mx.any(out[:, :, 4:] != 0).item()


def test_prefill_refuses_what_does_not_fit():
    keys, values = cache(batch=2)
    with pytest.raises(ValueError, match="as many rows"):
        prefill_attention(mx.zeros((4, 1, 3, 64)), keys, values, mx.array([0] * 4), scale=1.0, form="simdgroup")
    with pytest.raises(ValueError, match="16-bit floats"):
        prefill_attention(mx.zeros((2, 1, 3, 64)), keys, values, mx.array([0, 0]), scale=1.0, form="tensor")
    with pytest.raises(ValueError, match="counted in integers"):
        prefill_attention(mx.zeros((2, 1, 3, 64)), keys, values, mx.zeros((2,)), scale=1.0)
