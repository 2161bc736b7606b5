"""Experiment trackers behind the key `log`: TensorBoard, W&B, MLflow, Trackio.

`Tracker` turns rows and evaluations into named values at one step axis for the whole run: the steps of earlier phases
come first. A tracker's class opens its run and hands over values. RUN/trackers.json holds the id that each tracker
gave the run, so that a resumed run goes on with the same curve; rows that it repeats are not logged twice.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle import files
from bridle.console import ProgressLine
from bridle.errors import CheckpointError, first_line, needs
from bridle.runs.callbacks import Callback, Row, is_up_to
from bridle.runs.folder import RunFolder

PROJECT = "bridle"
NO_VALUES = ("iteration", "phase", "step", "steps", "phase_index", "resumed_from", "world_size")
NO_COLUMNS = ("norms", "norms_start")  # of the table of codebooks; they are histograms


class Table(NamedTuple):
    """A table; cells are numbers, texts or None."""

    columns: list[str]
    rows: list[list[Any]]

    def lines(self, separator: str = ",") -> str:
        """The table as CSV."""
        out = io.StringIO()
        csv.writer(out, delimiter=separator, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()


class Histogram(NamedTuple):
    """Values whose distribution is shown."""

    values: list[float]


class Picture(NamedTuple):
    """Pixels (H, W, 3) uint8."""

    pixels: NDArray[np.uint8]
    caption: str = ""


Value = float | Table | Histogram | Picture
Pictures = Callable[[Path], Iterable[tuple[str, Picture]]]  # of a run's folder, by name


class Tracker(ABC):
    """What trackers share: names, steps, the run's id, and that a tracker that fails does not end the training."""

    name = ""

    def __init__(self, pictures: Pictures | None = None) -> None:
        self.pictures, self.folder, self.progress = pictures, Path(), ProgressLine()
        self.seen: tuple[int, int] | None = None  # phase and step of the last row that an earlier process logged
        self.lengths: dict[int, int] = {}  # steps of each phase
        self.step, self.working = 0, True

    @abstractmethod
    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        """Begin or continue the tracker's run; returns the id by which it can be continued."""

    @abstractmethod
    def log(self, values: Mapping[str, Value], step: int) -> None:
        """Hand over values."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes."""

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the tracker's run; a package that is not installed or cannot start ends the command here."""
        self.folder = folder
        rows = [row for row in RunFolder(folder).metrics() if is_up_to(row, 1 << 30, 0)]
        self.lengths = {row["phase_index"]: int(row.get("steps") or 0) for row in rows}
        self.step = self._step_of(rows[-1]) if rows else 0
        ids = read_ids(folder)
        known = ids.get(self.name)
        if known is not None and rows:
            self.seen = rows[-1]["phase_index"], rows[-1]["step"]
        opened = self.open(known or uuid.uuid4().hex, resumed=known is not None, config=config)
        files.write_text(folder / IDS, json.dumps({**ids, self.name: opened}) + "\n")

    def on_metrics(self, row: Row) -> None:
        """Log the numbers of a row under PHASE/NAME, those of a stage under PHASE/NAME/STAGE."""
        self.lengths[row["phase_index"]] = row["steps"]
        self.step = self._step_of(row)
        if self.seen is not None and is_up_to(row, *self.seen):
            return
        found: dict[str, Value] = {}
        for key in row.keys() - set(NO_VALUES):
            value = row[key]
            several = {f"/{m + 1}": v for m, v in enumerate(value)} if isinstance(value, list) else {"": value}
            named = {f"iter{row['iteration']}-{row['phase']}/{key}{stage}": v for stage, v in several.items()}
            found |= {name: v for name, v in named.items() if v is not None}  # a skipped step has no figures
        self._log(found)

    def on_evaluation(self, result: Row) -> None:
        """Log scores, the table of codebooks, histograms of code norms, and token maps where there are any."""
        found: dict[str, Value] = {}
        for kind in ("probe", "finetune"):
            for key in ("accuracy", "mean_average_precision"):  # with several labels an item there is no accuracy
                if (value := (result.get(kind) or {}).get(key)) is not None:
                    found[f"{kind}/{key}"] = value
        stages = result.get("codebooks") or ()
        if stages:
            columns = [key for key in stages[0] if key not in NO_COLUMNS]
            found["codebooks/stages"] = Table(columns, [[stage.get(key) for key in columns] for stage in stages])
            found |= {f"codebooks/norms/{stage['stage']}": Histogram(list(stage["norms"])) for stage in stages}
        if self.pictures is not None and self.working:
            found |= dict(self.pictures(self.folder))
        self._log(found)

    def on_end(self) -> None:
        """Close the tracker's run; it can be continued."""
        self._guarded(self.close)

    def _step_of(self, row: Row) -> int:
        before = sum(steps for phase, steps in self.lengths.items() if phase < row["phase_index"])
        return int(before + row["step"])

    def _log(self, values: Mapping[str, Value]) -> None:
        if values:
            self._guarded(lambda: self.log(values, self.step))

    def _guarded(self, call: Callable[[], None]) -> None:
        if not self.working:
            return
        try:
            call()
        except Exception as error:  # a server that is away must not cost the run
            self.working = False
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.progress.note(f"log={self.name} failed and is off until the run is started again ({reason})")


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard."""

    name = "tensorboard"

    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        with needs("tensorboard"):
            from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"))
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")
        return run_id

    def log(self, values: Mapping[str, Value], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, Table):
                head, *rows = value.lines("|").splitlines()
                text = "\n".join([head, "|".join("-" for _ in value.columns), *rows])
                self.writer.add_text(name, text, step)
            elif isinstance(value, Histogram):
                self.writer.add_histogram(name, np.asarray(value.values), step)
            elif isinstance(value, Picture):
                self.writer.add_image(name, value.pixels, step, dataformats="HWC")
            else:
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class LogsDictionaries(Tracker):
    """Trackers with the interface of W&B: `open` sets the package and its run, a step is one dictionary."""

    package: Any
    run: Any

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self.run.log({name: self._media(value) for name, value in values.items()}, step=step)

    def _media(self, value: Value) -> Any:
        if isinstance(value, Table):
            return self.package.Table(columns=value.columns, data=value.rows)
        if isinstance(value, Histogram):
            return self.package.Histogram(value.values)
        return self.package.Image(value.pixels, caption=value.caption) if isinstance(value, Picture) else value

    def close(self) -> None:
        self.run.finish()


class WandB(LogsDictionaries):
    """A run of Weights & Biases; WANDB_PROJECT and WANDB_MODE=offline are W&B's own settings."""

    name = "wandb"

    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        with needs("wandb"):
            import wandb

        self.package = wandb
        project = None if wandb.setup().settings.project else PROJECT
        self.run = wandb.init(
            project=project, id=run_id, resume="allow", name=run_name(self.folder), config=dict(config), dir=self.folder
        )
        return run_id


