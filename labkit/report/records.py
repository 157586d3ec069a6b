"""Result records: the numbers of a notebook as data inside its own outputs.

`record` shows a line for readers and stores the same values under a mime type of their own, so that a finished notebook
can be read back without running it again, and nbval compares the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

MIME = "application/vnd.labkit.record+json"

Basis = Literal["counted", "predicted", "measured", "published", "checked"]


@dataclass(frozen=True)
class Record:
    """One result: its name, where its values come from, and the values (plain JSON)."""

    name: str
    basis: Basis
    values: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "basis": self.basis, "values": self.values}

    def __str__(self) -> str:
        width = max(map(len, self.values))
        lines = (f"  {key:{width}}  {readable(value)}" for key, value in self.values.items())
        return "\n".join([f"{self.name} ({self.basis})", *lines])


def record(name: str, *, basis: Basis, **values: Any) -> None:
    """Show a result in the notebook and store it there for the report's table.

    Args:
        name: what it is, unique in its notebook: "decode floor".
        basis: where the values come from; counted, predicted, measured here, published elsewhere or checked (an
            assertion that held). A record never mixes them.
        values: numbers, strings, booleans, None, or lists and dicts of them; NumPy and MLX scalars and arrays are
            turned into plain ones. Put the unit into the key: `tokens_per_second=...`.

    Raises:
        ValueError: no values, an unknown basis, or a number that is not finite (JSON has none); the message names it.
        TypeError: a value that is not data.
    """
    if basis not in get_args(Basis):
        raise ValueError(f"record {name!r}: basis {basis!r} is not one of {', '.join(get_args(Basis))}")
    if not name or not values:
        raise ValueError(f"record {name!r} needs a name and at least one value")
    result = Record(name, basis, {key: _plain(value, f"{name}.{key}") for key, value in values.items()})
    from IPython.display import display

    # Nothing is returned: as the last line of a cell it would be shown a second time.
    display({MIME: result.as_json(), "text/plain": str(result)}, raw=True)


def collect(notebook: Mapping[str, Any]) -> list[Record]:
    """The records in the outputs of a notebook (a parsed .ipynb), in order.

    Raises:
        ValueError: two records of one name.
    """
    found: dict[str, Record] = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {}).get(MIME)
            if data is None:
                continue
            if data["name"] in found:
                raise ValueError(f"two records are called {data['name']!r}: a name must be unique in its notebook")
            found[data["name"]] = Record(data["name"], data["basis"], dict(data["values"]))
    return list(found.values())


def _plain(value: Any, where: str) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    elif hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: a record holds finite numbers (give None where there is no value)")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} is a {type(value).__name__}: a record holds numbers, strings, booleans, lists and dicts")


def readable(value: Any) -> str:
    """A record's value as text: four digits, thousands separated, sizes in order of size."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    # Notebook files keep keys in alphabetical order, which is no order for sizes.
    keys = sorted(value, key=lambda key: (0, float(key), "") if key.replace(".", "", 1).isdigit() else (1, 0.0, key))
    return ", ".join(f"{key}: {readable(value[key])}" for key in keys)
