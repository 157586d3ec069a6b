"""A pause and its resume against the bytes that they move: both sides move the same ones."""

from __future__ import annotations

import labkit
from labkit.measure import pausing
from tests.tiny_models import write_checkpoint


def test_both_sides_move_the_same_bytes(tmp_path, monkeypatch):
    loaded = labkit.load(write_checkpoint(tmp_path / "llama", "llama"))
    alone, moved = [], pausing._moved
    monkeypatch.setattr(pausing, "_moved", lambda *a: (alone.append(result := moved(*a)), result)[1])
    costs, resume = [], pausing._Timed._watched

    def watched(self, name, call):
        timed = resume(self, name, call)

        def noted(id):
            result = timed(id)
            costs.append((name, call.__self__.costs.moved_bytes, self.took[name]))
            return result

        return noted

    monkeypatch.setattr(pausing._Timed, "_watched", watched)
    cost = pausing.pause_cost(loaded, tmp_path / "folder", 40, width=16, rounds=3)
    assert [name for name, *_ in costs] == ["pause", "resume"] * 3
    assert [size for size, *_ in alone] == sorted(size for size, *_ in alone), "a row that grows"
    assert 0 < cost.bytes <= costs[-1][1] / 6, "valid columns, where the engine counts whole buffers"
    assert cost.tokens == 40
    assert cost.ratio_low <= cost.ratio <= cost.ratio_high
    assert all(value > 0 for value in cost.as_record().values())
    assert not (tmp_path / "folder" / "floor").exists()
