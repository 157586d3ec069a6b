"""Attention through a block table: the contiguous kernel's bits, its traffic, nothing that the table does not name."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.caches import Contiguous, Paged, Pages
from labkit.kernels import simulator
from labkit.kernels.attention import (
    DECODE,
    MERGE,
    Tail,
    decode_attention,
    decode_call,
    merge_call,
    paged_decode_attention,
)
from labkit.kernels.attention.reference import attention
from labkit.kernels.attention.split import DECODE_THREADGROUPS, uneven_block
from labkit.kernels.targets import use_target

KV, HEADS, WIDTH, ROOM = 2, 8, 64, 16
SCALE = WIDTH**-0.5


def paged_rows(lengths: list[int], page: int, dtype: mx.Dtype, shared: int = 0):
    """Rows in a pool with holes, their first `shared` blocks the same; and the same tokens in one buffer."""
    finished = [min(n // page, (n - 1) // page) * page for n in lengths]
    width = max(max(finished) // page, 1)
    spare = 3
    pool = [mx.full((len(lengths) * width + spare + 1, KV, page, WIDTH), mx.nan).astype(dtype) for _ in "kv"]
    order = mx.random.permutation(len(lengths) * width + spare).tolist()
    table = [[pool[0].shape[0] - 1] * width for _ in lengths]
    columns = -(-max(lengths) // page) * page + ROOM
    plain = [mx.random.normal((len(lengths), KV, columns, WIDTH)).astype(dtype) for _ in "kv"]
    for b, count in enumerate(finished):
        for i in range(count // page):
            at = slice(i * page, (i + 1) * page)
            if b and i < shared:
                table[b][i] = table[0][i]
                for x in plain:
                    x[b, :, at] = x[0, :, at]
                continue
            table[b][i] = order.pop()
            for x, whole in zip(pool, plain, strict=True):
                x[table[b][i]] = whole[b, :, at]
    tails = [mx.full((len(lengths), KV, ROOM, WIDTH), mx.nan).astype(dtype) for _ in "kv"]
    for b, (n, count) in enumerate(zip(lengths, finished, strict=True)):
        for x, whole in zip(tails, plain, strict=True):
            x[b, :, : n - count] = whole[b, :, count:n]
    int32 = {"dtype": mx.int32}
    return pool, Tail(*tails, mx.array(finished, **int32)), mx.array(table, **int32), plain, mx.array(lengths, **int32)


@pytest.mark.parametrize(("form", "dtype"), [("lanes", mx.float32), ("tensor", mx.bfloat16)])
@pytest.mark.parametrize("page", [8, 16])
def test_the_bits_of_one_buffer(form, dtype, page):
    """Blocks in any order, some shared, NaN wherever no token of the row lies."""
    pool, tail, table, plain, last = paged_rows([45, 16, 61], page, dtype, shared=1)
    queries = mx.random.normal((3, HEADS, WIDTH)).astype(dtype)
    first = mx.array([0, 3, 0], dtype=mx.int32)
    options = {"scale": SCALE, "parts": 3, "form": form, "simds": 2}
    outs = []
    for arguments in (
        decode_call(queries, *plain, first, last, **options),
        decode_call(queries, *pool, first, last, table=table, tail=tail, **options),
    ):
        partial, stats = DECODE[form](**arguments, target="simulator")
        outs.append(MERGE(**merge_call(partial, stats, dtype), target="simulator")[0])
    assert mx.array_equal(*outs).item()
    want = attention(queries, *plain, first, last, SCALE)
    assert mx.abs(outs[0].astype(mx.float32) - want).max().item() < (1e-5 if form == "lanes" else 3e-2)


def test_a_long_row_among_short_ones_fills_the_device():
    """Uneven: the long row's share is what it is alone; equal parts leave its threadgroups with most of the work."""
    pool, tail, table, plain, last = paged_rows([530, 9, 20], 16, mx.float32)
    queries = mx.random.normal((3, HEADS, 1, WIDTH))
    options = {"scale": SCALE, "target": "simulator"}
    got = paged_decode_attention(queries, *pool, tail, table, last, layout="uneven", **options)
    want = attention(queries[:, :, 0], *plain, mx.zeros_like(last), last, SCALE)
    assert mx.allclose(got[:, :, 0], want, atol=1e-5).item()
    for columns in (1000, 16640, 131328):
        block = uneven_block(2, 8, columns)
        assert block % 16 == 0
        assert columns / block <= DECODE_THREADGROUPS / 2 + 1
        assert block == 256 or columns / block > 0.9 * DECODE_THREADGROUPS / 2


def test_a_window_and_three_new_tokens():
    pool, tail, table, plain, last = paged_rows([45, 20], 8, mx.float32)
    queries = mx.random.normal((2, HEADS, 3, WIDTH))
    options = {"scale": SCALE, "target": "simulator"}
    got = paged_decode_attention(queries, *pool, tail, table, last, window=19, **options)
    for i in range(3):
        ends = last - (2 - i)
        want = decode_attention(queries[:, :, i : i + 1], *plain, ends, first=mx.maximum(ends - 19, 0), **options)
        assert mx.allclose(got[:, :, i : i + 1], want, atol=1e-5).item()


