"""What people see and keep of a run: the live line, metrics.jsonl, TensorBoard, and hooks for other trackers."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from bridle import distributed, failpoints
from bridle.errors import unwritable

Row = Mapping[str, Any]
COSTS = "costs.jsonl"  # of a run: CPU seconds at every checkpoint
QUIET_SECONDS = 10.0  # between lines when the output is a file


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
        kept = [row for row in read_rows(self.path) if _is_up_to(row, phase_index, step)]
        temporary = self.path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(_line(row) for row in kept), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise unwritable(self.path, error) from error

    def append(self, row: Row) -> None:
        append_row(self.path, row, place="metrics.append")

    def sync(self) -> None:
        """Safe on the disk: a checkpoint that survives a power cut must not find fewer rows than it had."""
        try:
            if self.path.exists():
                with self.path.open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error


def cpu_seconds_at(folder: Path, *, phase_index: int, step: int) -> float | None:
    """CPU seconds of training up to a place: as noted with its checkpoint, or else with the last row before it.

    None where that is not known, as in runs of older versions.
    """
    noted = [
        row for row in read_rows(folder / COSTS) if (row.get("phase_index"), row.get("step")) == (phase_index, step)
    ]
    before = [row for row in read_rows(folder / "metrics.jsonl") if _is_up_to(row, phase_index, step)]
    for row in (*noted[-1:], *before[-1:]):
        if isinstance(found := row.get("cpu_seconds"), int | float):
            return float(found)
    return None


def append_row(path: Path, row: Row, *, place: str | None = None) -> None:
    """Add a row to a .jsonl file, after the last whole one; `place` is its failpoint."""
    try:
        if place is not None:
            failpoints.hit(place)
        with path.open("ab+") as file:
            end = file.tell()
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):  # a crash or a full disk cut the last row short
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(_line(row).encode())
    except OSError as error:
        raise unwritable(path, error) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file up to the first line that is no row: the last one, if a crash cut it short."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or made to be deep
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def _is_up_to(row: Row, phase_index: int, step: int) -> bool:
    """Was the row written before that place? One that does not say where it was written was not written here."""
    place = row.get("phase_index"), row.get("step")
    return all(isinstance(number, int) for number in place) and place <= (phase_index, step)


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


class Nowhere(io.StringIO):
    """A stream that forgets."""

    def write(self, text: str) -> int:
        return len(text)


class ProgressLine:
    """One line that rewrites itself on a terminal, and an occasional line of its own in a log file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or (sys.stderr if distributed.rank() == 0 else Nowhere())  # rank 0 speaks for all
        self.live = self.stream.isatty()
        self.last_shown = 0.0
        self.open_line = False

    def show(self, text: str, short: str, *, final: bool = False) -> None:
        """Show the state of things, in the short form where the long one does not fit; `final` ends the line."""
        if self.live:
            width = shutil.get_terminal_size().columns  # a line that wraps cannot be rewritten
            fitting = text if final or len(text) < width else short[: width - 1]
            self.stream.write("\r\x1b[2K" + fitting)
            self.stream.write("\n" if final else "")
            self.open_line = not final
        elif final or time.monotonic() - self.last_shown >= QUIET_SECONDS:
            self.stream.write(text + "\n")
            self.last_shown = time.monotonic()
        self.stream.flush()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.stream.write(("\r\x1b[2K" if self.open_line else "") + text + "\n")
        self.open_line = False
        self.stream.flush()


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


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
