"""`labkit parity replay`: continuous batching against mlx-lm's replay of the engine's log."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from labkit import console
from labkit.console import JsonOption

DEFECT, MISUSE = 1, 2


def replay(
    model: Annotated[str, typer.Argument(help="A name or folder that labkit can load.")] = "tiny-hybrid",
    schedules: Annotated[int, typer.Option(help="Random schedules to run.", min=1)] = 3,
    rows: Annotated[int, typer.Option(help="Rows that decode at a time.", min=1)] = 8,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=1)] = 24,
    answer: Annotated[int, typer.Option(help="Tokens of the longest answer.", min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first schedule.")] = 0,
    graph: Annotated[
        Literal["adapter", "specialised", "native"], typer.Option(help="Whose graph the engine runs.")
    ] = "adapter",
    tolerance: Annotated[
        float,
        typer.Option(
            help="For graphs other than the adapter's: allowed difference, as a share of a vector's largest logit."
        ),
    ] = 1e-3,
    json: JsonOption = False,
) -> None:
    """Run random schedules of requests on labkit's engine, and let mlx-lm repeat each log on its own model and caches.

    The adapter's graph must agree bit for bit, logits and cache states, at every step; other graphs within the
    tolerance. Exit code 0: it does. 1: a defect. 2: the comparison could not be made.
    """
    from labkit.models import LoadError
    from labkit.parity.replay import Oracle, Recorder, Verdict, random_schedule, run, tolerant_replay
    from labkit.parity.replay import replay as exact_replay

    total = Verdict()
    try:
        import labkit

        with console.stderr.status(f"loading {model}"):
            loaded = labkit.load(model, graph=graph)
            oracle = labkit.load(model, graph="adapter").model.module
        for number in range(seed, seed + schedules):
            schedule = random_schedule(number, rows=rows, longest=longest, answer=answer)
            with console.stderr.status(f"schedule {number}: {len(schedule.arrivals)} requests"):
                engine, recorder = Recorder.engine(
                    loaded, prefill_chunk=schedule.chunk, max_rows=schedule.max_rows, pack_prompts=schedule.pack
                )
                run(engine, schedule.arrivals)
                against = Oracle(oracle, grid=schedule.chunk)
                if graph == "adapter":
                    total += exact_replay(engine.log, recorder.forwards, against)
                else:
                    total += tolerant_replay(engine.log, recorder.forwards, against, tolerance)
    except (LoadError, ValueError, OSError) as error:
        console.fail(str(error), code=MISUSE)
    record = {"model": model, "graph": graph, "schedules": schedules, **total.record()}
    shown = [(name, value) for name, value in record.items() if name not in ("faults", "operations")]
    shown += [(f"caches: {name}", count) for name, count in record["operations"].items()]
    table = console.table(
        f"{model} against mlx-lm's replay",
        ["what", "found"],
        [(name.replace("_", " "), str(value)) for name, value in shown],
    )
    console.show(record, as_json=json, render=table)
    if not total.agrees:
        console.fail("defect: " + "; ".join(total.faults[:3]), code=DEFECT)
