"""The table of a grid of runs: every row's score beside the benchmark's, as Markdown, CSV, JSON and on the screen.

Every score (with folds their mean) is paired with the benchmark's of the same seed, with Student's interval of the
differences; under a single seed rows are compared by the test items that only one of them answered rightly
(`bridle.evaluate.significance`). "*" marks what can hardly be chance.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.markup import escape

from bridle.console import plain_table, screen
from bridle.errors import UsageError
from bridle.evaluate.significance import Change, compare, compare_hits
from bridle.files import write_text
from bridle.grid.cells import WEIGHTS, Cell, iterations_of
from bridle.grid.table_file import Grid
from bridle.runs.checkpoint import write_json
from bridle.runs.results import BASELINES, Evaluation, Scores, read_results
from bridle.seeding import generator

ByMeasure = Mapping[str, Mapping[int, Scores]]  # by measure and seed


def last_evaluation(path: Path, cell: Cell, grid: Grid) -> Evaluation | None:
    """What was measured after the row's last iteration."""
    return read_results(path).at(iterations_of(cell, grid))


def read_scores(cell: Cell, grid: Grid) -> dict[str, Scores]:
    """The scores of every measure after the last iteration."""
    scores = {}
    for measure in grid.measures:
        path = cell.run.results() if measure == "probe" else cell.finetuned
        last = last_evaluation(path, cell, grid)
        if last is None or last.scores is None:
            raise UsageError(f"{path}: no {measure} result; the table needs labelled data.")
        scores[measure] = last.scores
    return scores


def baseline_lines(grid: Grid, scores: Mapping[Cell, Mapping[str, Scores]]) -> list[dict[str, Any]]:
    """Probe scores of raw inputs and of the first row's untrained encoder, where its runs have them."""
    if "probe" not in grid.measures:
        return []
    benchmark = next(iter(grid.rows))
    first = [cell for cell in scores if cell.row == benchmark]
    files = {cell.seed: cell.run.results() for cell in first}
    known = {seed: read_results(path).baselines for seed, path in files.items() if path.is_file()}
    base = {cell.seed: scores[cell]["probe"] for cell in first}
    lines = []
    for key, name in BASELINES.items():
        own = {seed: found[key] for seed, found in known.items() if key in found}
        if own.keys() == base.keys():
            lines.append(scores_line(name, {"probe": own}, {"probe": base}, grid.measures, beside=benchmark))
    return lines


def change_of(own: Mapping[int, Scores], base: Mapping[int, Scores]) -> tuple[Change, dict[int, Change]]:
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


class Costs(NamedTuple):
    """What a grid has cost."""

    cpu_minutes: float  # over all starts
    by_row: Mapping[str, float]  # CPU minutes
    wall_minutes: float  # since the last start

    def describe(self, command: str) -> str:
        """The command and its cost, for the note below a table."""
        cost = f"{self.cpu_minutes:.1f} CPU minutes in all, {self.wall_minutes:.1f} wall minutes"
        return f"`{command}`; {cost} since it was last started."


def write_tables(
    grid: Grid,
    scores: Mapping[Cell, Mapping[str, Scores]],
    recipe: str,
    overrides: Sequence[str],
    out: Path,
    costs: Costs,
) -> Path:
    """Write table.md, table.csv and table.json and print the table; returns the path of the first."""
    lines = [{**table_line(grid, scores, row), "cpu_minutes": costs.by_row[row]} for row in grid.rows]
    baselines = baseline_lines(grid, scores)
    seeds = sorted({cell.seed for cell in scores})
    changes = [f"{measure} change" for measure in grid.measures]
    heads = ["row", *(f"{measure} %" for measure in grid.measures), *changes, "CPU min"]
    rows = [[line["row"], *line["shown"], ""] for line in baselines]
    rows += [[line["row"], *line["shown"], f"{line['cpu_minutes']:.1f}"] for line in lines]
    command = ablate_command(recipe, overrides, grid, seeds)
    note = f"{costs.describe(command)} {_protocol_note(lines, len(seeds))}"
    cost = {"cpu_minutes": costs.cpu_minutes, "wall_minutes_since_last_start": costs.wall_minutes}
    stored = {"command": command, "seeds": seeds, **cost, "baselines": baselines, "rows": lines}
    return write_files(out, grid.title, [(heads, rows)], note, stored)


def ablate_command(recipe: str, overrides: Sequence[str], grid: Grid, seeds: Sequence[int]) -> str:
    """The command that makes a table, as a line for a shell."""
    return f"bridle ablate {shlex.join([recipe, *overrides])} --table {grid.name} --seeds {','.join(map(str, seeds))}"


def write_files(
    out: Path, title: str, tables: Sequence[tuple[list[str], list[list[str]]]], note: str, stored: Mapping[str, Any]
) -> Path:
    """Write tables (headings and rows) as table.md, table.csv and, with what else is stored, table.json; print them."""
    lines, text = [f"**{title}**", ""], io.StringIO()
    for heads, rows in tables:
        lines += [_bar(heads), _bar(["---"] * len(heads)), *map(_bar, rows), ""]
        csv.writer(text).writerows([heads, *rows])
        table = plain_table(*heads, title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        screen().print(table)
    write_text(out / "table.md", "\n".join([*lines, note, ""]))
    write_text(out / "table.csv", text.getvalue())
    write_json(out / "table.json", {"title": title, **stored})
    screen().print(f"wrote {out / 'table.md'}, table.csv and table.json", markup=False, soft_wrap=True)
    return out / "table.md"


def _protocol_note(lines: Sequence[Mapping[str, Any]], seeds: int) -> str:
    """How spreads and intervals were found."""
    if any(change["over"] == "items" for line in lines for change in line["changes"].values()):
        paired = "test item (bootstrap), * where McNemar's test gives p < 0.05"
    else:
        paired = f"{'seed' if seeds > 1 else 'fold'} (Student's), * where it excludes 0"
    return (
        f"Mean ± spread over seeds; changes are ± half their 95 % interval, paired by {paired}. "
        "Nothing was chosen on test data."
    )


def table_line(grid: Grid, scores: Mapping[Cell, Mapping[str, Scores]], row: str) -> dict[str, Any]:
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


def scores_line(row: str, owns: ByMeasure, bases: ByMeasure, measures: Sequence[str], *, beside: str) -> dict[str, Any]:
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
