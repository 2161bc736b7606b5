"""Named places where a fault can be made to happen, for tests of what the rest promises. Off unless asked for.

    BRIDLE_FAILPOINTS="checkpoint.before_rename@2=kill;step.loss@3+=nan"  BRIDLE_FAILPOINTS_LOG=fired.txt

An entry is NAME[@N[+]]=ACTION: at the N-th time (the first without @N) that this process passes the place, with + every
time from then on. Each firing is a line of the log, written before the fault, so that a test can tell that it happened.
An entry without + that the log already holds does not fire again, in whatever process: the same command continues.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from bridle.files import locked

POINTS = {
    "kmeans.iteration": "in a codebook start, before each look at the signals",
    "step.begin": "before the first micro-batch of an optimizer step",
    "step.input": "a micro-batch is on its device; nan spoils it",
    "step.loss": "a micro-batch's loss is known; nan spoils it",
    "step.gradient": "gradients are there, before they are judged; nan makes one of them infinite",
    "step.after_backward": "gradients are judged, nothing is updated yet",
    "step.after_update": "weights and codebooks have moved, nothing is logged yet",
    "checkpoint.half_written": "the first tensor file of a checkpoint is there and the others are not",
    "checkpoint.before_manifest": "all files of a checkpoint but the manifest are there",
    "checkpoint.before_rename": "a checkpoint is complete, under its temporary name",
    "checkpoint.before_latest": "a checkpoint is published, `latest` names the one before",
    "checkpoint.before_rotate": "`latest` is moved, old checkpoints are still there",
    "checkpoint.inside_rotate": "one old checkpoint is removed, others are not",
    "phase.between": "a phase has ended, the next one has not begun",
    "evaluation.begin": "the evaluation after a phase begins",
    "evaluation.end": "an evaluation is done and not written yet",
    "metrics.append": "before a row of metrics.jsonl is written",
    "results.write": "before a JSON file of the run is written",
    "quarantine.append": "before a bad sample is listed",
    "export.before_ledger": "the rows of a file of tokenize or embed are written, the ledger does not know it yet",
    "export.file_done": "a file of tokenize or embed is in the ledger",
    "export.before_note": "a part of a folder of codes is written, the note that makes it count is not",
    "export.after_note": "a part counts, what it was made of is not removed yet",
    "export.before_index": "all parts count, the index is not written",
    "sample.load": "in whatever process loads a sample, watched by the watchdog",
}
ACTIONS = {
    "kill": getattr(signal, "SIGKILL", signal.SIGTERM),  # Windows has no SIGKILL
    "crash": signal.SIGSEGV,
    "sigterm": signal.SIGTERM,
    "sigint": signal.SIGINT,
}
ENTRY = re.compile(
    r"(?P<name>[a-z_.]+)(@(?P<count>[1-9]\d*)(?P<on>\+?))?=(?P<action>kill|crash|sigterm|sigint|exit|enospc|nan|hang|sleep:\d+(\.\d+)?)"
)
EXIT_CODE = 70  # of the action exit
HANG_SECONDS = 3600.0


class Entry(NamedTuple):
    """One fault that is asked for."""

    text: str  # as it was written
    name: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    on: bool  # and every time after
    action: str


class Armed:
    """The faults asked for, and how often each place was passed in this process."""

    def __init__(self, entries: list[Entry], log: str | None) -> None:
        self.entries, self.log = entries, log
        self.passed: dict[str, int] = {}

    def due(self, name: str) -> list[Entry]:
        wanted = [entry for entry in self.entries if entry.name == name]
        if not wanted:
            return []
        self.passed[name] = count = self.passed.get(name, 0) + 1
        return [entry for entry in wanted if entry.count == count or (entry.on and count > entry.count)]

    def claim(self, entry: Entry) -> bool:
        """Write a line into the log; False where an entry that fires once is already there."""
        if self.log is None:
            return True
        log = Path(self.log)
        # Other processes may pass the place at the same time.
        with locked(log.with_name(f".{log.name}.lock")), log.open("a+", encoding="utf-8") as file:
            file.seek(0)
            if not entry.on and entry.text in file.read().splitlines():
                return False
            file.write(entry.text + "\n")
            file.flush()
        return True


armed: Armed | None = None


def hit(name: str) -> bool:
    """Pass the place `name`; True where the caller is to spoil its value (the action nan)."""
    return armed is not None and _fire(name)


def arm(text: str, *, log: str | None = None) -> None:
    """Ask for faults, as BRIDLE_FAILPOINTS does; an empty text asks for none."""
    global armed  # noqa: PLW0603 - one switch for the whole process
    entries = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = ENTRY.fullmatch(part)
        if found is None or found["name"] not in POINTS:
            raise ValueError(f"BRIDLE_FAILPOINTS: {part!r} is not NAME[@N[+]]=ACTION with a name of {sorted(POINTS)}")
        entries.append(Entry(part, found["name"], int(found["count"] or 1), bool(found["on"]), found["action"]))
    armed = Armed(entries, log) if entries else None


def _fire(name: str) -> bool:
    assert armed is not None
    spoil = False
    for entry in armed.due(name):
        if armed.claim(entry):
            spoil = _act(entry.action, name) or spoil
    return spoil


def _act(action: str, name: str) -> bool:
    if action in ACTIONS:
        os.kill(os.getpid(), ACTIONS[action])
    elif action == "exit":
        os._exit(EXIT_CODE)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {name}")
    elif action != "nan":
        time.sleep(HANG_SECONDS if action == "hang" else float(action.removeprefix("sleep:")))
    return action == "nan"


arm(os.environ.get("BRIDLE_FAILPOINTS", ""), log=os.environ.get("BRIDLE_FAILPOINTS_LOG"))
