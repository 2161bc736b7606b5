"""Every fault at every place in every kind of phase: the cases that are whole runs of their own."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from soak.damage import damage_copy, everything, one_bit_of_every_byte, save_small, some
from soak.faults import (
    POINTS,
    SPOILT,
    check_five_skips,
    check_one_skip,
    command,
    copy_run,
    differences,
    pretrain_command,
    resume_faults,
    run,
    stop_faults,
)
from soak.tally import Case, Tally, case, judged

KILL, THRICE = "crash: kill at a failpoint", "crash: three kills in one run"
DAMAGE, SIGNAL = "crash: flipped bits and truncations", "crash: SIGTERM and Ctrl-C"
FULL = "disk: full at a failpoint"
ONE_SKIP, FIVE_SKIPS = "NaN: one step", "NaN: five in a row"
AREAS = (KILL, THRICE, DAMAGE, SIGNAL, FULL, ONE_SKIP, FIVE_SKIPS)
SIGNALS = {"sigterm": 143, "sigint": 130}
DAMAGED = 3000  # changes to each file of a checkpoint of a run, at scale 1
SMALL_FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
# Faults after which a step of the same phase is still to be done, so that the next one fires too.
UNFINISHED = (
    "step.begin",
    "step.after_backward",
    "checkpoint.half_written",
    "checkpoint.before_rename",
    "metrics.append",
)


class Grid:
    """The cases, and the runs that nothing happened to, which they are compared with."""

    def __init__(self, out: Path, *, scale: float) -> None:
        self.out, self.scale, self.wholes = out, scale, dict[str, Path]()

    def prepare(self) -> None:
        """A run of each kind that nothing happens to, and one that was stopped with two checkpoints."""
        for kind in ("encoder", "joint", "finetune"):
            self.wholes[kind] = folder = self.out / "whole" / kind
            if self.is_new(folder):
                if kind == "finetune":
                    shutil.copytree(self.wholes["encoder"], folder)
                ended = run(command(kind, folder), folder)
                self.require(ended.code == 0, folder, ended.said)
        self.wholes["tokenizer"] = self.wholes["encoder"]
        self.stopped = self.out / "whole" / "stopped"
        if self.is_new(self.stopped):
            words = pretrain_command("joint", self.stopped, "runtime.keep=2")
            ended = run(words, self.stopped, faults="step.begin@2=sigterm")
            self.require(ended.code == 143, self.stopped, ended.said)

    def is_new(self, folder: Path) -> bool:
        """Is it still to be made? Whatever is left of an attempt is removed."""
        if folder.with_name(f"{folder.name}.ready").exists():
            return False
        folder.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.ledger").unlink(missing_ok=True)
        return True

    def require(self, done: bool, folder: Path, said: str) -> None:
        if not done:
            raise SystemExit(f"the {folder.name} run without faults failed:\n{said}")
        folder.with_name(f"{folder.name}.ready").touch()

    def cases(self) -> Iterator[Case]:
        for workers in (0, 1, 2):
            for kind, points in POINTS.items():
                for point, count in points.items():
                    yield self.crash(KILL, kind, [f"{point}@{count}=kill"], workers)
        chance = random.Random(0)
        for number in range(12):
            kind = sorted(POINTS)[number % 4]
            struck = [f"{point}=kill" for point in chance.sample(UNFINISHED, 2)]
            first = f"step.begin@{POINTS[kind]['step.begin']}=kill"
            yield self.crash(THRICE, kind, [first, *struck], number // 4)
        for kind, points in POINTS.items():
            for point in ("kmeans.iteration", "step.begin", "step.after_update", "evaluation.begin"):
                for action in SIGNALS if point in points else ():
                    # Not in the last step of a phase: it must be seen that no other follows.
                    count = points[point] - point.startswith("step.")
                    yield self.stop(kind, point, count, action)
            for point in ("checkpoint.half_written", "checkpoint.before_latest", "metrics.append"):
                yield self.fill(kind, point, points[point])
            for point in SPOILT:
                yield self.spoilt(ONE_SKIP, kind, point, check_one_skip)
                yield self.spoilt(FIVE_SKIPS, kind, point, check_five_skips)
        yield from self.damages()

    def crash(self, area: str, kind: str, struck: list[str], workers: int) -> Case:
        name = f"{kind}, {workers} worker(s), {' then '.join(struck)}"

        def go() -> Tally:
            folder, more = self.fresh(kind, name), [f"data.workers={workers}"]
            for fault in struck:
                ended = run(command(kind, folder, *more), folder, faults=fault)
                if (ended.code, ended.fired) != (-9, [fault]):
                    return judged([f"{fault} ended with {ended.code}, fired {ended.fired}"], name=name)
            return judged(self.finish(kind, folder, struck[-1].partition("@")[0].partition("=")[0], more), name=name)

        return case(area, name, go)

    def stop(self, kind: str, point: str, count: int, action: str) -> Case:
        fault = f"{point}@{count}={action}"

        def go() -> Tally:
            folder = self.fresh(kind, fault)
            ended = run(command(kind, folder), folder, faults=fault)
            wrong = [] if (ended.code, ended.fired) == (SIGNALS[action], [fault]) else [f"ended with {ended.code}"]
            if not wrong and point.startswith("step."):
                wrong = stop_faults(kind, folder, steps=count)
            return judged(wrong or self.finish(kind, folder, point, []), name=f"{kind}, {fault}")

        return case(SIGNAL, f"{kind}, {fault}", go)

    def fill(self, kind: str, point: str, count: int) -> Case:
        fault = f"{point}@{count}=enospc"

        def go() -> Tally:
            folder = self.fresh(kind, fault)
            ended = run(command(kind, folder), folder, faults=fault)
            held = (ended.code, ended.fired) == (74, [fault]) and "No space left" in ended.said
            wrong = [] if held else [f"ended with {ended.code}, fired {ended.fired}"]
            return judged(wrong or self.finish(kind, folder, point, []), name=f"{kind}, {fault}")

        return case(FULL, f"{kind}, {fault}", go)

    def spoilt(self, area: str, kind: str, point: str, check: Callable[[str, Path, str], list[str]]) -> Case:
        name = f"{kind}, {point}"

        def go() -> Tally:
            folder = self.fresh(kind, f"{area} {name}")
            wrong = check(kind, folder, point)
            if not wrong:
                shutil.rmtree(folder)
            return judged(wrong, name=name)

        return case(area, name, go)

    def damages(self) -> Iterator[Case]:
        """All of a small checkpoint, and some of one that a run has saved."""
        for file in SMALL_FILES:
            yield case(DAMAGE, f"small, {file}", partial(self.damage_small, file), scaled=True)
        for file in (*SMALL_FILES, "ages.safetensors"):
            yield case(DAMAGE, f"of a run, {file}", partial(self.damage_saved, file), scaled=True)

    def damage_small(self, file: str) -> Tally:
        every = everything if self.scale >= 1 else one_bit_of_every_byte
        return damage_copy(save_small, self.out / "damage" / f"small-{file}", file, every)

    def damage_saved(self, file: str) -> Tally:
        saved, count = self.stopped / "checkpoints", max(1, round(DAMAGED * self.scale / 2))
        copied = partial(shutil.copytree, saved)
        return damage_copy(copied, self.out / "damage" / f"run-{file}", file, partial(some, count=count))

    def fresh(self, kind: str, name: str) -> Path:
        """A place for a run of this kind; a fine-tuning finds what it begins with."""
        folder = self.out / "runs" / "".join(c if c.isalnum() else "-" for c in f"{kind}-{name}")[:120]
        folder.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        for beside in folder.parent.glob(f"{folder.name}.*"):
            beside.unlink()
        if kind == "finetune":
            copy_run(self.wholes["encoder"], folder)
            folder.with_name(f"{folder.name}.ledger").unlink(missing_ok=True)
        return folder

    def finish(self, kind: str, folder: Path, point: str, more: list[str]) -> list[str]:
        """What is wrong with a run that goes on after a fault at `point`, compared with one without a fault."""
        ended = run(command(kind, folder, *more), folder)
        if ended.code:
            return [f"resumed run ended with {ended.code}"]
        wrong = resume_faults(kind, point, ended.said) + differences(kind, self.wholes[kind], folder)
        if not wrong:
            shutil.rmtree(folder)
        return wrong
