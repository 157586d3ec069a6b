"""Measuring: timings in pairs, floors of this device, and what a model costs by count alone.

floors.py         the fastest memory and matmul rates that this device shows
paired.py         two sides timed in alternating rounds: medians, and their ratio with its spread
model_tensors.py  the tensors of a model from its config
model_costs.py    bytes, operations and cache growth from the config alone
built_model.py    the same model as mlx-lm builds it, without weights: the oracle of the counts
pool_life.py     a pool of blocks under requests that come and go, from lengths alone
decode_steps.py   what decode steps and a prompt really take
restoring.py      restoring a stored prefix against computing it
published.py      figures that others published, with machine and source
tables.py         tables measured on named devices, with device, commit and date
"""
