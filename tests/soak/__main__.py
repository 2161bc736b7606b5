"""`make soak`: every fault in every kind of phase, long fuzzing, disks that fill, memory; a table in the end.

    python tests/soak [--out soak] [--jobs 2]        SOAK_SCALE=0.1 tries a tenth of it

What is done is written to OUT/done.jsonl at once; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from soak.disk import fill_disk  # noqa: E402 - after the path is set
from soak.faults import POINTS, command, copy_run, differences, run  # noqa: E402
from soak.fuzz import KINDS, fuzz_apart  # noqa: E402
from soak.leak import measure_growth  # noqa: E402

SCALE = float(os.environ.get("SOAK_SCALE", "1"))
SIGNALS = {"sigterm": 143, "sigint": 130}
# Faults after which a step of the same phase is still to be done, so that the next one fires too.
UNFINISHED = (
    "step.begin",
    "step.after_backward",
    "checkpoint.half_written",
    "checkpoint.before_rename",
    "metrics.append",
)


class Case(NamedTuple):
    """One thing to try; `go` returns how many of how many held, and what did not."""

    area: str
    name: str
    go: Callable[[], tuple[int, int, list[str]]]


class Soak:
    """The cases, and where their results go."""

    def __init__(self, out: Path) -> None:
        self.out, self.wholes = out, dict[str, Path]()
        out.mkdir(parents=True, exist_ok=True)
        self.done_file, self.lock = out / "done.jsonl", threading.Lock()
        lines = self.done_file.read_text().splitlines() if self.done_file.exists() else []
        self.done: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def prepare(self) -> None:
        """A run of each kind that nothing happens to."""
        for kind in ("encoder", "joint", "finetune"):
            self.wholes[kind] = folder = self.out / "whole" / kind
            if (self.out / "whole" / f"{kind}.ready").exists():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(exist_ok=True)
            if kind == "finetune":
                shutil.copytree(self.wholes["encoder"], folder)
            ended = run(command(kind, folder), folder)
            if ended.code != 0:
                raise SystemExit(f"the {kind} run without faults failed:\n{ended.said}")
            (self.out / "whole" / f"{kind}.ready").touch()
        self.wholes["tokenizer"] = self.wholes["encoder"]

    def cases(self) -> Iterator[Case]:
        yield from self.crashes()
        yield from self.other_faults()
        for share in (0.01, 0.25, 0.5, 0.99):
            yield Case("disk: file-size limit", f"{share:.0%} of a checkpoint", partial(fill_disk, share))
        each = max(1, round(1000 * SCALE))
        for part in range(10):
            yield self.fuzzed("config" if part % 2 else "override", each, part * each)
        for kind in KINDS:
            yield self.fuzzed(kind, max(1, round(2000 * SCALE)), 0)
        yield Case("leak", f"{leak_steps()} steps", self.leak)

    def crashes(self) -> Iterator[Case]:
        for workers in (0, 1, 2):
            for kind, points in POINTS.items():
                for point, count in points.items():
                    yield self.crash(kind, [f"{point}@{count}=kill"], workers)
        chance = random.Random(0)
        for number in range(12):
            kind = sorted(POINTS)[number % 4]
            struck = [f"{point}=kill" for point in chance.sample(UNFINISHED, 2)]
            first = f"step.begin@{POINTS[kind]['step.begin']}=kill"
            yield self.crash(kind, [first, *struck], number // 4, area="three kills in one run")

    def other_faults(self) -> Iterator[Case]:
        for kind, points in POINTS.items():
            for point in ("kmeans.iteration", "step.begin", "step.after_update", "evaluation.begin"):
                for action, code in SIGNALS.items() if point in points else ():
                    yield self.stop(kind, f"{point}@{points[point]}={action}", code)
            for point in ("checkpoint.half_written", "checkpoint.before_latest", "metrics.append"):
                yield self.full(kind, f"{point}@{points[point]}=enospc")

    def crash(self, kind: str, struck: list[str], workers: int, *, area: str = "kill at a failpoint") -> Case:
        name = f"{kind}, {workers} worker(s): {' then '.join(struck)}"

        def go() -> tuple[int, int, list[str]]:
            folder = self.fresh(kind, name)
            more = [f"data.workers={workers}"]
            for fault in struck:
                ended = run(command(kind, folder, *more), folder, faults=fault)
                if (ended.code, ended.fired) != (-9, [fault]):
                    return 0, 1, [f"{name}: {fault} ended with {ended.code}, fired {ended.fired}"]
            return self.finish(kind, folder, name, more)

        return Case(area, name, go)

    def stop(self, kind: str, fault: str, code: int) -> Case:
        def go() -> tuple[int, int, list[str]]:
            folder = self.fresh(kind, fault)
            ended = run(command(kind, folder), folder, faults=fault)
            if (ended.code, ended.fired) != (code, [fault]):
                return 0, 1, [f"{kind} {fault}: ended with {ended.code}, fired {ended.fired}"]
            return self.finish(kind, folder, fault, [])

        return Case("SIGTERM and Ctrl-C", f"{kind}: {fault}", go)

    def full(self, kind: str, fault: str) -> Case:
        def go() -> tuple[int, int, list[str]]:
            folder = self.fresh(kind, fault)
            ended = run(command(kind, folder), folder, faults=fault)
            if (ended.code, ended.fired) != (74, [fault]) or "No space left" not in ended.said:
                return 0, 1, [f"{kind} {fault}: ended with {ended.code}, fired {ended.fired}"]
            return self.finish(kind, folder, fault, [])

        return Case("disk full at a failpoint", f"{kind}: {fault}", go)

    def fuzzed(self, kind: str, count: int, first: int) -> Case:
        def go() -> tuple[int, int, list[str]]:
            found = fuzz_apart(kind, count, first=first, told=self.out / f"fuzz-{kind}-{first}.json")
            wrong = {what: number for what, number in found.count.items() if what not in ("used", "refused")}
            return found.held, found.tried, [f"{kind}: {what} ({number})" for what, number in wrong.items()]

        area = "fuzz: configs" if kind in ("config", "override") else f"fuzz: {kind}"
        return Case(area, f"{kind} {first}–{first + count}", go)

    def leak(self) -> tuple[int, int, list[str]]:
        steps = leak_steps()
        shutil.rmtree(self.out / "leak", ignore_errors=True)
        found = measure_growth(self.out / "leak", steps=steps, limit=1800)
        allowed = 1024 if steps >= 3000 else 20_000  # pages come in clusters: few steps cannot show so little
        note = f"{found.per_step:.0f} bytes a step over {found.steps} steps"
        return int(found.per_step <= allowed), 1, [] if found.per_step <= allowed else [note]

    def fresh(self, kind: str, name: str) -> Path:
        folder = self.out / "runs" / "".join(c if c.isalnum() else "-" for c in f"{kind}-{name}")[:120]
        folder.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        for beside in folder.parent.glob(f"{folder.name}.*"):
            beside.unlink()
        if kind == "finetune":
            copy_run(self.wholes["encoder"], folder)
            folder.with_name(f"{folder.name}.ledger").unlink(missing_ok=True)
        return folder

    def finish(self, kind: str, folder: Path, name: str, more: list[str]) -> tuple[int, int, list[str]]:
        ended = run(command(kind, folder, *more), folder)
        wrong = [f"resumed run ended with {ended.code}"] if ended.code else differences(kind, self.wholes[kind], folder)
        if not wrong:
            shutil.rmtree(folder)
        return int(not wrong), 1, [f"{kind} {name}: {', '.join(wrong[:3])}"] if wrong else []

    def try_one(self, case: Case) -> None:
        began = time.monotonic()
        try:
            held, tried, wrong = case.go()
        except Exception as error:  # the soak itself must go on
            held, tried, wrong = 0, 1, [f"{case.name}: {type(error).__name__}: {error}"]
        row = {"area": case.area, "name": case.name, "tried": tried, "held": held, "wrong": wrong, "scale": SCALE}
        row["seconds"] = round(time.monotonic() - began, 1)
        with self.lock:
            self.done.append(row)
            with self.done_file.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{len(self.done):4} {held}/{tried} {row['seconds']:6.1f} s  {case.name}", *wrong, flush=True)

    def table(self) -> str:
        lines = ["| area | tried | held | seconds |", "|---|---:|---:|---:|"]
        for area in dict.fromkeys(row["area"] for row in self.done):
            rows = [row for row in self.done if row["area"] == area]
            tried, held, seconds = (sum(row[key] for row in rows) for key in ("tried", "held", "seconds"))
            lines.append(f"| {area} | {tried:,} | {held:,} | {seconds:,.0f} |")
        wrong = [text for row in self.done for text in row["wrong"]]
        return "\n".join([*lines, "", f"Scale {SCALE:g}.", *(f"- {text}" for text in wrong)]) + "\n"


def leak_steps() -> int:
    return max(150, round(3000 * SCALE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--jobs", type=int, default=2)
    wanted = parser.parse_args()
    soak = Soak(wanted.out.absolute())
    soak.prepare()
    finished = {row["name"] for row in soak.done}
    cases = [case for case in soak.cases() if case.name not in finished]
    if SCALE < 1:  # of the grid every n-th case; of the long ones all, which are shorter by themselves
        grid = [case for case in cases if not case.area.startswith(("fuzz", "leak", "disk: "))]
        chosen = {case.name for case in grid[:: max(1, round(1 / SCALE))]}
        cases = [case for case in cases if case not in grid or case.name in chosen]
    with ThreadPoolExecutor(wanted.jobs) as pool:
        list(pool.map(soak.try_one, cases))
    (soak.out / "table.md").write_text(soak.table())
    print(soak.table())
    sys.exit(any(row["held"] < row["tried"] for row in soak.done))


if __name__ == "__main__":
    main()
