"""Where the time of a training step goes, kernel by kernel: what to make faster next, and what is not worth it."""

import torch
from torch.profiler import ProfilerActivity, profile

from .step import Step

SHOWN = 40  # kernels listed; the rest is in the total
NAME = 120  # characters of a kernel's name


def of(step: Step, tokens: torch.Tensor) -> dict:
    """{"milliseconds": of all kernels, "kernels": [[name, launches, milliseconds], ...]} of one step, most time first.

    The step moves the optimiser's averages (its learning rate is zero): for after a run.
    """
    cuda = step.tokens.is_cuda
    step(tokens, 0.0)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as watched:
        step(tokens, 0.0)
        if cuda:
            torch.cuda.synchronize()
    found = []
    for one in watched.key_averages():
        microseconds = one.self_device_time_total if cuda else one.self_cpu_time_total
        found.append([one.key[:NAME], one.count, round(microseconds / 1e3, 3)])
    found.sort(key=lambda row: -row[2])
    return {"milliseconds": round(sum(row[2] for row in found), 2), "kernels": found[:SHOWN]}
