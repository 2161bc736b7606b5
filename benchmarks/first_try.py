"""What a new user gets: `bridle init`, `pretrain`, `probe`, `knn` on six small sets, beside four baselines.

    python benchmarks/sets sets
    python benchmarks/first_try.py sets --work first-try [--minutes 8] [--only icons,charts] [key=value …]
    python benchmarks/first_try.py sets --work first-try --table     # what is measured so far

Baselines: raw input, untrained encoder, classical (whitened k-means features), the run's stem alone (encoder.stem,
fitted to the data, before any training), and RQ codes (how often each code of each stage of the run's tokenizer occurs,
no encoder). Scores: logistic regression on all labels, with 5 and 10 labels
a class (ten draws), k-NN. Differences are paired, over test items or draws, with 95 % intervals.
Rows go to WORK/rows.jsonl, one line per set and features; a set that is there is not repeated, and an interrupted one
continues. `key=value` are overrides of the recipe that `bridle init` writes, for all sets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bridle.console import ProgressLine
from bridle.data.build import open_data
from bridle.evaluate.evaluator import Evaluator, probe_header
from bridle.evaluate.significance import Change, compare, compare_hits
from bridle.evaluate.verdict import judge_results
from bridle.export.trained import read_trained
from bridle.machine import cpu_seconds
from bridle.models.tokenizer import Tokenizer
from bridle.runs.folder import RunFolder
from bridle.runs.results import BASELINES, Results, Scores, read_results
from bridle.runs.results_file import ResultsFile
from bridle.seeding import generator
from bridle.train.run import open_machine

SETS = ("speech", "sensors", "textures", "icons", "shapes", "charts")
NAMES = {**BASELINES, "codes": "RQ codes", "trained": "trained"}
RIVALS = ("raw", "untrained", "classical")
SHOTS = (5, 10)
PROBE = ["probe.classical=true", f"probe.shots=[{','.join(map(str, SHOTS))}]"]
COLUMNS = {"all": "all labels", **{f"shots{n}": f"{n} a class" for n in SHOTS}, "knn": "k-NN"}


class Measured(NamedTuple):
    """Scores of one kind of features."""

    linear: Scores
    knn: Scores

    def value(self, column: str) -> float:
        if column.startswith("shots"):
            return float(self.linear.few_shot[int(column[5:])].value or 0.0)
        return float((self.knn if column == "knn" else self.linear).main or 0.0)

    def change(self, other: Measured, column: str) -> Change | None:
        """The paired difference to other features."""
        if column.startswith("shots"):
            n = int(column[5:])
            return compare(self.linear.few_shot[n].draws, other.linear.few_shot[n].draws)
        own, beside = (each.knn if column == "knn" else each.linear for each in (self, other))
        return compare_hits(own.hits, beside.hits, generator=generator(0, "first try"))


def bridle(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "bridle", *map(str, arguments)], check=True)


def code_counts(tokenizer: Tokenizer, x: Tensor, valid: Tensor | None) -> Tensor:
    """Share of the tokens that have each code, stage after stage, as a root: (B, C, *input) -> (B, M·K)."""
    codes = tokenizer.tokenize(x, valid=valid)  # (B, T, M)
    seen = one_hot(codes, max(tokenizer.quantizer.codes)).float()  # (B, T, M, K)
    real = torch.ones(codes.shape[:2]) if valid is None else valid.float()
    return ((seen * real[..., None, None]).sum(1) / real.sum(1).clamp_min(1)[:, None, None]).sqrt().flatten(1)


def measure_codes(run: Path) -> Measured:
    """Scores of a tokenizer's codes without the encoder."""
    config = RunFolder(run).config(PROBE)
    tokenizer = read_trained(run).own_tokenizer
    assert tokenizer is not None
    found = []
    for classifier in ("linear", "neighbours"):
        results = ResultsFile(run / f"codes-{classifier}.json", probe_header(config))
        evaluator = Evaluator(
            config, open_data(config), open_machine(config.runtime), results, ProgressLine(), classifier=classifier
        )
        collect = evaluator.collector.features(lambda x, valid: code_counts(tokenizer, x, valid))
        found.append(evaluator.score(collect, evaluator.vector_method()))
    return Measured(*found)


