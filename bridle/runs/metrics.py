"""What people see and keep of a run: the live line, metrics.jsonl, TensorBoard, and hooks for other trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridle import failpoints
from bridle.console import clock
from bridle.files import append_line, json_line, read_lines, sync, unwritable, write_text

Row = Mapping[str, Any]
COSTS = "costs.jsonl"  # of a run: CPU seconds at every checkpoint


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


class MetricsFile:
    """metrics.jsonl. On resume, rows behind the checkpoint are dropped, so there are neither gaps nor repeats."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rewind(self, *, phase_index: int, step: int) -> None:
        """Keep only rows up to `step` of phase `phase_index`."""
        kept = [row for row in read_lines(self.path) if _is_up_to(row, phase_index, step)]
        try:
            write_text(self.path, "".join(map(json_line, kept)))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def append(self, row: Row) -> None:
        append_row(self.path, row, place="metrics.append")

    def sync(self) -> None:
        """Safe on the disk: a checkpoint that survives a power cut must not find fewer rows than it had."""
        try:
            if self.path.exists():
                sync(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error


def cpu_seconds_at(folder: Path, *, phase_index: int, step: int) -> float | None:
    """CPU seconds of training up to a place: as noted with its checkpoint, or else with the last row before it.

    None where that is not known, as in runs of older versions.
    """
    noted = [
        row for row in read_lines(folder / COSTS) if (row.get("phase_index"), row.get("step")) == (phase_index, step)
    ]
    before = [row for row in read_lines(folder / "metrics.jsonl") if _is_up_to(row, phase_index, step)]
    for row in (*noted[-1:], *before[-1:]):
        if isinstance(found := row.get("cpu_seconds"), int | float):
            return float(found)
    return None


def append_row(path: Path, row: Row, *, place: str | None = None) -> None:
    """Add a row to a .jsonl file; `place` is its failpoint."""
    try:
        if place is not None:
            failpoints.hit(place)
        append_line(path, row)
    except OSError as error:
        raise unwritable(path, error) from error


def _is_up_to(row: Row, phase_index: int, step: int) -> bool:
    """Was the row written before that place? One that does not say where it was written was not written here."""
    place = row.get("phase_index"), row.get("step")
    return all(isinstance(number, int) for number in place) and place <= (phase_index, step)


def describe(row: Row, *, iterations: int, eta_seconds: float) -> str:
    """A row of metrics as the line people read."""
    turn = f"iter {row['iteration']}/{iterations}" if row["iteration"] else "scratch"
    parts = [
        f"{turn} {row['phase']:<9} {row['step']:>5}/{row['steps']}",
        f"loss {row['loss']:.3f}",
    ]
    if "token_accuracy" in row:
        parts.append(f"accuracy {_stages(row['token_accuracy'])}")
    if "accuracy" in row:
        parts.append(f"accuracy {row['accuracy']:.2f}")
    if "cosine" in row:
        parts.append(f"cosine loss {row['cosine']:.3f}")
    if "code_usage" in row:
        parts.append(f"codes used {_stages(row['code_usage'])}")
    if row["skipped"]:
        parts.append(f"skipped {row['skipped']}")
    parts.append(f"{row['samples_per_second']:,.0f} samples/s")
    parts.append(f"ETA {clock(eta_seconds)}")
    return " · ".join(parts)


def describe_briefly(row: Row, *, iterations: int, eta_seconds: float) -> str:
    """The same in 80 columns: accuracy of the first stage, use of the least used book."""
    parts = [f"{row['iteration']}/{iterations} {row['phase']} {row['step']}/{row['steps']}", f"loss {row['loss']:.3f}"]
    if "token_accuracy" in row:
        parts.append(f"acc {_stages(row['token_accuracy'][:1])}")
    if "accuracy" in row:
        parts.append(f"acc {row['accuracy']:.2f}")
    if "code_usage" in row:
        parts.append(f"codes {_stages([min(row['code_usage'])])}")
    parts.append(f"{row['samples_per_second']:,.0f}/s")
    parts.append(f"ETA {clock(eta_seconds)}")
    return " · ".join(parts)


def _stages(values: Sequence[float]) -> str:
    shown = (f"{value:.2f}" for value in values)
    return "/".join("1.0" if text == "1.00" else text.removeprefix("0") for text in shown)


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
