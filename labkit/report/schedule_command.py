"""`labkit schedule`: run some requests together and show who was worked on when."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit import console
from labkit.console import JsonOption


def schedule(
    model: Annotated[str, typer.Argument(help="A name or folder that labkit can load.")] = "tiny-hybrid",
    requests: Annotated[int, typer.Option(help="Requests, of random lengths.", min=1)] = 6,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.", min=2)] = 96,
    answer: Annotated[int, typer.Option(help="Tokens of the longest answer.", min=1)] = 16,
    chunk: Annotated[int, typer.Option(help="Prompt tokens computed in one step at most.", min=1)] = 32,
    max_rows: Annotated[int, typer.Option(help="Rows that decode at a time.", min=1)] = 32,
    every: Annotated[int, typer.Option(help="Steps between two arrivals.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of lengths and prompts.")] = 0,
    svg: Annotated[
        Path | None, typer.Option(callback=console.output_file(), help="Draw the schedule into this file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run random requests on one engine and show the schedule: P a chunk of a prompt, d a decoded token, r a last token
    that is read, . waits."""
    from labkit.models import LoadError
    from labkit.report import timeline

    try:
        with console.stderr.status(f"loading {model}"):
            import labkit

            loaded = labkit.load(model)
        engine, names = _run(loaded, requests, longest, answer, chunk, max_rows, every, seed)
        if svg is not None:
            from labkit.report import style

            style.use()
            svg.write_text(style.svg(timeline.draw(engine.log, f"{requests} requests on {model}", names=names)))
    except (LoadError, ValueError, OSError) as error:
        console.fail(str(error), code=2)
    facts = timeline.facts(engine.log)
    record = {"model": model, "alone": engine.runs_alone, "facts": facts}
    record["steps"] = [step.as_record() for step in engine.log] if json else None
    summary = (
        f"{facts['steps']} steps, {facts['chunks']} of them chunks; {facts['mean_rows']:.1f} rows a decode step, "
        f"{facts['most_rows']} at most; between two tokens of a row at most "
        f"{facts['chunks_between_two_tokens_of_a_row']} chunk"
    )
    shown: list[Any] = [timeline.text(engine.log, names=names), "", summary]
    console.show(record, as_json=json, render=[*shown, *([engine.runs_alone] if engine.runs_alone else [])])


def _run(
    loaded: Any, requests: int, longest: int, answer: int, chunk: int, max_rows: int, every: int, seed: int
) -> tuple[Any, dict[str, str]]:
    """An engine that has worked on them, and how its requests are named."""
    import labkit

    engine, draw = labkit.Engine(loaded, prefill_chunk=chunk, max_rows=max_rows), random.Random(seed)
    known = min(loaded.tokenizer.vocab_size, loaded.model.vocab_size)
    names: dict[str, str] = {}
    step = 0
    while len(names) < requests or not engine.idle:
        if len(names) < requests and (every == 0 or step % every == 0):
            prompt = draw.choices(range(known), k=draw.randint(2, longest))
            request = engine.request(prompt, max_tokens=draw.randint(1, answer), ignore_eos=True)
            names[request.id] = f"{len(names) + 1}: {len(prompt)} + {request.params.max_tokens}"
            engine.submit(request)
            if every == 0:
                continue
        engine.step()
        step += 1
    return engine, names