def measure_set(data: Path, work: Path, minutes: float, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Train and score one set by the commands of a new user; its rows."""
    recipe, run = work / f"{data.name}.yaml", work / data.name
    if not recipe.exists():
        bridle("init", data, "--out", recipe, "--minutes", str(minutes))
    bridle("pretrain", recipe, "--out", run, "probe.enabled=false", "runtime.threads=1", *overrides)
    began = cpu_seconds()
    bridle("probe", run, *PROBE, "runtime.threads=1")
    bridle("knn", run, "probe.classical=true", "runtime.threads=1")
    probe, knn = (read_results(run / name) for name in ("probe.json", "knn.json"))
    scores = {name: Measured(probe.baselines[name], knn.baselines[name]) for name in BASELINES if name in knn.baselines}
    scores["codes"], scores["trained"] = measure_codes(run), Measured(last_scores(probe), last_scores(knn))
    folder = RunFolder(run)
    config = folder.config()
    verdict = judge_results(probe, config)
    about = {
        "set": data.name, "seed": config.seed, "steps": config.encoder_phase.steps, "overrides": list(overrides),
        "geometry": f"{list(config.geometry.input)} in {list(config.geometry.patch)}",
        "train_cpu_minutes": round(max(float(row["cpu_seconds"]) for row in folder.costs()) / 60, 2),
        "score_cpu_minutes": round((cpu_seconds() - began) / 60, 2),
    }  # fmt: skip
    rows = []
    for name, own in scores.items():
        row = {**about, "features": name, **{column: round(100 * own.value(column), 2) for column in COLUMNS}}
        if name == "trained":
            row["verdict"] = None if verdict is None else verdict.text
        else:  # how much better the trained features are
            changes = {column: scores["trained"].change(own, column) for column in COLUMNS}
            row["gain"] = {
                column: [round(100 * change.change, 2), round(100 * (change.half or 0.0), 2), change.is_clear]
                for column, change in changes.items()
                if change is not None
            }
        rows.append(row)
    return rows


def last_scores(results: Results) -> Scores:
    scores = results.evaluations[-1].scores
    assert scores is not None
    return scores


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line per set and features; in brackets what the trained features are better by, * beyond chance."""
    lines = [f"| set | features | {' | '.join(COLUMNS.values())} |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    for row in rows:
        best = {column: max(other[column] for other in rows if other["set"] == row["set"]) for column in COLUMNS}
        cells = []
        for column in COLUMNS:
            cell = f"**{row[column]:.1f}**" if row[column] == best[column] else f"{row[column]:.1f}"
            if gain := row.get("gain", {}).get(column):
                cell += f" ({gain[0]:+.1f} ±{gain[1]:.1f}{' *' * gain[2]})"
            cells.append(cell)
        lines.append(f"| {row['set']} | {NAMES[row['features']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]], column: str = "shots10", rivals: Sequence[str] = RIVALS) -> str:
    """Which sets win against all rivals, and which do not."""
    won = {
        name: all(
            row["gain"][column][2] and row["gain"][column][0] > 0
            for row in rows
            if row["set"] == name and row["features"] in rivals
        )
        for name in dict.fromkeys(row["set"] for row in rows)
    }
    lost = [name for name, is_won in won.items() if not is_won]
    beaten = ", ".join(NAMES[name] for name in rivals)
    return f"{COLUMNS[column]}: beats all of {beaten} on {sum(won.values())} of {len(won)} sets" + (
        f"; not on {', '.join(lost)}" if lost else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="CPU-minutes of training a set")
    parser.add_argument("--only", default=",".join(SETS))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    place = args.work / "rows.jsonl"

    def known() -> list[dict[str, Any]]:
        return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []

    for name in [] if args.table else args.only.split(","):
        if all(row["set"] != name for row in known()):
            rows = measure_set(args.sets / name, args.work, args.minutes, args.overrides)
            with place.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
    rows = known()
    print(table(rows), summary(rows), summary(rows, rivals=["stem"]), sep="\n\n")
    for row in rows:
        if row["features"] == "trained":
            trained = f"{row['geometry']}, {row['steps']} steps, {row['train_cpu_minutes']} CPU-minutes"
            print(f"{row['set']} ({trained}): {row['verdict']}")


if __name__ == "__main__":
    main()
