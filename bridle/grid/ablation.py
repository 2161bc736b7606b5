"""`bridle ablate`: a grid of runs over seeds and one table; the same command continues it.

Tables are read by `bridle.grid.table_file`; their first row is the benchmark.

Rows that differ only in `finetune.` share their pretraining. Every score (with folds their mean) is paired with the
benchmark's of the same seed, with Student's interval of the differences; under a single seed rows are compared by the
test items that only one of them answered rightly (`bridle.evaluate.significance`). "*" marks what can hardly be chance.

cpu.jsonl beside the table has a line for every process that ended: what it worked on, and its CPU seconds. So the cost
of a table is that of all the times it was started.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridle.config import Config, load_config
from bridle.errors import ConfigError, UsageError, quoted
from bridle.evaluate.significance import Change, Hits, compare, compare_hits, read_hits
from bridle.files import read_json, read_lines
from bridle.grid.shared_iteration import borrow_beginning, lender_of
from bridle.grid.subprocesses import run_beside
from bridle.grid.table_file import NEEDS_WEIGHTS, Grid
from bridle.report.curves import curve_of, write_curves
from bridle.report.tables import BASELINES
from bridle.runs.checkpoint import write_json
from bridle.runs.folder import RunFolder
from bridle.runs.metrics import append_row
from bridle.seeding import generator, mix

ITERATIONS = "schedule.iterations="  # a row may say its own; else it has the table's
COSTS = "cpu.jsonl"
WEIGHTS = "encoder.weights="
CURVE = "curve.json"  # in a run


class Cell(NamedTuple):
    """One row under one seed."""

    row: str
    seed: int
    folder: Path  # of the pretraining run
    pretrain: tuple[str, ...]  # overrides
    finetune: tuple[str, ...]


class Score(NamedTuple):
    """What one row reached under one seed."""

    values: Sequence[float]  # one number, or one of each fold
    hits: Hits | None = None  # which test items were answered rightly, where that is known


Scores = Mapping[str, Mapping[int, Score]]  # by measure and seed


def run_grid(
    recipe: str, overrides: Sequence[str], grid: Grid, *, seeds: Sequence[int], out: Path, jobs: int | None = None
) -> Path:
    """Run what is not finished yet, then write table.md, table.csv and table.json. Returns the first of them."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: exists and is not a directory; choose another --out.")
    console, began = Console(highlight=False), time.perf_counter()
    grid_cells = list(cells(recipe, overrides, grid, seeds=seeds, out=out))
    jobs = jobs or side_by_side(recipe, overrides)
    out.mkdir(parents=True, exist_ok=True)
    runs = {cell.folder: cell for cell in grid_cells}
    console.print(
        f"{grid.title}: {len(grid.rows)} rows × {len(seeds)} seeds, {len(runs)} runs, {jobs} at a time", markup=False
    )
    pretrain_cells(recipe, grid, [cell for cell in runs.values() if not is_measured(cell, grid)], runs, jobs, console)
    if "finetune" in grid.measures:
        for cell in grid_cells:  # one after the other: rows that share a run share its folder
            run_beside(
                {f"{cell.folder.name} finetune": ["finetune", str(cell.folder), *cell.finetune]},
                jobs=1,
                console=console,
                spent=partial(_note_finetuning, out, cell),
            )
            _keep_finetuned(cell)
    scores = {cell: read_scores(cell, grid) for cell in grid_cells}
    table = write_tables(grid, scores, recipe, overrides, out, minutes=(time.perf_counter() - began) / 60)
    if grid.curve:
        drawn_from = [cell for cell in grid_cells if grid.points_of(cell.row)]
        probed = [cell.folder for cell in drawn_from if RunFolder(cell.folder).checkpoint_paths()]
        run_beside(
            {f"{folder.name} curve": ["probe", str(folder), "--curve"] for folder in probed}, jobs=jobs, console=console
        )
        if lost := [cell for cell in drawn_from if not (cell.folder / CURVE).is_file()]:
            names = ", ".join(sorted({cell.folder.name for cell in lost}))
            console.print(f"no curve of {names}: the checkpoints are gone", markup=False)
            drawn_from = [cell for cell in drawn_from if cell not in lost]
        if drawn_from:
            drawn = draw_curves(grid, drawn_from, out)
            console.print(f"wrote {out / 'curves.csv'}{''.join(f', {path.name}' for path in drawn)}", markup=False)
    return table


