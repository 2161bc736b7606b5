"""A run as a report sees it: the files of its directory, read without trusting any of them.

A run may be unfinished, interrupted in the middle of a line, or written by another version. Whatever cannot be read is
left out and named in `notes`; only a directory that is no run at all is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bridle.config import Config
from bridle.errors import BridleError, CheckpointError, UsageError, quoted
from bridle.files import read_json
from bridle.runs.folder import RunFolder
from bridle.runs.reconstruction import RateDistortion, read_rates
from bridle.runs.results import Evaluation, Results, results_header
from bridle.runs.results_file import kept_files, readable_part

if TYPE_CHECKING:
    from bridle.report.token_maps import Gallery

FURTHER = ("probe", "knn", "finetune")  # kinds of results that are measured after the run
Row = Mapping[str, Any]  # of metrics.jsonl or quarantine.jsonl


class Measured(NamedTuple):
    """Results that were measured after the run."""

    kind: str  # one of FURTHER
    results: Results


class RunSummary(NamedTuple):
    """One run as a report shows it."""

    name: str
    title: str  # the data set or modality; runs with the same title are compared with each other
    method: str  # "VQ", "RQ"
    metrics: list[Row]
    results: Results  # results.json
    config: str  # the resolved YAML
    environment: Row
    notes: tuple[str, ...] = ()  # what could not be read
    examined: Results = Results()  # codebooks.json
    further: tuple[Measured, ...] = ()
    quarantine: tuple[Row, ...] = ()
    rates: tuple[RateDistortion, ...] = ()  # of `bridle codebooks --reconstruct`, by iteration
    gallery: Gallery | None = None  # pictures of the run's data; None if they were not asked for
    folder: str = ""  # the name of its directory: runs of one recipe share all other names
    settings: Config | None = None  # config.yaml, where this version can read it
    label: str = ""  # what it is called among the runs with its title, and
    anchor: str = ""  # where its section is; both given by the page

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.results.evaluations


def read_run(path: Path | str, *, results: str = "results.json") -> RunSummary:
    """Read a run directory; parts that are missing are empty. `results` names the file with the evaluations."""
    folder = Path(path)
    if not RunFolder(folder).exists() and not any((folder / name).is_file() for name in ("metrics.jsonl", results)):
        problem = "is not a run: it has neither a config nor metrics nor results"
        raise UsageError(
            f"{quoted(folder)} {problem if folder.is_dir() else 'is not a directory'}; "
            "give the directory that `bridle pretrain --out` wrote."
        )
    notes, settings = list[str](), None
    with suppress(BridleError):
        settings = RunFolder(folder).config()
    found, name = _read_results(folder / results, notes), folder.resolve().name
    about = found if found.name or settings is None else results_header(settings, folder)
    return RunSummary(
        name=about.name or name,
        title=about.title or about.name or name,
        method=about.method,
        metrics=_read_rows(folder / "metrics.jsonl", notes),
        results=found,
        config=RunFolder(folder).config_text(),
        environment=_read_object(folder / "environment.json", notes),
        examined=_read_results(folder / "codebooks.json", notes),
        further=tuple(_read_further(folder, notes)),
        quarantine=tuple(_read_rows(folder / "quarantine.jsonl", notes)),
        rates=tuple(_read_rates(folder, notes)),
        notes=tuple(notes),
        folder=name,
        settings=settings,
    )


def _read_further(folder: Path, notes: list[str]) -> list[Measured]:
    found: list[Measured] = []
    for kind in FURTHER:
        for path in kept_files(folder, kind):
            results = _read_results(path, notes)
            same = [other for other in found if other.kind == kind and other.results.protocol == results.protocol]
            if results.evaluations and not same:
                found.append(Measured(kind, results))
    return found


def _read_rates(folder: Path, notes: list[str]) -> list[RateDistortion]:
    try:
        return read_rates(folder)
    except CheckpointError as error:
        notes.append(str(error))
        return []


def _read_results(path: Path, notes: list[str]) -> Results:
    found, problems = _read_object(path, notes), list[str]()
    results = readable_part(Results, found, problems) if found else None
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        notes.append(f"{path.name}: left out what could not be read: {problems[0]}{more}.")
    return results or Results()


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; None if the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except CheckpointError:
        notes.append(f"{path.name} could not be read: it is not a JSON object.")
        return {}


def _read_rows(path: Path, notes: list[str]) -> list[Row]:
    if not path.is_file():
        return []
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_object(line) for line in lines]
    broken = [n for n, (line, row) in enumerate(zip(lines, rows, strict=True), start=1) if line.strip() and row is None]
    if broken:
        notes.append(f"{path.name}: {len(broken)} lines could not be read, the first is line {broken[0]}.")
    # A last line without its newline is still being written: it may or may not be whole.
    return [row for row in (*rows, _object(last)) if row is not None]


# Values of rows that others wrote, and how numbers are written; what is missing or not finite is a dash.


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def whole(value: object) -> int:
    """A finite number as an integer, or 0."""
    return int(number(value) or 0)


def items(value: object) -> list[Any]:
    """The items of a list, or none."""
    return list(value) if isinstance(value, list | tuple) else []


def percent(value: object, digits: int = 1) -> str:
    found = number(value)
    return "–" if found is None else f"{100 * found:.{digits}f}"


def decimal(value: object, digits: int = 2) -> str:
    found = number(value)
    return "–" if found is None else f"{found:.{digits}f}"


def thousands(value: object) -> str:
    found = number(value)
    return "–" if found is None else f"{found:,.0f}"
