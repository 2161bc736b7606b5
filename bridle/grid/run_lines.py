"""One line for each of several commands side by side; everything they print goes to files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bridle.console import clock, plain_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_PARTS = 2  # of a progress line, which has many, before the time to go


class RunLines:
    """Shows the last line of every command: live on a terminal. Elsewhere a line says when one has ended.

    `logs` are the files that take the whole output, by the name of the command. Used as a context manager; `tell` and
    `spent` are what `run_beside` calls.
    """

    def __init__(self, console: Console, logs: Mapping[str, Path]) -> None:
        from rich.live import Live

        self.console, self.logs = console, logs
        self.last = dict.fromkeys(logs, "waiting")
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.live = Live(console=console, get_renderable=self.table, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        for log in self.logs.values():
            log.parent.mkdir(parents=True, exist_ok=True)
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def tell(self, name: str, line: str) -> None:
        """Take a line of output; a command's first line starts its clock."""
        self.began.setdefault(name, time.monotonic())
        with self.logs[name].open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        self.last[name] = shortened(line)

    def spent(self, name: str, seconds: float) -> None:
        """Note that a command has ended; a line that names its log stays on the screen."""
        self.ended[name] = self.seconds(name)
        self.last[name] = f"ended · log {self.logs[name]}"
        self.console.print(self.table(name))

    def seconds(self, name: str) -> float:
        """How long a command runs or ran."""
        now = time.monotonic()
        return self.ended.get(name, now - self.began.get(name, now))

    def table(self, *names: str) -> Table:
        """A row for each of `names`, or for every command that runs."""
        table = plain_table(show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name in names or [name for name in self.last if name not in self.ended]:
            table.add_row(name, clock(self.seconds(name)), self.last[name].replace("[", r"\["))
        return table


def shortened(line: str) -> str:
    """A progress line without its middle parts; any other line as it is."""
    parts = line.split(" · ")
    return line if len(parts) <= SHOWN_PARTS + 1 else " · ".join([*parts[:SHOWN_PARTS], parts[-1]])
