"""Callbacks that receive the figures of a run, and the rows of JSON that hold these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bridle import failpoints
from bridle.files import append_line, writing

Row = Mapping[str, Any]


class Callback(Protocol):
    """What receives a run's figures: give any object with these methods to `bridle.pretrain(callbacks=[…])`."""

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None:
        """The run starts or continues."""

    def on_metrics(self, row: Row) -> None:
        """One row of metrics.jsonl."""

    def on_evaluation(self, result: Row) -> None:
        """The result of an evaluation after an encoder phase."""

    def on_end(self) -> None:
        """The run is finished or interrupted."""


@contextmanager
def running(callbacks: Sequence[Callback], folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Tell callbacks that a run starts, and at the end of the block, however it ends, that it is over."""
    for callback in callbacks:
        callback.on_start(folder=folder, config=config)
    try:
        yield
    finally:
        for callback in callbacks:
            callback.on_end()


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
