"""The cells of a table: every row under every seed, as the overrides of a run.

Rows that differ only in `finetune.` share their pretraining.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridle.config import Config, load_config
from bridle.errors import ConfigError, quoted
from bridle.grid.table_file import NEEDS_WEIGHTS, Grid
from bridle.runs.folder import RunFolder
from bridle.seeding import mix

ITERATIONS = "schedule.iterations="  # a row may give its own; else the table's
WEIGHTS = "encoder.weights="


class Cell(NamedTuple):
    """One row under one seed."""

    row: str
    seed: int
    folder: Path  # of the pretraining run
    pretrain: tuple[str, ...]  # overrides
    finetune: tuple[str, ...]

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def finetuned(self) -> Path:
        """The fine-tuning results of this row; finetune.json is of the settings last asked for."""
        return self.folder / f"finetune-{mix(*self.finetune) % 16**6:06x}.json"

    @property
    def finetune_cost(self) -> str:
        """What the fine-tuning of this cell is called in the list of costs."""
        return f"{self.folder.name}/{self.finetuned.stem}"


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
            config = load_config(recipe, everything)  # a typo in the last row is found before the first one runs
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


def iterations_of(cell: Cell, grid: Grid) -> int:
    """The number of iterations of a cell's run."""
    given = [int(change.removeprefix(ITERATIONS)) for change in cell.pretrain if change.startswith(ITERATIONS)]
    return given[-1] if given else grid.iterations