class MLflow(Tracker):
    """A run of MLflow, where MLFLOW_TRACKING_URI says; tables and histograms become CSV files."""

    name = "mlflow"

    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        with needs("mlflow"):
            from mlflow import MlflowClient

        self.client = MlflowClient()
        if resumed:
            self.client.update_run(run_id, status="RUNNING")
        else:
            wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            there = self.client.get_experiment_by_name(wanted)
            experiment = self.client.create_experiment(wanted) if there is None else there.experiment_id
            run_id = self.client.create_run(experiment, run_name=run_name(self.folder)).info.run_id
            self.client.log_dict(run_id, dict(config), "config.json")
        self.run_id = run_id
        return run_id

    def log(self, values: Mapping[str, Value], step: int) -> None:
        from mlflow.entities import Metric

        now, numbers = int(1000 * time.time()), list[Metric]()
        for name, value in values.items():
            if isinstance(value, Table | Histogram):
                table = value if isinstance(value, Table) else Table(["value"], [[v] for v in value.values])
                self.client.log_text(self.run_id, table.lines(), f"{name}-{step}.csv")
            elif isinstance(value, Picture):
                self.client.log_image(self.run_id, value.pixels, key=name, step=step)
            else:
                numbers.append(Metric(name, value, now, step))
        if numbers:
            self.client.log_batch(self.run_id, metrics=numbers)

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class Trackio(LogsDictionaries):
    """A run of Trackio, which writes to the folder TRACKIO_DIR."""

    name = "trackio"

    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        with needs("trackio"):
            import trackio

        self.package = trackio
        run_id = run_id if resumed else f"{run_name(self.folder)}-{run_id[:6]}"  # runs are found by their name
        self.run = trackio.init(project=PROJECT, name=run_id, config=dict(config), resume="allow", embed=False)
        return run_id


IDS = "trackers.json"
TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow, Trackio)}


def open_trackers(log: str, pictures: Pictures | None = None) -> list[Callback]:
    """The tracker that the key `log` names; `auto` is TensorBoard, without pictures, where it is installed."""
    if log == "auto":
        return [TensorBoard()] if find_spec("tensorboard") is not None else []
    return [TRACKERS[log](pictures)] if log in TRACKERS else []


def read_ids(folder: Path) -> dict[str, str]:
    """The id that each tracker gave the run; empty before the first one."""
    try:
        return {name: str(value) for name, value in files.read_json(folder / IDS).items()}
    except CheckpointError:
        return {}


def run_name(folder: Path) -> str:
    """What a run is called in trackers: the name of its folder."""
    return folder.resolve().name
