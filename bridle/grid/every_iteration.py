"""Tables that read every iteration of a run: the paper's tables 1–3, its attribution and its codebook table.

Every row is trained once, for all iterations; its encoders are then probed and fine-tuned after each of them, on the
run's own data and on further data sets (`--on`). Under one seed scores stand with the 95 % interval over test items,
under several with Student's. What was measured is kept in the run's folder, so that the same command goes on.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from rich.console import Console

from bridle.config import load_config
from bridle.errors import UsageError
from bridle.evaluate.significance import half_width
from bridle.grid.ablation import costs_of, note_cost, open_grid, pretrain_cells
from bridle.grid.cells import Cell, iterations_of
from bridle.grid.comparison import ablate_command, change_of, write_files
from bridle.grid.subprocesses import run_beside
from bridle.grid.table_file import Grid
from bridle.quantize.usage import released_effective_usage
from bridle.report.plots import write_codebook_figures
from bridle.runs.results import Results, Scores, read_results, write_record
from bridle.seeding import mix

SHORT = {"probe": "LP", "finetune": "FT"}
METRICS = {"accuracy": "top-1", "top5": "top-5", "mean_average_precision": "mAP"}
CODEBOOK_HEADS = ["row", "iteration", "stage", "CUR", "UE nats", "ECU", "ECU, released code", "directions"]


class Other(NamedTuple):
    """A further data set to evaluate on."""

    recipe: str
    overrides: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Other:
        """From `--on "esc50 data.root=PATH"`."""
        recipe, *overrides = shlex.split(text) or [""]
        load_config(recipe, overrides)  # a typo is found before anything runs
        return cls(recipe, tuple(overrides))

    @property
    def name(self) -> str:
        return Path(self.recipe).stem


class Job(NamedTuple):
    """One thing to measure of a cell, and where the result is kept."""

    cell: Cell
    measure: str
    other: Other | None
    commands: tuple[tuple[str, ...], ...]
    written: Path  # by the last command
    kept: Path


Found = Mapping[tuple[str, int, str], Results]  # by row, seed and job
Table = tuple[list[str], list[list[str]]]  # headings and rows


def fill_every_iteration(
    recipe: str, overrides: Sequence[str], grid: Grid, *, seeds: Sequence[int], out: Path, jobs: int | None = None,
    on: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Run what is not finished yet, then write table.md, table.csv and table.json. Returns the first of them."""
    others, console, began = [Other.read(text) for text in on], Console(highlight=False), time.perf_counter()
    grid_cells, jobs = open_grid(recipe, overrides, grid, seeds, out, jobs, console)
    work = [job for cell in grid_cells for job in measuring(cell, grid, others)]
    begun = {job.cell.folder: job.cell for job in work if not job.kept.is_file()}
    pretrain_cells(recipe, begun.values(), out, jobs=jobs, console=console)
    measure_all(work, out, jobs=jobs, console=console)
    found = {(job.cell.row, job.cell.seed, title(job.measure, job.other)): read_results(job.kept) for job in work}
    command = ablate_command(recipe, overrides, grid, seeds) + "".join(f" --on {shlex.quote(text)}" for text in on)
    costs = costs_of(grid, grid_cells, out, wall_minutes=(time.perf_counter() - began) / 60)
    over = "Student's 95 % interval over seeds" if len(seeds) > 1 else "95 % interval over test items"
    note = f"{costs.describe(command)} Scores in %, with the {over}. Nothing was chosen on test data."
    tables = list(make_tables(grid, found, seeds))
    if "codebooks" in grid.measures:
        draw_norms(grid, found, seeds[0], out)
    named = [{"columns": heads, "rows": rows} for heads, rows in tables]
    return write_files(out, grid.title, tables, note, {"seeds": list(seeds), "command": command, "tables": named})


def measuring(cell: Cell, grid: Grid, others: Sequence[Other]) -> Iterator[Job]:
    """What is to be measured of a run: its codebooks, and its encoders on every data set."""
    iterations = range(1, iterations_of(cell, grid) + 1)
    if "codebooks" in grid.measures:
        written = cell.folder / "codebooks.json"
        yield Job(cell, "codebooks", None, (("codebooks", str(cell.folder)),), written, kept(cell, "codebooks", ()))
    for other in [None, *others]:
        where = () if other is None else ("--on", other.recipe, *other.overrides)
        end = "" if other is None else f"-{other.name}"
        if "probe" in grid.measures:
            command = ("probe", str(cell.folder), *where)
            yield Job(cell, "probe", other, (command,), cell.folder / f"probe{end}.json", kept(cell, "probe", where))
        if "finetune" in grid.measures:
            commands = tuple(
                ("finetune", str(cell.folder), *where, *cell.finetune, "--iteration", str(r)) for r in iterations
            )
            asked = kept(cell, "finetune", (*where, *cell.finetune))
            yield Job(cell, "finetune", other, commands, cell.folder / f"finetune{end}.json", asked)


def kept(cell: Cell, measure: str, asked: Sequence[str]) -> Path:
    return cell.folder / f"measured-{measure}-{mix(*asked) % 16**6:06x}.json"


