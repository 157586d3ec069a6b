"""Where a decode step's time goes on an NVIDIA GPU: the host that submits, kernels as they ran, gaps between them.

    python -m recipes.measured.step_timeline --out data/measured --commit SHA [--persistent layers] [--lock FILE]

`step_profile` times each kernel alone; this is the step as it runs, seen by CUPTI through torch's profiler; with
`--prompt`, a prefill too. Several processes may be begun together, each with settings of its own
(`MLX_MAX_OPS_PER_BUFFER` ...): with the same `--lock` they compile side by side and measure one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.kernels.device_clock import ON_DEVICE, busy_us, device_events, profiler, trace_of
from recipes.measured.step_profile import short
from recipes.measured.table import Table

SHAPE = "qwen3.6-35b-a3b"
WARM_UP, STEPS, TRACED, TURNS = 12, 64, 8, 3
ON_HOST = ("cuda_runtime", "cuda_driver")
SETTINGS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_CUDA_GRAPH_CACHE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--prompt", type=int, nargs="*", default=[], help="lengths of prompts to read too")
    parser.add_argument("--chunk", type=int, default=4096, help="of these")
    parser.add_argument("--persistent", default="off")
    parser.add_argument("--variant", nargs="*", default=[], metavar="NAME=VALUE", help="further switches")
    parser.add_argument("--replay", action="store_true", help="steps by a recording: one CUDA graph a token")
    parser.add_argument("--lock", type=Path, help="measure while holding it")
    parser.add_argument("--name", default="h200_step_timeline", help="of the file")
    arguments = parser.parse_args()

    from labkit.engine.replay import Replays
    from labkit.kernels.recording import machine_here
    from labkit.measure.end_to_end.subject import open_subject
    from labkit.models.hybrid import Variants

    with _held(arguments.lock):
        subject = open_subject(SHAPE, graph="specialised", layers=arguments.layers)
        chosen = {"persistent": arguments.persistent} | dict(each.split("=", 1) for each in arguments.variant)
        model = subject.with_variants(Variants(**{name: _value(text) for name, text in chosen.items()}))
    replays = Replays(model, machine_here() if arguments.replay else None, patience=0)
    for context in arguments.context:  # kernels are compiled while others may measure
        _drive(model, context, WARM_UP, lambda: None, replays)
    table = Table(arguments.out / f"{arguments.name}.json", arguments.commit)
    with _held(arguments.lock):
        for context in arguments.context:
            table.add({"context": context, **_rates(model, context, replays), **_traced(model, context, replays)})
            _say(arguments, table.rows[-1])
        for length in arguments.prompt:
            table.add({"prompt": length, "chunk": arguments.chunk, **_prefill(model, length, arguments.chunk)})
            _say_prefill(table.rows[-1])
    table.about |= {
        "shape": SHAPE,
        "layers": arguments.layers,
        "persistent": arguments.persistent,
        "variant": arguments.variant,
        "replay": arguments.replay,
        "recorded": {"recordings": replays.recorded, "seconds": replays.seconds, "bytes": replays.nbytes},
        "refused": list(replays.refused.values()),
        "settings": {name: os.environ.get(name) for name in SETTINGS},
    }
    table.write()


def _value(text: str) -> bool | str:
    return {"True": True, "False": False}.get(text, text)


@contextlib.contextmanager
def _held(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            mx.synchronize()
            fcntl.flock(file, fcntl.LOCK_UN)


def _drive(model: Any, context: int, steps: int, before: Callable[[], None], replays: Any) -> dict[str, float]:
    """Seconds a step, and how many of them the host spends submitting the step after and waiting for a token."""
    from labkit.engine.sampling import Choice
    from labkit.measure.direct import DirectRow
    from labkit.measure.end_to_end.filled import Filled

    caches = Filled(model.layouts, context).into(model.make_caches())
    row, built, sent, waited = DirectRow(model, caches, context, replays), [], [], []

    def launch(pending: Choice) -> Choice:
        begin = time.perf_counter()
        choice = row.build(pending)
        middle = time.perf_counter()
        row.begin(choice)
        built.append(middle - begin)
        sent.append(time.perf_counter() - middle)
        return choice

    pending = launch(Choice.given([1]))
    for _ in range(1, WARM_UP):
        following = launch(pending)
        pending.token.tolist()
        pending = following
    mx.synchronize()
    before()
    built.clear()
    sent.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        following = launch(pending)
        middle = time.perf_counter()
        pending.token.tolist()
        waited.append(time.perf_counter() - middle)
        pending = following
    seconds = time.perf_counter() - begin
    pending.token.tolist()
    mx.synchronize()
    return {
        "us": 1e6 * seconds / steps,
        "build_us": 1e6 * statistics.median(built),
        "submit_us": 1e6 * statistics.median(sent),
        "wait_us": 1e6 * statistics.median(waited),
        "replayed": row.replayed,
    }


def _rates(model: Any, context: int, replays: Any) -> dict[str, float]:
    turns = [_drive(model, context, STEPS, lambda: None, replays) for _ in range(TURNS)]
    best = min(turns, key=lambda turn: turn["us"])
    return {"tokens_per_second": 1e6 / best["us"], "turns_us": [turn["us"] for turn in turns], **best}


def _traced(model: Any, context: int, replays: Any) -> dict[str, Any]:
    window = profiler()
    timed = _drive(model, context, TRACED, window.start, replays)
    return {"traced_us": timed["us"], **read(trace_of(window), TRACED)}


def _prefill(model: Any, length: int, chunk: int) -> dict[str, Any]:
    from labkit.measure.end_to_end import LabkitSide

    side, tokens = LabkitSide(model, chunk=chunk), mx.random.randint(0, 1000, (length,))
    side.prefill(tokens[: 2 * chunk])
    seconds = min(side.prefill(tokens) for _ in range(2))
    window = profiler()
    window.start()
    side.prefill(tokens)
    return {"seconds": seconds, "tokens_per_second": length / seconds, **read(trace_of(window), 1)}


def read(events: list[dict], steps: int) -> dict[str, Any]:
    """A trace's events (Chrome's format, microseconds) -> what a step holds on average.

    Returns:
        device_us: from the first kernel's begin to the last one's end. busy_us: with at least one kernel running.
        kernels: by name, the launches, summed microseconds and median of one; calls: of the host, likewise.
        gaps: between kernels, how many of how many microseconds (up to 2, 5, 20, 100, more) and their sum.
    """
    device = device_events(events)
    if not device:
        raise ValueError("the trace holds no kernel: CUPTI saw nothing of this process")
    gaps, end = defaultdict(lambda: [0, 0.0]), device[0].begin
    for event in device:
        if event.begin > end:
            width = event.begin - end
            bound = next((b for b in (2, 5, 20, 100) if width <= b), "more")
            gaps[bound][0] += 1
            gaps[bound][1] += width
        end = max(end, event.end)
    return {
        "device_us": (end - device[0].begin) / steps,
        "busy_us": busy_us(device) / steps,
        "gaps": {str(bound): {"count": n / steps, "us": us / steps} for bound, (n, us) in gaps.items()},
        "kernels": _by_name(events, ON_DEVICE, steps),
        "calls": _by_name(events, ON_HOST, steps),
    }


def _by_name(events: list[dict], kinds: tuple[str, ...], steps: int) -> list[dict]:
    found = defaultdict(list)
    for event in events:
        if event.get("cat") in kinds:
            found[short(event["name"])].append(event["dur"])
    rows = [
        {"name": name, "launches": len(us) / steps, "us": sum(us) / steps, "median_us": statistics.median(us)}
        for name, us in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _say(arguments: argparse.Namespace, row: dict) -> None:
    print(
        f"== {arguments.name}, persistent {arguments.persistent}, {row['context']} tokens: "
        f"{row['tokens_per_second']:.1f} tok/s; a step {row['us']:.0f} us (building {row['build_us']:.0f}, submitting "
        f"{row['submit_us']:.0f}, waiting {row['wait_us']:.0f}); traced {row['traced_us']:.0f}"
    )
    _say_trace(row)


def _say_prefill(row: dict) -> None:
    print(f"== a prompt of {row['prompt']} in chunks of {row['chunk']}: {row['tokens_per_second']:.0f} tok/s")
    _say_trace(row)


def _say_trace(row: dict) -> None:
    print(f"   device {row['device_us']:.0f} us, busy {row['busy_us']:.0f}")
    for bound, gap in row["gaps"].items():
        print(f"   gaps up to {bound} us: {gap['count']:.1f} of {gap['us']:.0f} us together")
    for kind in ("kernels", "calls"):
        for each in row[kind][:24]:
            counted = f"{each['launches']:6.1f} x {each['median_us']:7.2f}"
            print(f"   {kind[:-1]} {each['us']:8.1f} us  {counted}  {each['name']}", flush=True)


if __name__ == "__main__":
    main()
