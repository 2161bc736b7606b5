"""What people see in a terminal or a log file: the progress line, durations, plain tables. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from bridle.errors import Interrupted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PROGRESS_SECONDS = "BRIDLE_PROGRESS_SECONDS"  # in the environment: seconds between lines when the output is a file
QUIET_SECONDS = 10.0  # the same where the environment says nothing
REFRESH_SECONDS = 0.1  # between two states of a live line
ERASE_LINE = "\r\x1b[2K"
QUIET = "BRIDLE_QUIET"  # in the environment: no progress and no notes


def is_first_process() -> bool:
    """Does this process print for all? Of several that torchrun started, rank 0 does."""
    return int(os.environ.get("WORLD_SIZE", "1")) < 2 or os.environ.get("RANK", "0") == "0"


class Silent(io.StringIO):
    """A stream that discards what is written."""

    def write(self, text: str) -> int:
        return len(text)


class ProgressLine:
    """One line that rewrites itself on a terminal, and an occasional line of its own in a log file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        shown = is_first_process() and QUIET not in os.environ
        self.stream = stream or (sys.stderr if shown else Silent())
        self.live = self.stream.isatty()
        self.pause = float(os.environ.get(PROGRESS_SECONDS, QUIET_SECONDS))
        self.last_shown = 0.0
        self.open_line = False

    def show(self, text: str, short: str, *, final: bool = False) -> None:
        """Show the current state, as `short` where `text` is wider than the terminal; `final` ends the line."""
        if self.live:
            width = shutil.get_terminal_size().columns  # a line that wraps cannot be rewritten
            fitting = text if final or len(text) < width else short[: width - 1]
            self.stream.write(ERASE_LINE + fitting + ("\n" if final else ""))
            self.open_line = not final
        elif final or time.monotonic() - self.last_shown >= self.pause:
            self.stream.write(text + "\n")
            self.last_shown = time.monotonic()
        self.stream.flush()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.stream.write((ERASE_LINE if self.open_line else "") + text + "\n")
        self.open_line = False
        self.stream.flush()

    def close(self) -> None:
        """End a line that was left open."""
        if self.open_line:
            self.stream.write("\n")
            self.open_line = False


class JsonOutput:
    """Where results go with --json: one object per line on what was standard output; other text is discarded."""

    def __init__(self) -> None:
        self.stream: TextIO | None = None  # None without --json

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Discard what is printed inside the block, except results."""
        self.stream = sys.stdout
        try:
            with contextlib.redirect_stdout(Silent()):
                yield
        finally:
            self.stream = None

    def result(self, command: str, value: Any = None, **fields: Any) -> None:
        """Print a result: `fields`, and those of `value`, a record or a mapping. Does nothing without --json."""
        if self.stream is not None and is_first_process():
            found = {"command": command, **_plain(fields), **(_plain(value) or {})}
            self.stream.write(json.dumps(found, ensure_ascii=False) + "\n")
            self.stream.flush()


json_output = JsonOutput()


def _plain(value: Any) -> Any:
    """Records as mappings, sequences as lists, numbers that are not finite as None, anything else as text."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


@contextlib.contextmanager
def counting(verb: str, things: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function tell(done, total) that shows count, rate and time to go; Ctrl-C says how far it came."""
    line, first, shown, state = ProgressLine(), 0.0, 0.0, f"{verb} nothing"

    def tell(done: int, total: int) -> None:
        nonlocal first, shown, state
        now = time.monotonic()
        if done == 1:
            first = now  # the time that starting workers took says nothing about the rate
        elif done < total and now - shown < REFRESH_SECONDS:
            return
        rate = (done - 1) / max(now - first, 1e-3)
        shown, state = now, f"{verb} {done:,}/{total:,} {things}"
        if done == total:
            line.show(f"{state} in {clock(now - first)}", state, final=True)
        elif rate > 0:
            line.show(f"{state} · {rate:,.0f}/s · ETA {clock((total - done) / rate)}", state)

    try:
        yield tell
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by Ctrl-C: {state}", exit_code=130) from None
    finally:
        line.close()


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def eta(done: float, total: float, seconds: float) -> str:
    """Time to go, if the rest of `total` takes as long as `done` took."""
    return f"ETA {clock((total - done) * seconds / done)}"


def plain_table(*headings: str, **options: Any) -> Table:
    """A table without lines; `options` are rich's."""
    from rich.table import Table

    return Table(*headings, box=None, header_style="bold", pad_edge=False, **options)


def screen() -> Console:
    """Standard output for tables and coloured text; lines are not cut when it is a file."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())
