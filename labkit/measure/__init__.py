"""Measuring: timings in pairs, floors of this device, and what a model costs by count alone.

floors.py         the fastest memory and matmul rates that this device shows
paired.py         two sides timed in alternating rounds: medians, and their ratio with its spread
model_tensors.py  the tensors of a model from its config
model_costs.py    bytes, operations and cache growth from the config alone
"""
