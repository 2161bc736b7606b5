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
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from bridle.config.load import shipped_names
from bridle.config.strict_yaml import read_document
from bridle.errors import ConfigError, UsageError, quoted

Measure = Annotated[str, Field(pattern="^(probe|finetune|codebooks)$")]
NEEDS_WEIGHTS = "encoder.weights=FILE"


def _as_list(given: object) -> object:
    return given if isinstance(given, list) else [given]


class Grid(NamedTuple):
    """A table to be filled; all its fields but the name are keys of the file."""

    name: str
    title: str
    iterations: Annotated[int, Field(ge=1)]
    measures: Annotated[tuple[Measure, ...], BeforeValidator(_as_list)]
    rows: Annotated[Mapping[str, tuple[str, ...]], Field(min_length=2)]  # overrides by name; the first is the benchmark
    curve: Annotated[int, Field(ge=0)] = 0  # points of a probe curve over every encoder phase; 0 measures only its end
    curve_rows: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # the rows that have one; all without it
    every_iteration: bool = False
    effects: Mapping[str, tuple[str, str]] = {}  # by name: from one row to another

    def points_of(self, row: str) -> int:
        return self.curve if self.curve_rows is None or row in self.curve_rows else 0


def table_names() -> list[str]:
    """The tables shipped with bridle."""
    return shipped_names("ablations")


def read_grid(name: str) -> Grid:
    """A shipped table by name, or a YAML file."""
    stem = Path(name).stem
    given: dict[str, Any] = {"title": stem, "iterations": 2, "measures": ["probe"], "rows": {}, "effects": {}}
    for (key, *rest), entry in read_document(_text_of(name), Path(name).name).items():
        if rest:  # a row, or an effect
            given.setdefault(key, {})[".".join(rest)] = entry.value
        else:
            given[key] = entry.value
    try:
        grid = TypeAdapter(Grid).validate_python({**given, "name": stem})
    except ValidationError as error:
        first = error.errors()[0]
        where, got = ".".join(map(str, first["loc"])), quoted(first["input"], 100)
        remedy = f"A table has {', '.join(Grid._fields[1:])}; a row is a list of key=value, such as [mask.ratio=0.7]."
        raise ConfigError(f"{name}: {where} is {got}: {first['msg']}. {remedy}") from error
    named = {"curve_rows": grid.curve_rows or (), **{f"effects.{key}": pair for key, pair in grid.effects.items()}}
    for key, rows in named.items():
        if unknown := [row for row in rows if row not in grid.rows]:
            raise ConfigError(f"{name}: {key} names {quoted(unknown[0])}, which is no row of the table.")
    if "codebooks" in grid.measures and not grid.every_iteration:
        raise ConfigError(f"{name}: measures holds 'codebooks', which needs every_iteration: true.")
    return grid


def _text_of(name: str) -> str:
    if name in table_names():
        return (resources.files("bridle.config") / "ablations" / f"{name}.yaml").read_text(encoding="utf-8")
    if Path(name).suffix not in (".yaml", ".yml") or not Path(name).is_file():
        raise UsageError(f"--table {quoted(name)}: expected a YAML file or one of {', '.join(table_names())}.")
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read as UTF-8 text ({error}).") from error
