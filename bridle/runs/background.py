"""Checkpoints written by a thread while training goes on: at most one at a time, and a failure ends the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from torch import Tensor


class BackgroundWriter:
    """Runs one write after the other in a thread.

    As a context manager it waits for the last write, so that a run never ends or releases its lock with one under way.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Call `write` in the thread, after the write before it has ended; raises what that one raised."""
        self.wait()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised where the run looks next
                self.error = error

        self.thread = threading.Thread(target=run, name="checkpoint")
        self.thread.start()

    def check(self) -> None:
        """Raise what a write has raised, without waiting for the one under way."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self) -> None:
        """Wait for the write under way, and raise what it raised."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except BaseException as other:  # the run fails for a reason of its own
            error.add_note(f"a checkpoint could not be written either: {other}")


def snapshot(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copies on the CPU that later steps do not change."""
    return {
        stem: {key: value.detach().to("cpu", copy=True).contiguous() for key, value in group.items()}
        for stem, group in tensors.items()
    }
