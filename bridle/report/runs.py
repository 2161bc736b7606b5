"""What a report knows of a run: the files of its directory, read without trusting any of them.

A run may be unfinished, interrupted in the middle of a line, or written by an older version. Whatever cannot be read is
left out and named in `notes`; only a directory that is no run at all is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bridle.errors import UsageError, quoted
from bridle.report.gallery import Gallery
from bridle.runs.folder import RunFolder

JUDGED = ("probe", "knn", "finetune")  # files of further evaluations


class RunSummary(NamedTuple):
    """One run as a report shows it."""

    name: str
    title: str  # the data set or modality; runs with the same title are compared with each other
    method: str  # "VQ", "RQ"
    metrics: list[dict[str, Any]]  # rows of metrics.jsonl
    results: dict[str, Any]  # results.json
    config: str  # the resolved YAML
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()  # what could not be read
    examined: dict[str, Any] = {}  # noqa: RUF012 - never changed; codebooks.json
    judged: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - never changed; probe.json, knn.json, finetune.json
    quarantine: tuple[dict[str, Any], ...] = ()  # rows of quarantine.jsonl
    gallery: Gallery | None = None  # pictures of the run's data; None if nobody looked
    folder: str = ""  # the name of its directory: runs of one recipe share all other names

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations in results.json, in the order they were made."""
        return [entry for entry in items(self.results.get("evaluations")) if isinstance(entry, dict)]

    def baseline(self, name: str) -> dict[str, Any] | None:
        """The probe of the raw features or of the untrained encoder."""
        return mapping(mapping(self.results.get("baselines")).get(name)) or None


def read_run(path: Path | str, *, results: str = "results.json") -> RunSummary:
    """Read a run directory; parts that are missing are empty. `results` names the file with the evaluations."""
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{quoted(folder)} is not a directory; give the directory that `bridle pretrain --out` wrote.")
    if not RunFolder(folder).exists() and not any(
        (folder / name).is_file() for name in ("metrics.jsonl", "results.json")
    ):
        raise UsageError(
            f"{quoted(folder)} is not a run: it has neither config.yaml nor metrics.jsonl nor results.json; "
            "give the directory that `bridle pretrain --out` wrote."
        )
    notes: list[str] = []
    found = _read_object(folder / results, notes)
    return RunSummary(
        name=str(found.get("name") or folder.resolve().name),
        title=str(found.get("title") or found.get("name") or folder.resolve().name),
        method=str(found.get("method") or ""),
        metrics=_read_rows(folder / "metrics.jsonl", notes),
        results=found,
        config=RunFolder(folder).config_text(),
        environment=_read_object(folder / "environment.json", notes),
        examined=_read_object(folder / "codebooks.json", notes),
        judged={kind: _read_object(folder / f"{kind}.json", notes) for kind in JUDGED},
        quarantine=tuple(_read_rows(folder / "quarantine.jsonl", notes)),
        notes=tuple(notes),
        folder=folder.resolve().name,
    )


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(path)
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} could not be read: it is not a JSON object.")
        return {}
    return found


def _read_rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = _read_text(path).split("\n")
    rows, broken = [], []
    for number_, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number_ < len(lines):  # a last line without its newline is still being written
            broken.append(number_)
    if broken:
        notes.append(f"{path.name}: {len(broken)} lines could not be read, the first is line {broken[0]}.")
    return rows


# Reading values that others wrote.


def main_score(probe: Mapping[str, Any]) -> float | None:
    """What a probe is judged by: accuracy, or mAP where items have several labels."""
    found = number(probe.get("accuracy"))
    return number(probe.get("mean_average_precision")) if found is None else found


def model_name(method: object, iteration: object) -> str:
    """What one evaluated model is called; one from elsewhere knows no iterations."""
    return "imported" if method == "imported" else f"{method} iter{whole(iteration)}"


def score_name(probe: Mapping[str, Any]) -> str:
    """Which of the two it is."""
    return "accuracy" if number(probe.get("accuracy")) is not None or main_score(probe) is None else "mAP"


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


def item(value: object, index: int) -> Any:
    """One item of a list, or None."""
    found = items(value)
    return found[index] if index < len(found) else None


def mapping(value: object) -> dict[str, Any]:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}
