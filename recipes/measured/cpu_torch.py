"""transformers' torch model on this CPU, in float32: the seconds of prompts and steps, as one line of JSON.

    python -m recipes.measured.cpu_torch FOLDER --prompts 512 2048 --contexts 256 --rounds 3 --threads 2

FOLDER is what `labkit.parity.transformers_layout.export` wrote. Needs torch, transformers and numpy alone; run by
`recipes.measured.cpu_hybrid --torch PYTHON`, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    import torch

    from labkit.parity.torch_side import TorchSide

    model = TorchSide.open(arguments.folder, threads=arguments.threads).model
    random = np.random.RandomState(0)

    def run(ids: np.ndarray, past=None):
        with torch.inference_mode():
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            return model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)

    found = {"torch": version("torch"), "transformers": version("transformers"), "prompt_s": {}, "step_s": {}}
    run(random.randint(0, 8000, 64))
    for length in arguments.prompts:
        ids = random.randint(0, 8000, length)
        found["prompt_s"][length] = min(timed(lambda ids=ids: run(ids)) for _ in range(arguments.rounds))
    for context in arguments.contexts:
        past = run(random.randint(0, 8000, context)).past_key_values
        token = np.array([5])
        steps = [timed(lambda past=past, token=token: run(token, past)) for _ in range(arguments.steps)]
        found["step_s"][context] = min(steps)
    print(json.dumps(found))


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
