"""Golden files: nothing lost on the way, nothing foreign let in."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.forms import Form
from labkit.parity.goldens import GoldenError, GoldenSide, golden_for, write_golden
from labkit.parity.predictions import BestLogits, FullLogits


class Canned:
    """A side that answers from a table, in blocks of uneven width."""

    name, arithmetic, form, vocab_size = "canned", "float32", Form.incremental(3), 70

    def __init__(self, windows):
        rng = np.random.default_rng(7)
        self.answers = {w.tobytes(): rng.normal(0, 4, (len(w) - 1, 70)).astype(np.float32) for w in windows}

    def predict(self, window):
        logits = self.answers[window.tobytes()]
        for start in range(0, len(logits), 4):
            yield FullLogits(logits[start : start + 4])


@pytest.fixture
def windows():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 70, length).astype(np.int32) for length in (12, 23, 9)]


@pytest.fixture
def stored(tmp_path, windows):
    def write(**options):
        known = {"fingerprint": "abc", "model": "canned", "versions": {"canned": "1"}, "best": 5, "full_every": 6}
        return write_golden(tmp_path / "deep" / "g.safetensors", Canned(windows), windows, **(known | options))

    return write


def test_everything_comes_back(stored, windows):
    side, golden = Canned(windows), GoldenSide(stored())
    assert (golden.name, golden.arithmetic, golden.vocab_size) == ("canned", "float32", 70)
    assert golden.form == Form.incremental(3)
    for window, mine in zip(windows, golden.windows, strict=True):
        np.testing.assert_array_equal(window, mine)
        answers = FullLogits(side.answers[window.tobytes()])
        expected = BestLogits.of(answers, window[1:].astype(np.int64), 5)
        position = 0
        for part in golden.predict(mine):
            stop = position + len(part)
            if isinstance(part, FullLogits):
                assert stop == position + 1
                assert stop % 6 == 0
                np.testing.assert_array_equal(part.logits, answers.logits[position:stop])
            else:
                for name in ("ids", "values", "normaliser", "label"):
                    np.testing.assert_array_equal(getattr(part, name), getattr(expected.cut(position, stop), name))
            position = stop
        assert position == len(window) - 1


@pytest.mark.parametrize("length", [1, 5, 16, 17, 20])
def test_a_beginning_of_a_window_is_a_window(stored, windows, length):
    parts = list(GoldenSide(stored()).predict(windows[1][: length + 1]))
    assert sum(map(len, parts)) == length


@pytest.mark.parametrize("positions", [1, 10, 11, 12, 33, 34, 40, 41])
def test_the_first_positions_are_whole_windows_and_a_part(stored, positions):
    golden = GoldenSide(stored())
    windows = golden.first(positions)
    assert sum(len(window) - 1 for window in windows) == positions
    assert sum(len(part) for window in windows for part in golden.predict(window)) == positions


@pytest.mark.parametrize("positions", [0, -1, 42])
def test_more_than_it_holds_is_refused(stored, positions):
    with pytest.raises(GoldenError, match=f"holds 41 positions, not {positions}"):
        GoldenSide(stored()).first(positions)


def test_no_full_positions_if_none_are_asked_for(stored, windows):
    (only,) = GoldenSide(stored(full_every=0)).predict(windows[0])
    assert len(only) == 11


def test_foreign_tokens_are_refused(stored, windows):
    golden = GoldenSide(stored())
    for foreign in (windows[0][::-1], np.append(windows[0], 1)):
        with pytest.raises(GoldenError, match="holds no window that begins with"):
            list(golden.predict(foreign.astype(np.int32)))


def test_a_golden_is_found_by_its_weights(probe_folder):
    found = golden_for(trunk_fingerprint(probe_folder), "torch-whole")
    assert found is not None
    assert found.form == Form()
    assert golden_for("no such weights", "torch-whole") is None
    assert golden_for(trunk_fingerprint(probe_folder), "no-such-kind") is None


def test_other_weights_are_refused(stored):
    golden = GoldenSide(stored())
    golden.require("abc")
    with pytest.raises(GoldenError, match="made from other weights"):
        golden.require("abd")


def test_every_position_can_be_kept_whole(stored, windows):
    parts = list(GoldenSide(stored(full_every=1)).predict(windows[2]))
    assert [type(part) for part in parts] == [FullLogits] * 8


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign"])
def test_a_damaged_golden_is_named(stored, damage, tmp_path):
    from safetensors.numpy import save_file

    path = stored()
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        save_file({"x": np.zeros(3)}, path)
    with pytest.raises(GoldenError, match=r"g\.safetensors"):
        GoldenSide(path)


def test_an_oracle_that_fails_leaves_no_half_golden(tmp_path, windows):
    class Failing(Canned):
        def predict(self, window):
            yield from list(super().predict(window))[:-1]
            raise RuntimeError("the oracle broke down")

    with pytest.raises(RuntimeError, match="broke down"):
        write_golden(
            tmp_path / "g.safetensors", Failing(windows), windows, fingerprint="", model="", versions={}, full_every=2
        )
    assert not list(tmp_path.iterdir())
