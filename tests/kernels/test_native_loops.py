"""The loops of the native target: panels of every form, bits that do not depend on the rows beside, shared work."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels.quantized_matmul import Packed
from labkit.kernels.quantized_matmul.panels import FORM, WIDTH, Panels
from labkit.kernels.workers import Workers

FORMS = {
    "4 bits, bfloat16 scales": lambda w: Packed.quantize(w.astype(mx.bfloat16), 64, 4),
    "4 bits, float32 scales": lambda w: Packed.quantize(w, 32, 4),
    "8 bits, bfloat16 scales": lambda w: Packed.quantize(w.astype(mx.bfloat16), 128, 8),
    "8 bits, float32 scales": lambda w: Packed.quantize(w, 64, 8),
    "bfloat16": lambda w: w.astype(mx.bfloat16),
    "float16": lambda w: w.astype(mx.float16),
    "float32": lambda w: w,
}


def times(x: np.ndarray, panels: Panels, expert: int = 0) -> np.ndarray:
    from labkit.kernels.quantized_matmul.loops import ready

    matrix, place = panels.describe(), lambda array: array.ctypes.data
    y = np.full((x.shape[0], panels.outputs), np.nan, np.float32)
    ready(matrix[FORM]).ctypes(
        place(x), x.shape[1], x.shape[0], place(panels.data), place(matrix), expert, 0, panels.outputs // WIDTH,
        place(y), panels.outputs,
    )  # fmt: skip
    return y[:, : panels.n]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(40, 256), (3, 128), (2, 24, 128)], ids=str)
def test_panels_of_every_form(form, shape):
    mx.random.seed(1)
    weights = FORMS[form](mx.random.normal(shape))
    exact = weights.dequantize() if isinstance(weights, Packed) else weights.astype(mx.float32)
    exact = np.array(exact).reshape(-1, *shape[-2:])
    panels = Panels.pack(weights)
    x = np.random.RandomState(0).randn(100, shape[-1]).astype(np.float32)
    for expert in range(panels.experts):
        whole = times(x, panels, expert)
        np.testing.assert_allclose(whole, x @ exact[expert].T, atol=2e-4)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 97):
            np.testing.assert_array_equal(times(x[:rows].copy(), panels, expert), whole[:rows])


def test_panels_take_what_the_checkpoint_takes():
    packed = Packed.quantize(mx.random.normal((256, 512)).astype(mx.bfloat16), 64, 4)
    assert Panels.pack(packed).data.nbytes == packed.nbytes
    plain = mx.random.normal((256, 100)).astype(mx.bfloat16)
    assert Panels.pack(plain).data.nbytes == plain.nbytes


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_an_embedding(form):
    from labkit.kernels.quantized_matmul.loops import take_rows

    weights = FORMS[form](mx.random.normal((37, 128)))
    exact = np.array(weights.dequantize() if isinstance(weights, Packed) else weights.astype(mx.float32))
    panels, numbers = Panels.pack(weights), np.array([0, 36, 7, 8, 15, 16, 7])
    rows, matrix = np.empty((numbers.size, 128), np.float32), panels.describe()
    take_rows.call(numbers.ctypes.data, numbers.size, panels.data.ctypes.data, matrix.ctypes.data, rows.ctypes.data)
    np.testing.assert_allclose(rows, exact[numbers], atol=1e-6)


def test_exp_is_within_two_units_in_the_last_place():
    import numba

    from labkit.kernels.fused.loops import exp

    @numba.njit
    def every(x, y):
        for i in range(x.size):
            y[i] = exp(x[i])

    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    y = np.empty_like(x)
    every(x, y)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(y - exact) / exact) < 2 * 2**-23
    every(np.array([-np.inf, np.inf], np.float32), y)
    assert y[0] < 1e-37
    assert y[1] > 1e38


def test_workers_do_each_task_once_and_pass_errors_on():
    done, lock = [], threading.Lock()

    def task(begin: int, end: int) -> None:
        with lock:
            done.extend(range(begin, end))

    workers = Workers(3)
    workers.share(task, 100, 7)
    assert sorted(done) == list(range(100))

    def wrong(number: int) -> None:
        if number == 5:
            raise ZeroDivisionError("five")

    with pytest.raises(ZeroDivisionError, match="five"):
        workers.run(wrong, 10)
    with pytest.raises(ValueError, match="at least one thread"):
        Workers(0)


def test_of_several_that_compile_a_function_one_does_it():
    from labkit.kernels.compiled import _alone

    order, waits = [], threading.Event()

    def other():
        waits.set()
        with _alone(times):
            order.append("other")

    thread = threading.Thread(target=other)
    with _alone(times):
        thread.start()
        waits.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


def test_whoever_waits_for_a_compilation_is_told_once_a_version(tmp_path, monkeypatch, caplog):
    from labkit.devices import CACHE_VARIABLE
    from labkit.kernels.compiled import _folder

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with caplog.at_level("INFO", logger="labkit"):
        first = _folder.__wrapped__()
        assert [record.message for record in caplog.records] == [
            "loops for this processor are compiled, once for this version: half a minute"
        ]
        assert _folder.__wrapped__() == first
    assert len(caplog.records) == 1


def test_without_a_cache_folder_the_reason_and_the_remedy_are_told(tmp_path, monkeypatch, caplog):
    from labkit.devices import CACHE_VARIABLE
    from labkit.kernels.compiled import _folder

    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    assert _folder.__wrapped__() is None
    assert CACHE_VARIABLE in caplog.text
