"""What makes weights the same, and what does not."""

from __future__ import annotations

import json

import mlx.core as mx

from labkit.parity.fingerprints import trunk_fingerprint


def _write(folder, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(folder / name), part)
    return trunk_fingerprint(folder)


def test_only_the_trunks_tensors_count(tmp_path):
    trunk = {"a.weight": mx.arange(6, dtype=mx.uint32).reshape(2, 3), "b.scales": mx.ones(4, dtype=mx.bfloat16)}
    plain = _write(tmp_path / "plain", trunk)
    assert _write(tmp_path / "again", trunk) == plain
    assert _write(tmp_path / "heads", trunk | {"mtp.x": mx.ones(2), "vision_tower.y": mx.ones(2)}) == plain
    assert _write(tmp_path / "shards", trunk, shards=2) == plain
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"rms_norm_eps": 1}))
    assert trunk_fingerprint(tmp_path / "plain") == plain


def test_names_shapes_types_and_bits_count(tmp_path):
    base = {"a": mx.arange(6, dtype=mx.uint32).reshape(2, 3), "b": mx.ones(4, dtype=mx.bfloat16)}
    changed = [
        base | {"a": base["a"].reshape(3, 2)},
        base | {"a": base["a"].astype(mx.int32)},
        base | {"a": base["a"] + mx.array([0, 0, 1], dtype=mx.uint32)},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"]},
    ]
    marks = [_write(tmp_path / str(index), tensors) for index, tensors in enumerate([base, *changed])]
    assert len(set(marks)) == len(marks)
