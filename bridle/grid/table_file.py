"""Tables of `bridle ablate` as files.

A table is a YAML file of rows; each row is a name and the overrides in which it differs from the recipe, the first row
being the benchmark:

    title: Number of codebooks
    iterations: 1
    measures: [probe]                # probe, finetune, or both
    rows:
      "4 sets": [quantizer=rq]
      "1 set": [quantizer=rq, quantizer.codebooks=1]

With `every_iteration: true` scores are read after every iteration and not only the last; `effects` then names pairs of
rows whose difference is of interest, and `codebooks` may be a measure. A row with `encoder.weights=FILE`, so written,
takes the weights that the command gives; the other rows do not get them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from bridle.config.load import shipped_names
from bridle.config.strict_yaml import Table, read_document
from bridle.errors import ConfigError, UsageError, quoted

MEASURES = ("probe", "finetune", "codebooks")
KEYS = ("title", "iterations", "measures", "every_iteration", "effects", "curve", "curve_rows", "rows")
NEEDS_WEIGHTS = "encoder.weights=FILE"


class Grid(NamedTuple):
    """A table to be filled."""

    name: str
    title: str
    iterations: int
    measures: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]  # overrides by name; the first is the benchmark
    curve: int = 0  # points of a probe curve over every encoder phase; 0 measures only its end
    curve_rows: tuple[str, ...] | None = None  # the rows that have one; all without it
    every_iteration: bool = False
    effects: Mapping[str, tuple[str, str]] = {}  # by name: from one row to another

    def points_of(self, row: str) -> int:
        return self.curve if self.curve_rows is None or row in self.curve_rows else 0


def table_names() -> list[str]:
    """The tables shipped with bridle."""
    return shipped_names("ablations")


def read_grid(name: str) -> Grid:
    """A shipped table by name, or a YAML file."""
    found = read_document(_text_of(name), Path(name).name)
    unknown = {path[0] for path in found} - set(KEYS)
    if unknown:
        raise ConfigError(f"{name}: unknown key {quoted(sorted(unknown)[0])}; a table has {', '.join(KEYS)}.")
    rows = _rows(found, name)
    value = {path[0]: entry.value for path, entry in found.items() if len(path) == 1}
    iterations = value.get("iterations", 2)
    if not isinstance(iterations, int) or iterations < 1:
        raise ConfigError(f"{name}: iterations is {quoted(iterations)}; expected a whole number from 1 on.")
    curve = value.get("curve", 0)
    if not isinstance(curve, int) or curve < 0:
        raise ConfigError(f"{name}: curve is {quoted(curve)}; expected a number of points, or 0.")
    some = value.get("curve_rows")
    if some is not None and (not isinstance(some, list) or not some or any(row not in rows for row in some)):
        raise ConfigError(f"{name}: curve_rows is {quoted(some)}; expected a list of rows of the table.")
    every, stem = value.get("every_iteration", False) is True, Path(name).stem
    return Grid(
        name=stem,
        title=str(value.get("title") or stem),
        iterations=iterations,
        measures=_measures(value, name, every=every),
        rows=rows,
        curve=curve,
        curve_rows=None if some is None else tuple(some),
        every_iteration=every,
        effects=_effects(found, name, rows),
    )


def _text_of(name: str) -> str:
    if name in table_names():
        return (resources.files("bridle.config") / "ablations" / f"{name}.yaml").read_text(encoding="utf-8")
    if Path(name).suffix not in (".yaml", ".yml") or not Path(name).is_file():
        raise UsageError(f"--table {quoted(name)}: expected a YAML file or one of {', '.join(table_names())}.")
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read as UTF-8 text ({error}).") from error


def _rows(found: Table, name: str) -> dict[str, tuple[str, ...]]:
    rows = {".".join(path[1:]): entry for path, entry in found.items() if path[0] == "rows"}
    for row, entry in rows.items():
        if not isinstance(entry.value, list) or not all(isinstance(change, str) for change in entry.value):
            raise ConfigError(
                f"{entry.where}: row {quoted(row)} should be a list of key=value, such as [mask.ratio=0.7]."
            )
    if len(rows) < 2:
        raise ConfigError(f"{name}: a table needs at least two rows, the benchmark and another; got {len(rows)}.")
    return {row: tuple(entry.value) for row, entry in rows.items()}


def _measures(value: Mapping[str, Any], name: str, *, every: bool) -> tuple[str, ...]:
    given = value.get("measures") or ["probe"]
    asked = given if isinstance(given, list) else [given]
    allowed = MEASURES if every else MEASURES[:2]
    if wrong := [measure for measure in asked if measure not in allowed]:
        hint = "; codebooks needs every_iteration: true" if wrong[0] == "codebooks" else ""
        raise ConfigError(f"{name}: measures holds {quoted(wrong[0])}; expected {' and '.join(allowed)}{hint}.")
    return tuple(dict.fromkeys(asked))


def _effects(found: Table, name: str, rows: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    effects = {}
    for path, entry in found.items():
        if path[0] != "effects":
            continue
        pair = entry.value
        if not isinstance(pair, list) or len(pair) != 2 or any(row not in rows for row in pair):
            raise ConfigError(f"{entry.where}: effects: {quoted(pair)} should be two rows of the table, [from, to].")
        effects[".".join(path[1:])] = (pair[0], pair[1])
    return effects