def measure_all(work: Sequence[Job], out: Path, *, jobs: int, console: Console) -> None:
    """Run the commands of all jobs whose result is not kept, of different runs side by side."""
    waiting = list({job.kept: job for job in work if not job.kept.is_file()}.values())
    while waiting:
        kind = (waiting[0].measure, waiting[0].other)
        alike = [job for job in waiting if (job.measure, job.other) == kind]
        turn = list({job.cell.folder: job for job in reversed(alike)}.values())[::-1]  # one for every run
        for commands in zip(*(job.commands for job in turn), strict=True):
            named = {f"{job.cell.folder.name} {title(*kind)}": list(c) for job, c in zip(turn, commands, strict=True)}
            # A measurement counts among the costs of its run, which its name begins with.
            run_beside(named, jobs=jobs, console=console, spent=lambda name, s: note_cost(out, name.split()[0], s))
        for job in turn:
            write_record(job.kept, read_results(job.written))
        waiting = [job for job in waiting if job not in turn]


def title(measure_: str, other: Other | None) -> str:
    return SHORT.get(measure_, measure_) + ("" if other is None else f" on {other.name}")


def result_of(results: Results, iteration: int) -> Scores:
    """The scores of one iteration in a results file of either kind."""
    entry = results.at(iteration)
    if entry is None or entry.scores is None:
        raise UsageError(f"no score after iteration {iteration}; the table needs labelled data.")
    return entry.scores


def metrics_of(result: Scores) -> list[str]:
    """What is shown: top-1 and top-5, with folds also mAP; of several labels mAP alone."""
    if result.accuracy is None:
        return ["mean_average_precision"]
    shown = ["accuracy", *(["top5"] if result.top5 is not None else [])]
    return [*shown, *(["mean_average_precision"] if result.folds else [])]


def score_text(results: Sequence[Scores], metric: str) -> str:
    """One seed: 44.8 [43.1, 46.5]; several: their mean ± half of Student's interval."""
    values = [float(getattr(result, metric)) for result in results]
    text = f"{100 * mean(values):.1f}"
    if len(values) > 1:
        return f"{text} ±{100 * half_width(values):.1f}"
    of_map = metric == "mean_average_precision" and results[0].accuracy is not None  # not the main score
    bounds = results[0].mean_average_precision_interval if of_map else results[0].interval if metric != "top5" else None
    return text if bounds is None else f"{text} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def make_tables(grid: Grid, found: Found, seeds: Sequence[int]) -> Iterator[Table]:
    """Scores, effects and codebooks, as far as the grid asks for them."""
    scored = list(dict.fromkeys(what for _, _, what in found if what != "codebooks"))
    if scored:
        yield score_table(grid, found, seeds, scored)
    if grid.effects and scored:
        yield effect_table(grid, found, seeds, scored)
    if "codebooks" in grid.measures:
        yield CODEBOOK_HEADS, list(codebook_rows(grid, found, seeds))


def score_table(grid: Grid, found: Found, seeds: Sequence[int], scored: Sequence[str]) -> Table:
    """A line for every row and iteration, a column for every score."""
    first = next(row for row, _, _ in found)
    columns = [(what, metric) for what in scored for metric in metrics_of(result_of(found[first, seeds[0], what], 1))]
    lines = []
    for row in grid.rows:
        if not has(found, row):
            lines.append([row, "", "needs weights (encoder.weights=FILE)", *[""] * (len(columns) - 1)])
            continue
        for r in range(1, grid.iterations + 1):
            by_seed = {what: [result_of(found[row, seed, what], r) for seed in seeds] for what in scored}
            lines.append([row, f"iter{r}", *(score_text(by_seed[what], metric) for what, metric in columns)])
    return ["row", "iteration", *(f"{what} {METRICS[metric]}" for what, metric in columns)], lines


def effect_table(grid: Grid, found: Found, seeds: Sequence[int], scored: Sequence[str]) -> Table:
    """Differences between rows of the same seed; * marks what can hardly be chance."""
    lines = []
    for name, (before, after) in grid.effects.items():
        if not (has(found, before) and has(found, after)):
            continue
        for r in range(1, grid.iterations + 1):
            texts = []
            for what in scored:
                old, new = ({seed: result_of(found[row, seed, what], r) for seed in seeds}
                            for row in (before, after))  # fmt: skip
                texts.append(str(change_of(new, old)[0]))
            lines.append([name, f"{before} → {after}", f"iter{r}", *texts])
    return ["effect", "from → to", "iteration", *scored], lines


def codebook_rows(grid: Grid, found: Found, seeds: Sequence[int]) -> Iterator[list[str]]:
    """A line for every row, iteration and stage (the paper's appendix G), means over seeds."""
    for row in (row for row in grid.rows if has(found, row)):
        files = [found[row, seed, "codebooks"].evaluations for seed in seeds]
        for entries in zip(*files, strict=True):
            for stages in zip(*(entry.codebooks for entry in entries), strict=True):
                rate, entropy, usage = (
                    mean(getattr(stage, key) for stage in stages)
                    for key in ("usage_rate", "entropy", "effective_usage")
                )
                released = mean(released_effective_usage(s.usage_rate, s.entropy, s.codes) for s in stages)
                wide = [s.code_dimension for s in stages if s.code_dimension is not None]
                yield [
                    row, f"iter{entries[0].iteration}", str(stages[0].stage), f"{rate:.2f}", f"{entropy:.2f}",
                    f"{usage:.3f}", f"{released:.4f}", f"{mean(wide):.1f}" if wide else "",
                ]  # fmt: skip


def draw_norms(grid: Grid, found: Found, seed: int, out: Path) -> None:
    """Lengths of the code vectors before and after training, of the first seed, a folder a row."""
    for number, row in enumerate(grid.rows, start=1):
        if has(found, row):
            write_codebook_figures(found[row, seed, "codebooks"].evaluations, out / "figures" / f"row{number}")


def has(found: Found, row: str) -> bool:
    return any(name == row for name, _, _ in found)
