"""Bytes out of a device with memory of its own, and back: few arrays cross, whatever the number of layers. Tried where
memory is shared, by saying that it is not, and counted."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from labkit import resources
from labkit.caches import Contiguous, Recurrent
from labkit.engine.prefix import blockfile, codec, crossing
from labkit.engine.prefix.record import Record, Tensor
from tests.engine.prefix.conftest import PROMPT, ROW, address, commit_all, decoded, identical, leaves, restored
from tests.engine.prefix.memory_file import MemoryFile
from tests.settled import falls_to, settled_memory


@pytest.fixture
def two_memories(monkeypatch):
    monkeypatch.setattr(codec, "shares_memory", lambda: False)


class Crossings:
    """Counts: arrays that leave (`out`), arrays that are made of the host's bytes (`into`), and evaluations."""

    def __init__(self, monkeypatch):
        self.out, self.into, self.evaluations = [], [], 0
        copied, array, evaluate = crossing.copied, mx.array, mx.eval

        def leaves_device(source):
            self.out.append(source)
            return copied(source)

        def enters_device(source, *rest):
            if isinstance(source, np.ndarray):
                self.into.append(source.nbytes)
            return array(source, *rest)

        def evaluated(*arrays):
            self.evaluations += 1
            return evaluate(*arrays)

        monkeypatch.setattr(crossing, "copied", leaves_device)
        # `mx.array` is a class that others test for.
        monkeypatch.setattr(crossing, "mx", _With(mx, array=enters_device, eval=evaluated))
        monkeypatch.setattr(codec, "mx", _With(mx, array=enters_device, eval=evaluated))


class _With:
    """A module with some names exchanged."""

    def __init__(self, module, **others):
        self._module = module
        self.__dict__ |= others

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.mark.parametrize("lent", [False, True])
def test_bytes_leave_a_device_in_few_new_arrays_and_no_buffer_of_a_cache(open_store, hybrid, monkeypatch, lent):
    """To ask for a buffer's bytes moves all of it to the host for good where memories are two."""
    caches, ours = decoded(hybrid), codec.Codec(hybrid.model.make_caches, hybrid.model.layouts)
    take = lambda: {name: tensor.whole for name, tensor in ours.both(caches, 3, 29, lent=lent)[0].items()}
    before = take()
    count = Crossings(monkeypatch)
    monkeypatch.setattr(codec, "shares_memory", lambda: False)
    after = take()
    assert after == before
    assert list(after) == list(before), "in the same order in a file"
    assert len(count.out) == 1, "one for all columns and all states of a dtype"
    held = {address(array) for cache in caches for array in leaves(cache)}
    assert not held & {address(array) for array in count.out}
    # However much there is, so much memory of the device and no more.
    monkeypatch.setattr(crossing, "TOGETHER", 1)
    count.out.clear()
    assert take() == before
    assert len(count.out) == len(before)
    assert not held & {address(array) for array in count.out}
    store = open_store(hybrid)
    assert store.save_private("row", ROW, caches).stored
    assert identical(store.load_private("row").restore(), caches)


@pytest.mark.parametrize("together", [1, 300, 64 << 20])
def test_what_crosses_comes_back_whatever_the_kind(open_store, witness, two_memories, monkeypatch, together):
    monkeypatch.setattr(crossing, "TOGETHER", together)
    store = open_store(witness)
    commit_all(store, witness, PROMPT)
    for _ in range(2):
        assert restored(store, witness, PROMPT) == 40
        store.flush(600)
        store.release_memory()
    assert restored(store, witness, PROMPT[:20]) == 16


def large_row() -> tuple[codec.Codec, list]:
    """Caches of the 35B-A3B shape for one row behind 2,304 tokens: 30 recurrent layers, 10 of attention."""
    config = json.loads((resources.data_folder() / "configs" / "qwen3.6-35b-a3b.json").read_text())
    config = config.get("text_config", config)
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    made = []
    for layer in range(config["num_hidden_layers"]):
        if (layer + 1) % config["full_attention_interval"]:
            cache = Recurrent(2)
            cache[0] = mx.random.normal((1, 3, 2 * keys + heads * width)).astype(mx.bfloat16)
            cache[1] = mx.random.normal((1, heads, width, width))
        else:
            cache = Contiguous()
            shape = (1, config["num_key_value_heads"], 2304, config["head_dim"])
            cache.update_and_fetch(*(mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)))
        made.append(cache)
    mx.eval([cache.state for cache in made])
    layouts = [cache.layout for cache in made]
    fresh = lambda: [
        Recurrent(2, layout) if isinstance(cache, Recurrent) else Contiguous(layout)
        for cache, layout in zip(made, layouts, strict=True)
    ]
    return codec.Codec(fresh, layouts), made


def test_a_pause_of_a_large_row_and_its_way_back_take_a_handful_of_arrays(two_memories, monkeypatch):
    ours, caches = large_row()
    count = Crossings(monkeypatch)
    tensors, scalars = ours.both(caches, 0, 2304, lent=True)
    assert len(tensors) == 80
    assert len(count.out) == 2, "16 bits, and 32"
    assert sum(array.nbytes for array in count.out) < 1.0001 * sum(tensor.nbytes for tensor in tensors.values())
    assert count.evaluations == 0, "each that leaves is waited for, and nothing else"
    file = blockfile.Encoded(Record(tensors, scalars))
    disk = MemoryFile(file.size)
    file.write(disk.put)
    record = blockfile.load(file.size, disk.fill)
    back = ours.assemble([record], record, 2304)
    assert len(count.into) == 2, "one for each 64 MiB of the file"
    assert sum(count.into) == record.nbytes
    assert count.evaluations == 3
    assert identical(back, caches)
    # A cache's arrays are the device's own: who holds one does not hold all that came with it.
    before, one = settled_memory(), back[0].cache[0]
    held = sum(array.nbytes for cache in back for array in leaves(cache)) - one.nbytes
    del back
    assert falls_to(before - held + 100_000)


def test_neighbours_of_several_dtypes_are_sent_as_one_and_others_alone(monkeypatch):
    count = Crossings(monkeypatch)
    data = memoryview(bytes(range(200)))
    tensors = {
        "a": Tensor("uint8", (1, 3, 1), data[0:3]),
        "odd": Tensor("float32", (1, 2, 1), data[3:11]),  # no place for numbers of four bytes
        "b": Tensor("bfloat16", (1, 4, 2), data[11:27]),
        "elsewhere": Tensor("int32", (1, 1, 1), bytes(data[100:104])),
        "pieces": Tensor("uint16", (1, 2, 2), (data[50:54], data[90:94])),
        "none": Tensor("float32", (1, 0, 4), b""),
    }
    found = crossing.sent({name: [tensor] for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert bytes(memoryview(mx.array(found[name]).view(mx.uint8))) == bytes(tensor.whole), name
    assert sorted(count.into) == [3, 4, 8, 24]