def test_a_paged_read_costs_the_table_and_nothing_else():
    """Counted: the same bytes of keys and values in the same sectors, and a broadcast word a column and simdgroup."""
    pool, tail, table, plain, last = paged_rows([128], 16, mx.float16)
    queries, first = mx.random.normal((1, HEADS, WIDTH)).astype(mx.float16), mx.array([0], dtype=mx.int32)
    reads = {}
    for name, call in (
        ("plain", decode_call(queries, *plain, first, last, scale=SCALE, parts=2)),
        ("paged", decode_call(queries, *pool, first, last, scale=SCALE, parts=2, table=table, tail=tail)),
    ):
        run = simulator.run(DECODE["lanes"].text, DECODE["lanes"].launch(**call), check=True)
        assert not run.faults
        reads[name] = {flow.memory: flow for flow in run.traffic.buffers if flow.direction == "read"}
    for which in ("keys", "values"):
        paged = [reads["paged"][name] for name in (which, f"tail_{which}")]
        assert sum(flow.bytes for flow in paged) == reads["plain"][which].bytes
        assert sum(flow.sectors for flow in paged) == reads["plain"][which].sectors
    assert reads["paged"]["table"].footprint <= 128
    assert reads["paged"]["table"].sectors <= reads["paged"]["keys"].sectors


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_every_sector_that_lanes_touch_is_used(dtype, width):
    """16-byte reads side by side: at 256 values of 16 bits a lane once read 8 bytes in 16."""
    keys, values = (mx.random.normal((1, 1, 24, width)).astype(dtype) for _ in "kv")
    ends = [mx.array([n], dtype=mx.int32) for n in (0, 24)]
    queries = mx.random.normal((1, 4, width)).astype(dtype)
    call = decode_call(queries, keys, values, *ends, scale=1.0, parts=1)
    run = simulator.run(DECODE["lanes"].text, DECODE["lanes"].launch(**call), check=True)
    for flow in run.traffic.buffers:
        if flow.memory in ("queries", "keys", "values"):
            assert flow.bytes == flow.sectors * 32, flow.memory


def test_what_does_not_fit_is_refused():
    pool, tail, table, _, last = paged_rows([45, 16], 16, mx.float32)
    queries = mx.random.normal((2, HEADS, 1, WIDTH))
    with pytest.raises(ValueError, match="pages need a tail"):
        decode_call(queries[:, :, 0], *pool, last, last, scale=1.0, parts=1, table=table)
    with pytest.raises(ValueError, match="a block table is int32"):
        paged_decode_attention(queries, *pool, tail, table.astype(mx.uint32), last, scale=1.0)
    with pytest.raises(ValueError, match="a tail of"):
        paged_decode_attention(queries, *pool, tail._replace(keys=tail.keys[:1]), table, last, scale=1.0)


@pytest.mark.parametrize("new", [1, 3, 12])
def test_a_paged_cache_attends_through_its_table_as_a_plain_one(new):
    """As on a GPU, in the simulator: a few tokens by the kernel that reads the table, a chunk by the one for chunks."""
    rows, pages = [], Pages(20, 16)
    for length in (21, 40):
        caches, prompt = (Contiguous(), Paged(pages)), [mx.random.normal((1, KV, length, WIDTH)) for _ in "kv"]
        for cache in caches:
            cache.update_and_fetch(*prompt)
        rows.append(caches)
    plain, paged = (type(caches[0]).merge(caches) for caches in zip(*rows, strict=True))
    tokens = [mx.random.normal((2, KV, new, WIDTH)) for _ in "kv"]
    queries = mx.random.normal((2, HEADS, new, WIDTH))
    for cache in (plain, paged):
        cache.append(*tokens)
    want = plain.attend(queries, scale=SCALE)
    with use_target("simulator"):
        got = paged.attend(queries, scale=SCALE)
    assert mx.allclose(got, want, atol=1e-5).item()


@pytest.mark.cuda
@pytest.mark.parametrize("tail", [16, 256])
def test_a_paged_cache_on_the_device_attends_as_a_plain_one(tail):
    """Prompts, 40 steps through full tails, a row that leaves: bf16, heads of 256, against MLX's attention in fp32."""
    rows, heads, width, pages = [], 16, 256, Pages(400, 16, tail_tokens=tail)
    for length in (300, 37, 1000):
        serial = Contiguous(), Paged(pages)
        prompt = tuple(mx.random.normal((1, KV, length, width), dtype=mx.bfloat16) for _ in "kv")
        for cache in serial:
            cache.update_and_fetch(*prompt)
        rows.append(serial)
    plain, paged = (type(caches[0]).merge(caches) for caches in zip(*rows, strict=True))
    for step in range(40):
        if step == 20:
            for cache in (plain, paged):
                cache.filter([2, 1])
        count = plain.batch_size
        token = tuple(mx.random.normal((count, KV, 1, width), dtype=mx.bfloat16) for _ in "kv")
        queries = mx.random.normal((count, heads, 1, width), dtype=mx.bfloat16)
        paged.append(*token)
        keys, values = plain.update_and_fetch(*token)
        got = paged.attend(queries, scale=width**-0.5).astype(mx.float32)
        mask = mx.arange(keys.shape[2]) >= plain.left_padding[:, None, None, None]
        with mx.stream(mx.cpu):
            want = mx.fast.scaled_dot_product_attention(
                *(x.astype(mx.float32) for x in (queries, keys, values)), scale=width**-0.5, mask=mask
            )
            assert mx.abs(got - want).max().item() < 2e-2
    assert pages.pool.faults() == []
