"""The draw's configurations against each other, mlx-lm's sampler and torch's, at a vocabulary of 248,320."""

from __future__ import annotations

import itertools
from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.quantized_matmul.bench import COPY_RATE, attempt, print_rows, torch_us
from labkit.kernels.queued import copies_for, queued
from labkit.kernels.sampling import reference
from labkit.kernels.sampling.draw import SAMPLE_CHUNKS, SAMPLE_ROWS, sample_chunks_call, sample_rows_call

VOCABULARY = 248_320

# What real requests ask for, then what makes the search hard.
SETTINGS = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "top-k 20, top-p 0.95, min-p 0.05": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 1 of a flat row": {"temperature": 1.0, "top_k": 1, "flat": True},
}
# Threads of (`sample_chunks`, `sample_rows`); the first is what `sample` takes.
CONFIGURATIONS = ((256, 1024), (128, 1024), (512, 1024), (1024, 1024), (256, 512), (256, 256))

# Predicted before any run, in microseconds a launch: chunks take 40 instructions a token, spread over the device; at
# one row the host's 3.5 us cover them; a row's search is a few dependent rounds of 2 us on one multiprocessor.
PREDICTED = {"sample_chunks": {1: 4, 8: 10, 32: 35}, "sample_rows": {1: 8, 8: 9, 32: 9}}


def logits_of(rows: int, flat: bool = False) -> mx.array:
    """[rows, VOCABULARY] bf16: a broad bulk and a few likely tokens, as a trained model's; or nearly equal ones."""
    rng = np.random.default_rng(rows)
    x = rng.normal(0, 0.05 if flat else 2.0, (rows, VOCABULARY)).astype(np.float32)
    if not flat:
        likely = rng.integers(0, VOCABULARY, (rows, 40))
        np.put_along_axis(x, likely, 16 - 0.25 * np.arange(40, dtype=np.float32)[None], axis=-1)
    return mx.array(x).astype(mx.bfloat16)


def rows(quick: bool = True) -> list[dict]:
    """One row a kernel, setting and configuration. `us` has the host's cost of a launch (about 3.5 us) inside;
    `device_us`, where it can be had, has not, and the rates are its. What fails is printed and left out."""
    rounds = 3 if quick else 9
    found = []
    for batch, (label, setting) in itertools.product((1, 8, 32), SETTINGS.items()):
        sweep = batch == 1 and "min_p" in setting
        for chunk_threads, row_threads in CONFIGURATIONS if sweep else CONFIGURATIONS[:1]:
            what = f"{batch} rows, {label}, threads {chunk_threads} and {row_threads}"
            measure = lambda b=batch, l=label, s=setting, c=chunk_threads, r=row_threads: _draw(b, l, s, c, r, rounds)
            found += attempt(what, measure) or []
        found += attempt(f"baselines {label}", lambda b=batch, l=label, s=setting: _baselines(b, l, s, rounds)) or []
    return found


def _draw(batch, label, setting, chunk_threads, row_threads, rounds) -> list[dict]:
    setting = dict(setting)
    first = logits_of(batch, setting.pop("flat", False))
    heat = setting["temperature"]
    filters = [setting.get("top_k", 0), setting.get("top_p", 1.0), setting.get("min_p", 0.0)]
    logits = [first + 0 for _ in range(min(64, copies_for(first.nbytes)))]
    mx.eval(logits)
    seeds = [mx.arange(i * batch, (i + 1) * batch).astype(mx.uint64) for i in range(len(logits))]
    pairs = list(zip(logits, seeds, strict=True))
    chunk_calls = [sample_chunks_call(x, heat, s, 5, threads=chunk_threads) for x, s in pairs]
    row_calls = [
        sample_rows_call(x, heat, s, 5, None, *filters, SAMPLE_CHUNKS(**c), chunk_threads, row_threads)
        for (x, s), c in zip(pairs, chunk_calls, strict=True)
    ]
    mx.eval([call["inputs"] for call in row_calls])
    drawn = SAMPLE_ROWS(**row_calls[0])[0]
    wrong = (drawn != reference.sample_rows(SAMPLE_ROWS.launch(**row_calls[0]))[0]).sum().item()
    found = []
    for kernel, calls, threads in ((SAMPLE_CHUNKS, chunk_calls, chunk_threads), (SAMPLE_ROWS, row_calls, row_threads)):
        work = [partial(kernel, **c) for c in calls]
        seconds = queued(work, launches=64, rounds=rounds)
        nbytes = first.nbytes if kernel is SAMPLE_CHUNKS else 0
        row = {
            "name": kernel.name,
            "shape": f"{batch} rows, {label}",
            "configuration": f"threads {threads}, chunks {4 * chunk_threads}",
            "us": 1e6 * seconds,
            "GB/s": nbytes / seconds / 1e9 if nbytes else None,
            "floor_us": 1e6 * nbytes / COPY_RATE if nbytes else None,
            "predicted_us": PREDICTED[kernel.name][batch],
            "other_tokens": wrong,
        }
        found.append((row, work))
    return add_device_times(found)


def _baselines(batch, label, setting, rounds) -> list[dict]:
    """mlx-lm's sampler with one setting for all rows, and torch's operations."""
    from mlx_lm.sample_utils import make_sampler

    options = {key: value for key, value in setting.items() if key not in ("flat", "temperature")}
    logits = logits_of(batch, setting.get("flat", False))
    sampler = make_sampler(temp=setting["temperature"], **options)

    def mlx() -> list[mx.array]:
        return [sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))]

    found = []
    shape = f"{batch} rows, {label}"
    seconds = attempt("mlx-lm", lambda: queued([mlx], launches=8, rounds=rounds))
    if seconds:
        row = {"name": "mlx-lm sampler", "shape": shape, "configuration": "", "us": 1e6 * seconds}
        found.append((row, [mlx]))
    calls = attempt("torch", lambda: _torch_calls(batch, setting))
    us = attempt("torch", lambda: torch_us(calls, launches=16)) if calls else None
    if us:
        row = {"name": "torch sort, cumsum, multinomial", "shape": shape, "configuration": "", "us": us}
        found.append((row, calls))
    return add_device_times(found)


def _torch_calls(batch: int, setting: dict) -> Calls | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    logits = torch.from_numpy(np.array(logits_of(batch, setting.get("flat", False)).astype(mx.float32))).cuda()

    def work() -> None:
        if setting["temperature"] == 0:
            torch.argmax(logits, dim=-1)
            return
        x = logits / setting["temperature"]
        if len(setting) > 1:
            x, order = torch.sort(x, dim=-1, descending=True)
            p = torch.softmax(x, dim=-1)
            p = torch.where(torch.cumsum(p, dim=-1) - p < setting.get("top_p", 1.0), p, 0)
            if setting.get("top_k"):
                p[:, setting["top_k"] :] = 0
            # Exponential race instead of torch.multinomial, which would wait for the device.
            torch.gather(order, 1, (p / torch.empty_like(p).exponential_()).argmax(dim=-1, keepdim=True))
        else:
            p = torch.softmax(x, dim=-1)
            (p / torch.empty_like(p).exponential_()).argmax(dim=-1)

    return [work]


if __name__ == "__main__":
    print_rows(rows(quick=True))
