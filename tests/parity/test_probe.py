"""The probe: the same numbers everywhere, packed or dense, and the properties that make mistakes visible."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.probe import GROUP, Matrix, probe_weights, probe_windows, write_probe


def test_its_weights_never_change(probe_folder, goldens, tmp_path):
    """Stored goldens belong to exactly these weights; only raw bits of PCG64 enter them."""
    assert trunk_fingerprint(probe_folder) == goldens["whole"].fingerprint
    assert trunk_fingerprint(write_probe(tmp_path, seed=1)) != goldens["whole"].fingerprint


def test_packed_and_dense_are_the_same_numbers():
    kinds = set()
    for value in probe_weights().values():
        if isinstance(value, Matrix):
            kinds.add((value.bits, value.codes.ndim))
            parts = (mx.array(part) for part in (value.packed(), value.scales, value.biases))
            np.testing.assert_array_equal(np.array(mx.dequantize(*parts, GROUP, value.bits)), value.dense())
            # Groups must differ, or a mixed-up group would not show
            assert len(np.unique(value.scales)) > 1 or value.scales.size <= 2
    assert kinds == {(4, 2), (4, 3), (8, 2)}


def test_no_number_is_rounded_on_its_way():
    """Few bits in every weight: float32 holds them exactly, with a norm's one added or taken away."""
    for value in probe_weights().values():
        plain = value.dense() if isinstance(value, Matrix) else value
        np.testing.assert_array_equal((plain.astype(np.float64) - 1).astype(np.float32) + np.float32(1), plain)


def test_one_key_head_is_as_short_as_the_l2_norms_epsilon(probe_model, monkeypatch):
    from mlx_lm.models import qwen3_5

    lengths = []
    normalise = qwen3_5.normalize_qk

    def watch(q, k, **settings):
        lengths.append(np.linalg.norm(np.array(k), axis=-1)[0])
        return normalise(q, k, **settings)

    monkeypatch.setattr(qwen3_5, "normalize_qk", watch)
    mx.eval(probe_model(mx.array(probe_windows(1, 60)[0][:-1])[None]))
    short, long = np.median(np.concatenate(lengths), axis=0)
    assert 2e-4 < short < 5e-3
    assert long > 0.3