def side_by_side(recipe: str, overrides: Sequence[str]) -> int:
    """As many runs as cores have threads for."""
    threads = load_config(recipe, without_weights(overrides)).runtime.threads
    return max(1, (os.cpu_count() or 1) // max(1, threads))


def pretrain_cells(
    recipe: str, grid: Grid, begun: Sequence[Cell], runs: Iterable[Path], jobs: int, console: Console
) -> None:
    """Train what is not trained yet; short runs first, because longer ones may begin alike."""
    for length in sorted({iterations_of(cell, grid) for cell in begun}):
        turn = [cell for cell in begun if iterations_of(cell, grid) == length]
        for cell in turn:
            if lender := borrow_beginning(load_config(recipe, cell.pretrain), cell.folder, sorted(runs)):
                console.print(f"{cell.folder.name}  begins like {lender.name}: its iteration 1 is copied", markup=False)
        run_beside(
            {cell.folder.name: ["pretrain", recipe, *cell.pretrain, "--out", str(cell.folder)] for cell in turn},
            jobs=jobs,
            console=console,
            spent=partial(note_cost, turn[0].folder.parent.parent),
        )


def without_weights(overrides: Sequence[str]) -> list[str]:
    """The overrides without encoder.weights=FILE."""
    return [change for change in overrides if not change.startswith(WEIGHTS)]


def with_own_weights(changes: Sequence[str], overrides: Sequence[str], *, some_rows: bool) -> list[str] | None:
    """All overrides of a row; None where it needs weights and the command gives none.

    Where `some_rows` of a table ask for weights, those that the command gives are for them alone.
    """
    given = [change for change in overrides if change.startswith(WEIGHTS)]
    if NEEDS_WEIGHTS in changes:
        kept = [change for change in changes if change != NEEDS_WEIGHTS]
        return [*without_weights(overrides), *kept, *given] if given else None
    return [*(without_weights(overrides) if some_rows else overrides), *changes]


def cells(recipe: str, overrides: Sequence[str], grid: Grid, *, seeds: Sequence[int], out: Path) -> Iterator[Cell]:
    """Every row under every seed, checked before anything is run; without those that lack weights."""
    some_rows = any(NEEDS_WEIGHTS in changes for changes in grid.rows.values())
    for row, changes in grid.rows.items():
        of_row = with_own_weights(changes, overrides, some_rows=some_rows)
        if of_row is None:
            continue
        for seed in seeds:
            if any(change.startswith("seed=") for change in of_row):
                raise ConfigError(f"row {quoted(row)}: seed=… is set by the table; give --seeds instead.")
            own = any(change.startswith(ITERATIONS) for change in changes)
            length = [] if own else [f"{ITERATIONS}{grid.iterations}"]
            everything = [*of_row, f"seed={seed}", *length]
            config = load_config(recipe, everything)  # a typo in the last row is told before the first one runs
            if "probe" in grid.measures and not (config.probe.enabled or grid.every_iteration):
                raise ConfigError(f"row {quoted(row)}: probe.enabled is false, but the table measures the probe.")
            pretrain = tuple(change for change in everything if not change.startswith("finetune."))
            finetune = tuple(change for change in everything if change.startswith("finetune."))
            key = f"{mix(recipe, *pretrain) % 16**6:06x}"
            kept = _kept_for_curve(config, grid.points_of(row))
            yield Cell(row, seed, out / "runs" / f"seed{seed}-{key}", (*pretrain, *kept), finetune)


def _kept_for_curve(config: Config, points: int) -> tuple[str, ...]:
    """Checkpoints to keep so that a curve has so many points an encoder phase; `runtime.` does not change a result."""
    phases = config.encoder_phase, config.tokenizer_phase
    encoder, tokenizer = (phase.steps and min(phase.steps, config.max_steps or phase.steps) for phase in phases)
    if not points or encoder is None or tokenizer is None:
        return ()  # of phases counted in epochs a curve has only the ends
    every = -(-encoder // points)
    kept = config.schedule.iterations * (encoder // every + tokenizer // every + 2)
    return (f"runtime.checkpoint_every={every}", f"runtime.keep={kept}", "runtime.keep_finished=true")


def draw_curves(grid: Grid, cells_: Sequence[Cell], out: Path) -> list[Path]:
    """curves.svg and .png, a line a row over all seeds, and curves.csv with every point."""
    found = {cell: curve_of(read_json(cell.folder / CURVE)) for cell in cells_}
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["row", "seed", "iteration", "step", "cpu_minutes", "score"])
    for cell, points in found.items():
        lines.writerows([cell.row, cell.seed, *point] for point in points)
    (out / "curves.csv").write_text(text.getvalue(), encoding="utf-8")
    shown = [row for row in grid.rows if grid.points_of(row)]
    by_row = {row: [points for cell, points in found.items() if cell.row == row] for row in shown}
    return write_curves(by_row, out / "curves")


def _finetuned_file(cell: Cell) -> Path:
    return cell.folder / f"finetune-{mix(*cell.finetune) % 16**6:06x}.json"


def _finetuning(cell: Cell) -> str:
    """What the fine-tuning of a cell is called in the list of costs."""
    return f"{cell.folder.name}/{_finetuned_file(cell).stem}"


def _note_finetuning(out: Path, cell: Cell, _: str, seconds: float) -> None:
    note_cost(out, _finetuning(cell), seconds)


def note_cost(out: Path, work: str, seconds: float) -> None:
    """Keep what a process cost, beside the table: a run that was never begun has no folder to keep it in."""
    append_row(out / COSTS, {"work": work, "cpu_seconds": round(seconds, 3)}, place="results.write")


def cpu_minutes(out: Path, cells_: Iterable[Cell]) -> float:
    """What these cells cost over all starts; a run that several of them share, or began with, counts once."""
    works = {work for cell in cells_ for work in (cell.folder.name, lender_of(cell.folder), _finetuning(cell))}
    return sum(float(row["cpu_seconds"]) for row in read_lines(out / COSTS) if row["work"] in works) / 60


def _keep_finetuned(cell: Cell) -> None:
    """finetune.json is of the settings last asked for; a table needs those of every row."""
    found = read_json(cell.folder / "finetune.json")
    write_json(_finetuned_file(cell), found)


def is_measured(cell: Cell, grid: Grid) -> bool:
    """Whether the run is over and its score known; then it is not started, and needs its checkpoints no more."""
    path = cell.folder / "results.json"
    return grid.measures == ("probe",) and path.is_file() and bool(_last_evaluation(path, cell, grid).get("probe"))


def iterations_of(cell: Cell, grid: Grid) -> int:
    said = [int(change.removeprefix(ITERATIONS)) for change in cell.pretrain if change.startswith(ITERATIONS)]
    return said[-1] if said else grid.iterations


def _last_evaluation(path: Path, cell: Cell, grid: Grid) -> dict[str, Any]:
    found, last = read_json(path), iterations_of(cell, grid)
    return next((entry for entry in found["evaluations"] if entry["iteration"] == last), {})


def read_scores(cell: Cell, grid: Grid) -> dict[str, Score]:
    """The score of every measure after the last iteration."""
    scores = {}
    for measure in grid.measures:
        path = cell.folder / "results.json" if measure == "probe" else _finetuned_file(cell)
        result = _last_evaluation(path, cell, grid).get(measure)
        if not result:
            raise UsageError(f"{path}: no {measure} result; the table needs labelled data.")
        scores[measure] = score_of(result)
    return scores


def score_of(result: Mapping[str, Any]) -> Score:
    parts = result.get("folds") or [result]
    values = [float(part.get("accuracy", part["mean_average_precision"])) for part in parts]
    return Score(values, read_hits(result))


def baseline_lines(grid: Grid, scores: Mapping[Cell, Mapping[str, Score]]) -> list[dict[str, Any]]:
    """What the probe says of raw inputs and of the first row's encoder before training, where its runs know."""
    if "probe" not in grid.measures:
        return []
    benchmark = next(iter(grid.rows))
    first = [cell for cell in scores if cell.row == benchmark]
    files = {cell.seed: cell.folder / "results.json" for cell in first}
    known = {seed: read_json(path).get("baselines") or {} for seed, path in files.items() if path.is_file()}
    base = {cell.seed: scores[cell]["probe"] for cell in first}
    lines = []
    for key, name in BASELINES.items():
        own = {seed: score_of(found[key]) for seed, found in known.items() if key in found}
        if own.keys() == base.keys():
            lines.append(scores_line(name, {"probe": own}, {"probe": base}, grid.measures, beside=benchmark))
    return lines


def change_of(own: Mapping[int, Score], base: Mapping[int, Score]) -> tuple[Change, dict[int, Change]]:
    """A row beside the benchmark, seed by seed; and over the test items within each seed where they are known."""
    within = {
        seed: change
        for seed in own
        if (change := compare_hits(own[seed].hits, base[seed].hits, generator=generator(seed, "ablation"))) is not None
    }
    if len(own) == 1:  # one seed has no spread; its items have, or its folds
        (seed,) = own
        return within.get(seed) or compare(own[seed].values, base[seed].values), within
    # Folds of a seed share the trained encoders: counted one by one they would pass for that many seeds.
    return compare([mean(own[seed].values) for seed in own], [mean(base[seed].values) for seed in own]), within


def write_tables(
    grid: Grid,
    scores: Mapping[Cell, Mapping[str, Score]],
    recipe: str,
    overrides: Sequence[str],
    out: Path,
    *,
    minutes: float,
) -> Path:
    """The grid as Markdown, CSV and JSON, and on the screen."""
    lines = [
        {**table_line(grid, scores, row), "cpu_minutes": cpu_minutes(out, [cell for cell in scores if cell.row == row])}
        for row in grid.rows
    ]
    cpu = cpu_minutes(out, scores)
    seeds = sorted({cell.seed for cell in scores})
    heads = ["row", *(f"{measure} %" for measure in grid.measures), *(f"{measure} change" for measure in grid.measures)]
    heads.append("CPU min")
    command = f"bridle ablate {' '.join([recipe, *overrides])} --table {grid.name} --seeds {','.join(map(str, seeds))}"
    over_items = any(change["over"] == "items" for line in lines for change in line["changes"].values())
    paired = (
        "test item (bootstrap), * where McNemar's test gives p < 0.05"
        if over_items
        else f"{'seed' if len(seeds) > 1 else 'fold'} (Student's), * where it excludes 0"
    )
    told = f"`{command}`; {cpu:.1f} CPU minutes in all, {minutes:.1f} wall minutes since it was last started. "
    told += f"Mean ± spread over seeds; changes are ± half their 95 % interval, paired by {paired}. "
    told += "Nothing was chosen on test data."
    baselines = baseline_lines(grid, scores)
    rows = [[line["row"], *line["shown"], ""] for line in baselines]
    rows += [[line["row"], *line["shown"], f"{line['cpu_minutes']:.1f}"] for line in lines]
    markdown = "\n".join(
        [f"**{grid.title}**", "", _bar(heads), _bar(["---"] * len(heads)), *(_bar(row) for row in rows), "", told, ""]
    )
    (out / "table.md").write_text(markdown, encoding="utf-8")
    text = io.StringIO()
    csv.writer(text).writerows([heads, *rows])
    (out / "table.csv").write_text(text.getvalue(), encoding="utf-8")
    cost = {"cpu_minutes": cpu, "wall_minutes_since_last_start": minutes}
    write_json(
        out / "table.json",
        {"title": grid.title, "command": command, "seeds": seeds, **cost, "baselines": baselines, "rows": lines},
    )
    title = escape(grid.title)
    screen = Table(*heads, title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        screen.add_row(*map(escape, row))
    console = Console(highlight=False)
    console.print(screen)
    console.print(f"wrote {out / 'table.md'}, table.csv and table.json", markup=False, soft_wrap=True)
    return out / "table.md"


def table_line(grid: Grid, scores: Mapping[Cell, Mapping[str, Score]], row: str) -> dict[str, Any]:
    """The figures of one row beside the first."""
    benchmark = next(iter(grid.rows))
    if not any(cell.row == row for cell in scores):
        blank = [""] * (2 * len(grid.measures) - 1)
        return {"row": row, "scores": {}, "changes": {}, "shown": [f"needs weights ({WEIGHTS}FILE)", *blank]}
    own, base = (
        {
            measure: {cell.seed: scores[cell][measure] for cell in scores if cell.row == name}
            for measure in grid.measures
        }
        for name in (row, benchmark)
    )
    return scores_line(row, own, base, grid.measures, beside=benchmark)


def scores_line(row: str, owns: Scores, bases: Scores, measures: Sequence[str], *, beside: str) -> dict[str, Any]:
    """Scores by measure and seed, and how they are shown; a measure that the row does not have stays empty."""
    line: dict[str, Any] = {"row": row, "scores": {}, "changes": {}}
    means, changes = [], []
    for measure in measures:
        if measure not in owns:
            means.append("")
            changes.append("")
            continue
        own, base = owns[measure], bases[measure]
        by_seed = [mean(score.values) for score in own.values()]
        spread = f" ±{100 * stdev(by_seed):.1f}" if len(by_seed) > 1 else ""
        change, within = change_of(own, base)
        line["scores"][measure] = {str(seed): list(score.values) for seed, score in own.items()}
        by_items = {str(seed): one._asdict() for seed, one in within.items()}
        line["changes"][measure] = {**change._asdict(), "within_seed": by_items}
        means.append(f"{100 * mean(by_seed):.1f}{spread}")
        changes.append(str(change) if row != beside else "0")
    return {**line, "shown": [*means, *changes]}


def _bar(cells_: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells_) + " |"
