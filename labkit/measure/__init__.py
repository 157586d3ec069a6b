"""Measuring: timings in pairs, floors of this device, and what a model costs by count alone.

floors.py         the fastest memory and matmul rates that this device shows
paired.py         two sides timed in alternating rounds: medians, and their ratio with its spread
model_tensors.py  the tensors of a model from its config
model_costs.py    bytes, operations and cache growth from the config alone
built_model.py    the same model as mlx-lm builds it, without weights: the oracle of the counts
speculation.py    what drafts can gain at batch 1, by bytes
pool_life.py      a pool of blocks under requests that come and go, from lengths alone
decode_steps.py   what decode steps and a prompt really take
restoring.py      restoring a stored prefix against computing it
parking.py        requests that run below a ceiling of memory
pausing.py        a pause and its resume against the bytes that they must move
guard_cost.py     what a memory guard costs while nothing happens
watched_pauses.py a row that is paused where one likes, with its logits
pressure_film.py  a run under pressure, step by step
batching/         throughput, latency and memory against the number of rows
end_to_end/       whole engines side by side, and mechanisms taken away
trace/            one decode step taken apart
published.py      figures that others published, with machine and source
tables.py         tables measured on named devices, with device, commit and date
"""
