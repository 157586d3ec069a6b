"""Write what an oracle in another environment needs: weights in transformers' layout, and a job of token windows.

Run in labkit's environment: python -m recipes.goldens.prepare MODEL FOLDER (see README.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import labkit
from labkit.parity import probe, transformers_layout
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.windows import heldout_texts, windows_across

POSITIONS, LENGTH = 4096, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help='"probe", or a name or folder that labkit.load takes')
    parser.add_argument("folder", type=Path, help="where to write the weights and job.json")
    arguments = parser.parse_args()
    if arguments.model == "probe":
        with tempfile.TemporaryDirectory() as scratch:
            source = probe.write_probe(scratch)
            transformers_layout.export(source, arguments.folder)
            mark = trunk_fingerprint(source)
        windows = probe.probe_windows()
    else:
        loaded = labkit.load(arguments.model)
        transformers_layout.export(loaded.path, arguments.folder)
        mark = trunk_fingerprint(loaded.path)
        windows = windows_across(heldout_texts(), loaded.tokenizer.encode, POSITIONS, LENGTH)
    job = {
        "model": Path(arguments.model).name,
        "fingerprint": mark,
        "windows": [np.asarray(window).tolist() for window in windows],
    }
    (arguments.folder / "job.json").write_text(json.dumps(job) + "\n")
    print(f"{arguments.folder}: {len(windows)} windows, {sum(map(len, windows)) - len(windows)} positions")


if __name__ == "__main__":
    main()
