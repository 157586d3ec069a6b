"""Whatever happens to a batch, every query sees exactly the tokens it should: a brute-force model of rows as lists.

Keys carry tags: token p of row r is the number 1000 r + p. After each write, the tags that a query's mask shows are
compared with the list.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.caches import BatchedContiguous, Contiguous, Rotating

WINDOW = 6


class Rows:
    """Rows as lists of tags, beside the cache under test."""

    def __init__(self, kind: str):
        self.kind = kind
        self.rows: list[list[int]] = []
        self.next_row = 1
        self.cache = None

    def fresh(self, length: int, chunk: int) -> tuple[object, list[int]]:
        cache = Contiguous() if self.kind == "contiguous" else Rotating(WINDOW)
        tags = [1000 * self.next_row + p for p in range(length)]
        self.next_row += 1
        for start in range(0, length, chunk):
            part = tags[start : start + chunk]
            self.write(cache, [tags[: start + len(part)]], [len(part)], len(part))
        return cache, tags

    def write(self, cache: object, rows: list[list[int]], lengths: list[int], width: int) -> None:
        """Append the last `lengths` tags of each row (right-padded to `width`) and check what the queries see."""
        tags = np.full((len(rows), 1, width, 2), 9e6, np.float32)
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            if n:
                tags[b, 0, :n, 0] = row[-n:]
        mask = cache.make_mask(width)
        keys, values = cache.update_and_fetch(mx.array(tags), mx.array(-tags))
        assert mx.array_equal(keys, -values)
        seen = visible(np.array(keys)[:, 0, :, 0], mask, width)
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            before = len(row) - n
            for j in range(n):
                assert seen[b][j] == self.expected(row[: before + j + 1]), (b, j, self.kind)

    def expected(self, row: list[int]) -> list[int]:
        return sorted(row if self.kind == "contiguous" else row[-WINDOW:])

    def extend_rows(self, lengths: list[int]) -> None:
        for b, n in enumerate(lengths):
            row = self.rows[b]
            first = row[0] // 1000 if row else self.next_row + b
            row.extend(1000 * first + len(row) + i for i in range(n))

    def check_attend(self) -> None:
        """The kernel face: attention with equal scores is the mean over what is seen."""
        query = mx.zeros((len(self.rows), 1, 1, 2))
        out = np.array(self.cache.attend(query, scale=1.0))[:, 0, 0, 0]
        for b, row in enumerate(self.rows):
            np.testing.assert_allclose(-out[b], np.mean(self.expected(row)), rtol=1e-5)


def visible(tags: np.ndarray, mask: object, width: int) -> list[list[list[int]]]:
    columns = tags.shape[1]
    if mask is None:
        mask = np.ones((width, columns), bool)
    elif isinstance(mask, str):
        mask = np.arange(columns)[None] <= np.arange(columns - width, columns)[:, None]
    grid = np.broadcast_to(np.array(mask), (tags.shape[0], 1, width, columns))[:, 0]
    return [[sorted(int(t) for t in tags[b][grid[b, j]]) for j in range(width)] for b in range(tags.shape[0])]


@pytest.mark.parametrize("kind", ["contiguous", "rotating"])
@settings(max_examples=45, deadline=None)
@given(data=st.data())
def test_every_query_sees_exactly_its_tokens(kind, data):
    model = Rows(kind)
    lengths = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=3), label="prompts")
    chunk = data.draw(st.integers(1, 5), label="prefill chunk")
    made = [model.fresh(n, chunk) for n in lengths]
    model.cache = type(made[0][0]).merge([cache for cache, _ in made])
    model.rows = [list(tags) for _, tags in made]
    operations = ["step", "step", "block", "padded", "filter", "extend", "extract", "commit", "trim", "snapshot"]
    for operation in data.draw(st.lists(st.sampled_from(operations), max_size=8), label="operations"):
        apply(model, operation, data)
    counts = [1] * len(model.rows)
    model.extend_rows(counts)
    model.write(model.cache, model.rows, counts, 1)
    model.check_attend()


def apply(model: Rows, operation: str, data: st.DataObject) -> None:
    batch = len(model.rows)
    if operation in ("step", "block"):
        width = 1 if operation == "step" else data.draw(st.integers(2, 9))
        model.extend_rows([width] * batch)
        model.write(model.cache, model.rows, [width] * batch, width)
    elif operation == "padded":
        write_padded(model, data.draw(st.lists(st.integers(1, 9), min_size=batch, max_size=batch)), data)
    elif operation == "filter":
        keep = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3, unique=True))
        model.cache.filter(keep)
        model.rows = [model.rows[i] for i in keep]
        if model.kind == "contiguous":
            assert min(model.cache.left_padding.tolist()) == 0, "shared padding is dropped"
    elif operation == "extend" and batch < 5:
        cache, tags = model.fresh(data.draw(st.integers(0, 15)) or 1, data.draw(st.integers(1, 5)))
        model.cache.extend(cache)
        model.rows.append(tags)
    elif operation == "extract":
        index = data.draw(st.integers(0, batch - 1))
        single, row = model.cache.extract(index), list(model.rows[index])
        model_of_one = Rows(model.kind)
        for width in (1, data.draw(st.integers(1, 4)), 1):
            row.extend(row[0] // 1000 * 1000 + len(row) + i for i in range(width))
            model_of_one.write(single, [row], [width], width)
    elif operation == "commit":
        before = [list(row) for row in model.rows]
        model.cache.checkpoint()
        for _ in range(data.draw(st.integers(1, 2), label="forwards")):
            write_padded(model, data.draw(st.lists(st.integers(1, 4), min_size=batch, max_size=batch)), data)
        accepted = data.draw(st.lists(st.integers(0, 8), min_size=batch, max_size=batch))
        model.cache.commit(accepted)
        model.rows = [old + row[len(old) :][:n] for old, row, n in zip(before, model.rows, accepted, strict=True)]
    elif operation == "trim" and model.cache.is_trimmable():
        n = data.draw(st.integers(0, max(0, min(len(row) for row in model.rows) - 1)))
        assert model.cache.trim(n) == n
        model.rows = [row[: len(row) - n] for row in model.rows]
    elif operation == "snapshot":
        model.cache = type(model.cache).restore(model.cache.snapshot(), model.cache.layout)


def write_padded(model: Rows, counts: list[int], data: st.DataObject) -> None:
    """Tokens of each row, padded on the right; in chunks: the last may be one token wide, and short rows may end chunks
    before it."""
    chunk = data.draw(st.integers(1, 9))
    model.cache.prepare(lengths=counts, right_padding=[max(counts) - n for n in counts])
    for start in range(0, max(counts), chunk):
        width = min(chunk, max(counts) - start)
        now = [min(width, max(0, n - start)) for n in counts]
        model.extend_rows(now)
        model.write(model.cache, model.rows, now, width)
    model.cache.finalize()


def test_a_batch_that_never_saw_a_token_can_lose_rows():
    # mlx-lm's class answers with a negative column index and a mask of width 0.
    cache = BatchedContiguous([3, 0])
    cache.filter([0])
    assert cache.left_padding.tolist() == [3]
    assert cache.make_mask(1).shape[-1] == 1


def test_left_padded_first_input():
    for cache in (BatchedContiguous([2, 0]), Rotating.merge([Rotating(WINDOW), Rotating(WINDOW)])):
        if not isinstance(cache, BatchedContiguous):
            cache.prepare(left_padding=[2, 0])
        assert cache.offset.tolist() == [-2, 0]
        tags = mx.array([[7.0, 7.0, 1000.0], [2000.0, 2001.0, 2002.0]])[:, None, :, None]
        mask = cache.make_mask(3)
        keys, _ = cache.update_and_fetch(tags, tags)
        seen = visible(np.array(keys)[:, 0, :, 0], mask, 3)
        assert seen[0][2] == [1000]
        assert seen[1] == [[2000], [2000, 2001], [2000, 2001, 2002]]
        assert cache.offset.tolist() == [1, 3]
