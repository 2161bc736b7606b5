"""Write the expected curves of a recipe from finished runs of it.

    for seed in 0 1; do
      bridle pretrain digits-tiny seed=$seed --out runs/rq-$seed
      bridle pretrain digits-tiny seed=$seed quantizer.codebooks=1 quantizer.codes=256 --out runs/vq-$seed
    done
    python benchmarks/expected_curves.py runs/rq-* runs/vq-*

Reads config.yaml and metrics.jsonl of runs of one recipe, several seeds of each method, and writes
bridle/config/reference_curves/RECIPE.json (`--out` names another folder). The runs must be the recipe as
shipped except for seed, places of the data, codebooks' sizes and what moves no curve (probe, finetune, runtime);
`runtime.log_every` must be the recipe's, since it decides what is averaged.

Each phase is cut into eight equal parts. At the end of each, mean and spread (sample standard deviation) are taken over
the logged rows of all seeds within `WINDOW` steps: a row is one batch, so the spread is that of a single row.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bridle.config
from bridle.config import Config, read_config
from bridle.files import read_lines
from bridle.runs.reference_curves import FORMAT, IGNORED, changes, method_key, recipe_of
from bridle.train.algorithm1 import schedule
from bridle.train.engine import phase_key

POINTS = 8  # per phase
WINDOW = 30  # steps on either side
DIGITS = 5  # behind the point
CURVES = Path(bridle.config.__file__).parent / "reference_curves"


class Finished(NamedTuple):
    """A run that may serve as a reference."""

    folder: Path
    config: Config
    rows: dict[str, list[dict[str, Any]]]  # by phase key


def read_finished(folder: Path) -> Finished:
    """Read a run, or say why it cannot serve as a reference."""
    config = read_config(folder / "config.yaml")
    recipe = recipe_of(config)
    if recipe is None:
        raise SystemExit(f"{folder}: {config.name!r} is not a shipped recipe.")
    moved = changes(config, recipe)
    if config.runtime.log_every != recipe.runtime.log_every:
        moved.append(f"runtime.log_every: {recipe.runtime.log_every} against {config.runtime.log_every}")
    if moved:
        raise SystemExit(f"{folder}: not the recipe as shipped: {'; '.join(moved)}.")
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(folder / "metrics.jsonl"):
        rows[phase_key(row["iteration"], row["phase"])].append(row)
    for turn in schedule(config):
        key = phase_key(turn.iteration, turn.name)
        if not rows[key] or rows[key][-1]["step"] < rows[key][-1]["steps"]:
            raise SystemExit(f"{folder}: {key} is not finished; continue the run with the command that began it.")
    return Finished(folder, config, dict(rows))


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting that moves the curves beside the codebooks' sizes, under its dotted name."""
    found: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else key)
        elif not path.startswith((*IGNORED, "quantizer.codebooks", "quantizer.codes")):
            found[path] = value

    visit(config.model_dump(mode="json"), "")
    return found


def reference_steps(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Logged steps nearest to the ends of eight equal parts of a phase."""
    steps, logged = rows[-1]["steps"], [row["step"] for row in rows]
    return sorted({min(logged, key=lambda s: abs(s - steps * part / POINTS)) for part in range(1, POINTS + 1)})


def band(values: Sequence[float]) -> list[float]:
    return [round(statistics.mean(values), DIGITS), round(statistics.stdev(values), DIGITS)]


def point(rows: Sequence[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Bands of the figures that a phase logs: the loss, the first stage's accuracy, the usage of every stage."""
    found = {"loss": [band([row["loss"] for row in rows])]}
    if "token_accuracy" in rows[0]:
        found["token_accuracy"] = [band([row["token_accuracy"][0] for row in rows])]
    found["code_usage"] = [band(stage) for stage in zip(*(row["code_usage"] for row in rows), strict=True)]
    return found


def curves_of(runs: Sequence[Finished]) -> dict[str, Any]:
    """The reference of one method."""
    phases: dict[str, dict[str, Any]] = {}
    for key, rows in runs[0].rows.items():
        pooled = [row for run in runs for row in run.rows[key] if row["loss"] is not None]
        phases[key] = {
            str(step): point([row for row in pooled if abs(row["step"] - step) <= WINDOW])
            for step in reference_steps(rows)
        }
    return {"seeds": sorted(run.config.seed for run in runs), "phases": phases}


def make_document(runs: Sequence[Finished]) -> dict[str, Any]:
    """The whole file: what was run, and the reference of every method."""
    names = {run.config.name for run in runs}
    if len(names) != 1:
        raise SystemExit(f"runs of one recipe are needed, got {', '.join(sorted(names))}.")
    methods: dict[str, list[Finished]] = defaultdict(list)
    for run in runs:
        methods[method_key(run.config.quantizer.sizes)].append(run)
    for method, mine in methods.items():
        seeds = [run.config.seed for run in mine]
        if len(seeds) < 2 or len(set(seeds)) < len(seeds):
            raise SystemExit(f"{method}: at least two runs with different seeds are needed, got seeds {sorted(seeds)}.")
    data = runs[0].config.data
    return {
        "format": FORMAT,
        "recipe": names.pop(),
        "about": "[mean, spread] over the logged rows of all seeds near a step; see benchmarks/expected_curves.py",
        "settings": settings_of(runs[0].config),
        "statistics": {"mean": data.mean, "std": data.std},
        "methods": {method: curves_of(mine) for method, mine in sorted(methods.items())},
    }


def write_json(document: dict[str, Any], path: Path) -> None:
    """Bands on one line each, so that a change of them reads well as a diff."""
    text = json.dumps(document, indent=1)
    for _ in range(2):  # lists of numbers, then lists of those
        text = _join_inner_lists(text)
    path.write_text(text + "\n", encoding="utf-8")


def _join_inner_lists(text: str) -> str:
    return re.sub(r"\[\s+((?:[^\[\]{}\"]|\[[^\[\]\n]*\])+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)


def main() -> None:
    """Read the runs, write the file, say what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=CURVES, help="folder for RECIPE.json")
    arguments = parser.parse_args()
    document = make_document([read_finished(folder) for folder in arguments.runs])
    path = arguments.out / f"{document['recipe']}.json"
    write_json(document, path)
    for method, found in document["methods"].items():
        print(f"{method}: seeds {found['seeds']}, {', '.join(found['phases'])}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
