"""Figures of a run as rows of JSON: appending them, and trackers (TensorBoard, callbacks) that receive them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from bridle import failpoints
from bridle.files import append_line, writing

Row = Mapping[str, Any]


class Callback(Protocol):
    """Plug for W&B, MLflow and the like: give any object with these methods to `bridle.pretrain(callbacks=[…])`."""

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        """The run starts or continues."""

    def on_metrics(self, row: Row) -> None:
        """One row of metrics.jsonl."""

    def on_evaluation(self, result: Row) -> None:
        """The result of an evaluation after an encoder phase."""

    def on_end(self) -> None:
        """The run is finished or interrupted."""


def append_row(path: Path, row: Row, *, failpoint: str | None = None) -> None:
    """Add a row to a .jsonl file."""
    with writing(path):
        if failpoint is not None:
            failpoints.hit(failpoint)
        append_line(path, row)


def is_up_to(row: Row, phase_index: int, step: int) -> bool:
    """Is the row of this step or an earlier one? A row without phase_index or step is not."""
    own = row.get("phase_index"), row.get("step")
    return all(isinstance(number, int) for number in own) and own <= (phase_index, step)


class TensorBoard:
    """Writes every number of every row, under phase/name, when the tensorboard package is installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        self.writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")

    def on_metrics(self, row: Row) -> None:
        for key, value in row.items():
            if key in ("iteration", "phase", "step", "steps", "phase_index", "resumed_from"):
                continue
            values = {f"/{m + 1}": v for m, v in enumerate(value)} if isinstance(value, list) else {"": value}
            for suffix, number in values.items():
                tag = f"iter{row['iteration']}-{row['phase']}/{key}{suffix}"
                if number is not None:  # a skipped step has no figures
                    self.writer.add_scalar(tag, number, row["step"])

    def on_evaluation(self, result: Row) -> None:
        for kind in ("probe", "finetune"):
            for key in ("accuracy", "mean_average_precision"):  # with several labels an item there is no accuracy
                if (value := (result.get(kind) or {}).get(key)) is not None:
                    self.writer.add_scalar(f"{kind}/{key}", value, result["iteration"])

    def on_end(self) -> None:
        self.writer.close()


def tensorboard_if_installed(folder: Path) -> list[Callback]:
    """A TensorBoard writer, or nothing where the package is not installed."""
    try:
        return [TensorBoard(folder)]
    except ImportError:
        return []
