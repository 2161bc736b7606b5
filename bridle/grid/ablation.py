"""`bridle ablate`: a grid of runs over seeds and one table; the same command continues it.

`table_file` reads the table, `cells` makes runs of it, `comparison` compares and writes what was measured. cpu.jsonl
beside the table has a line for every process that ended: what it worked on, and its CPU seconds. So the cost of a
table is that of all its starts.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from bridle.config import load_config
from bridle.errors import UsageError
from bridle.files import read_lines, write_text
from bridle.grid.cells import Cell, cells, without_weights
from bridle.grid.comparison import Costs, last_evaluation, read_scores, write_tables
from bridle.grid.subprocesses import run_beside
from bridle.grid.table_file import Grid
from bridle.machine import usable_cores
from bridle.report.curves import curve_of, write_curves
from bridle.runs.callbacks import append_row
from bridle.runs.results import read_results, write_record

COSTS = "cpu.jsonl"


def run_grid(
    recipe: str, overrides: Sequence[str], grid: Grid, *, seeds: Sequence[int], out: Path, jobs: int | None = None
) -> Path:
    """Run what is not finished yet, then write table.md, table.csv and table.json. Returns the first of them."""
    console, began = Console(highlight=False), time.perf_counter()
    grid_cells, jobs = open_grid(recipe, overrides, grid, seeds, out, jobs, console)
    runs = {cell.folder: cell for cell in grid_cells}
    missing = [cell for cell in runs.values() if not is_measured(cell, grid)]
    pretrain_cells(recipe, missing, out, jobs=jobs, console=console)
    if "finetune" in grid.measures:
        finetune_cells(grid_cells, out, console=console)
    scores = {cell: read_scores(cell, grid) for cell in grid_cells}
    costs = costs_of(grid, scores, out, wall_minutes=(time.perf_counter() - began) / 60)
    table = write_tables(grid, scores, recipe, overrides, out, costs)
    if grid.curve:
        measure_curves(grid, grid_cells, out, jobs=jobs, console=console)
    return table


def open_grid(
    recipe: str,
    overrides: Sequence[str],
    grid: Grid,
    seeds: Sequence[int],
    out: Path,
    jobs: int | None,
    console: Console,
) -> tuple[list[Cell], int]:
    """Check and create the folder; all cells, and how many runs at a time: as many as the cores have threads for."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: exists and is not a directory; choose another --out.")
    found = list(cells(recipe, overrides, grid, seeds=seeds, out=out))
    threads = load_config(recipe, without_weights(overrides)).runtime.threads
    jobs = jobs or max(1, usable_cores() // max(1, threads))
    out.mkdir(parents=True, exist_ok=True)
    runs = f"{len({cell.folder for cell in found})} runs, {jobs} at a time"
    console.print(f"{grid.title}: {len(grid.rows)} rows × {len(seeds)} seeds, {runs}", markup=False)
    return found, jobs


def pretrain_cells(recipe: str, begun: Iterable[Cell], out: Path, *, jobs: int, console: Console) -> None:
    """Train what is not trained yet."""
    commands = {cell.folder.name: ["pretrain", recipe, *cell.pretrain, "--out", str(cell.folder)] for cell in begun}
    run_beside(commands, jobs=jobs, console=console, spent=partial(note_cost, out))


def finetune_cells(grid_cells: Sequence[Cell], out: Path, *, console: Console) -> None:
    """Fine-tune one cell after the other, since rows that share a run share its folder; keep each one's results."""
    for cell in grid_cells:
        command = ["finetune", str(cell.folder), *cell.finetune]
        run_beside(
            {f"{cell.folder.name} finetune": command},
            jobs=1,
            console=console,
            spent=lambda _, seconds, work=cell.finetune_cost: note_cost(out, work, seconds),  # type: ignore[misc]
        )
        write_record(cell.finetuned, read_results(cell.run.results("finetune")))


def measure_curves(grid: Grid, grid_cells: Sequence[Cell], out: Path, *, jobs: int, console: Console) -> None:
    """Probe the checkpoints on the way and draw curves of the rows that have them."""
    wanted = [cell for cell in grid_cells if grid.points_of(cell.row)]
    probed = [cell.folder for cell in wanted if cell.run.checkpoint_paths()]
    run_beside(
        {f"{folder.name} curve": ["probe", str(folder), "--curve"] for folder in probed}, jobs=jobs, console=console
    )
    found = [cell for cell in wanted if cell.run.results("curve").is_file()]
    if lost := sorted({cell.folder.name for cell in wanted} - {cell.folder.name for cell in found}):
        console.print(f"no curve of {', '.join(lost)}: the checkpoints are gone", markup=False)
    if found:
        drawn = draw_curves(grid, found, out)
        console.print(f"wrote {out / 'curves.csv'}{''.join(f', {path.name}' for path in drawn)}", markup=False)


def draw_curves(grid: Grid, cells_: Sequence[Cell], out: Path) -> list[Path]:
    """curves.svg and .png, a line a row over all seeds, and curves.csv with every point."""
    found = {cell: curve_of(read_results(cell.run.results("curve"))) for cell in cells_}
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["row", "seed", "iteration", "step", "cpu_minutes", "score"])
    for cell, points in found.items():
        lines.writerows([cell.row, cell.seed, *point] for point in points)
    write_text(out / "curves.csv", text.getvalue())
    shown = [row for row in grid.rows if grid.points_of(row)]
    by_row = {row: [points for cell, points in found.items() if cell.row == row] for row in shown}
    return write_curves(by_row, out / "curves")


def note_cost(out: Path, work: str, seconds: float) -> None:
    """Keep what a process cost, beside the table: a run that was never begun has no folder to keep it in."""
    append_row(out / COSTS, {"work": work, "cpu_seconds": round(seconds, 3)}, failpoint="results.write")


def costs_of(grid: Grid, grid_cells: Iterable[Cell], out: Path, *, wall_minutes: float) -> Costs:
    """What a grid has cost, in all and by row."""
    known = list(grid_cells)
    by_row = {row: cpu_minutes(out, [cell for cell in known if cell.row == row]) for row in grid.rows}
    return Costs(cpu_minutes(out, known), by_row, wall_minutes)


def cpu_minutes(out: Path, cells_: Iterable[Cell]) -> float:
    """What these cells cost over all starts; a run that several of them share counts once."""
    works = {work for cell in cells_ for work in (cell.folder.name, cell.finetune_cost)}
    return sum(float(row["cpu_seconds"]) for row in read_lines(out / COSTS) if row["work"] in works) / 60


def is_measured(cell: Cell, grid: Grid) -> bool:
    """Whether the run is over and its score known; then it is not started, and needs its checkpoints no more."""
    path = cell.run.results()
    if grid.measures != ("probe",) or not path.is_file():
        return False
    last = last_evaluation(path, cell, grid)
    return last is not None and last.probe is not None
