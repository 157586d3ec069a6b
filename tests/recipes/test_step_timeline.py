"""Reading a decode step's trace."""

from recipes.measured import step_timeline


def test_a_step_is_busy_where_a_kernel_runs_and_the_rest_is_gaps() -> None:
    def event(ts: float, dur: float, name: str, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event(0, 4, "custom_kernel_few_rows_0"),
        event(3, 3, "void mlx::core::cu::qmv<(int)4>(int)"),
        event(9, 2, "custom_kernel_few_rows_0"),
        event(41, 1, "set", "gpu_memset"),
        event(0, 50, "cudaGraphLaunch", "cuda_runtime"),
    ]
    found = step_timeline.read(events, 2)
    assert (found["device_us"], found["busy_us"]) == (21, 4.5)
    assert found["gaps"] == {"5": {"count": 0.5, "us": 1.5}, "100": {"count": 0.5, "us": 15}}
    assert [(row["name"], row["launches"], row["us"]) for row in found["kernels"]] == [
        *[("few_rows", 1, 3), ("qmv", 0.5, 1.5), ("set", 0.5, 0.5)]
    ]
    assert found["calls"] == [{"name": "cudaGraphLaunch", "launches": 0.5, "us": 25, "median_us": 50}]
