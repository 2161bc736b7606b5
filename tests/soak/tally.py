"""What was tried and what held: one line per case in a file, progress on the screen, and the table in the end."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Tally(NamedTuple):
    """How many of how many held, and what did not."""

    tried: int
    held: int
    wrong: list[str]
    seconds: float | None = None  # where they are known better than by the clock around the case
    untried: tuple[str, ...] = ()  # what could not be tried here


def judged(wrong: Iterable[str], *, name: str = "") -> Tally:
    """One thing that was tried."""
    found = list(wrong)
    return Tally(1, int(not found), [": ".join(filter(None, (name, ", ".join(found[:3]))))] if found else [])


def together(tallies: Iterable[Tally]) -> Tally:
    """Several as one."""
    found = list(tallies)
    return Tally(sum(t.tried for t in found), sum(t.held for t in found), [text for t in found for text in t.wrong])


class Case(NamedTuple):
    """One command's worth of work; `go` tells for each area of the table what it found there."""

    name: str
    areas: tuple[str, ...]
    go: Callable[[], Mapping[str, Tally]]
    scaled: bool = False  # it is shorter by itself at a smaller scale, so that it is never left out


def case(area: str, name: str, go: Callable[[], Tally], *, scaled: bool = False) -> Case:
    """A case of one area."""
    return Case(f"{area}: {name}", (area,), lambda: {area: go()}, scaled)


class Ledger:
    """Results of all cases, also of earlier commands with the same scale; a line is written as soon as one is known."""

    def __init__(self, out: Path, *, scale: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file, self.scale, self.lock = out / "done.jsonl", scale, threading.Lock()
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows: list[dict[str, Any]] = [row for row in map(json.loads, lines) if row["scale"] == scale]
        self.began, self.session = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def finished(self) -> set[str]:
        return {row["case"] for row in self.rows}

    @property
    def wrong(self) -> list[str]:
        return [text for row in self.rows for text in row["wrong"]]

    def try_one(self, case: Case, *, names: Collection[str]) -> None:
        """Do it, as one of the cases of these names, and write down what came of it; the others go on in any case."""
        began = time.monotonic()
        try:
            found = dict(case.go())
        except Exception as error:
            found = {case.areas[0]: Tally(1, 0, [f"{case.name}: {type(error).__name__}: {error}"])}
        seconds = time.monotonic() - began
        with self.lock:
            elapsed = time.monotonic() - self.began
            for area, tally in found.items():
                self.rows.append(
                    {
                        **{"case": case.name, "area": area, "tried": tally.tried, "held": tally.held},
                        **{"wrong": tally.wrong, "untried": tally.untried},
                        **{"scale": self.scale, "session": self.session},
                        **{"seconds": round(seconds if tally.seconds is None else tally.seconds, 1)},
                        **{"elapsed": round(elapsed, 1), "load": round(os.getloadavg()[0], 1)},
                    }
                )
            with self.file.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows[-len(found) :])
            count = f"{len(self.finished.intersection(names)):4} of {len(names)}, {clock(elapsed)}"
            self.tell(count, case.name, together(found.values()), seconds)

    def tell(self, count: str, name: str, found: Tally, seconds: float) -> None:
        failed = f"failed so far: {len(self.wrong)}" if self.wrong else "all held so far"
        print(f"{count}, {failed}   {found.held}/{found.tried} in {seconds:.1f} s   {name}", flush=True)
        for text in found.wrong:
            print(f"     failed: {text}", flush=True)

    def table(self, areas: Iterable[str]) -> str:
        """A row for every area, in their order."""
        lines = ["| area | tried | held | seconds |", "|---|---:|---:|---:|"]
        for area in areas:
            rows = [row for row in self.rows if row["area"] == area]
            tried, held, seconds = (sum(row[key] for row in rows) for key in ("tried", "held", "seconds"))
            lines.append(f"| {area} | {tried:,} | {held:,} | {seconds:,.0f} |")
        tried, held, seconds = (sum(row[key] for row in self.rows) for key in ("tried", "held", "seconds"))
        lines.append(f"| all | {tried:,} | {held:,} | {seconds:,.0f} |")
        notes = [f"- failed: {text}" for text in self.wrong]
        notes += [f"- not tried: {text}" for row in self.rows for text in row["untried"]]
        return "\n".join([*lines, "", self.circumstances(), *notes]) + "\n"

    def circumstances(self) -> str:
        """When and where, and how long it took on the clock; sessions that were interrupted add up."""
        ends = {row["session"]: row["elapsed"] for row in self.rows}
        load = sum(row["load"] for row in self.rows) / max(1, len(self.rows))
        return (
            f"{self.session[:10]}, scale {self.scale:g}, {clock(sum(ends.values()))} on the clock; "
            f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}, {platform.system()}), mean load {load:.1f}, "
            f"Python {platform.python_version()}, torch {torch.__version__}."
        )


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
