"""The kernel drawings say what the numbers say."""

from __future__ import annotations

import matplotlib.pyplot as plt
import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.report import kernel_pictures


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def _texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(plt.Text) if text.get_text()]


@pytest.mark.parametrize(
    ("stride", "each", "said"),
    [
        (4, 4, "1 line moved, 100% used"),
        (16, 16, "4 lines moved, 100% used"),
        (16, 2, "4 lines moved, 12% used"),
        (512, 4, "32 lines moved, 3% used; 24 more below"),
        (0, 4, "1 line moved, 3% used"),
    ],
)
def test_lanes_on_lines_counts_the_lines(stride: int, each: int, said: str) -> None:
    addresses = [lane * stride for lane in range(32)]
    figure = kernel_pictures.lanes_on_lines({"some": addresses}, "title", bytes_each=each)
    assert f"some\n{said}" in _texts(figure)


def test_traffic_bars_show_the_simulators_counts() -> None:
    source = "uint i = thread_position_in_grid.x; y[i] = x[i * 32 % 1024];"
    kernel = simulator.metal_kernel("strided", ["x"], ["y"], source)
    x = mx.zeros((1024,))
    shape = {"grid": (1024, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [x.shape], "output_dtypes": [x.dtype]}
    traffic = kernel.run(check=True, inputs=[x], **shape).traffic
    texts = _texts(kernel_pictures.traffic_bars({"strided": traffic}, "title", ["x"]))
    # 32 distinct lines; 1,024 requests of four bytes; each of the 32 simdgroups touches 32 lines.
    assert {"4", "128"} <= set(texts)
    assert texts.count("4") == 2


def test_parts_and_merge_draw_each_part_once() -> None:
    figure = kernel_pictures.column_parts({"general": [[(0, 5), (5, 9)], [(0, 3), (3, 3)]]}, 12, "title")
    assert sorted(text for text in _texts(figure) if text in ("0", "1")).count("1") == 1
    shares = _texts(kernel_pictures.merge([1.0, 3.0, float("-inf")], [4.0, 1.0, 0.0], "title"))
    assert shares.count("50%") == 2
    assert "0%" in shares
