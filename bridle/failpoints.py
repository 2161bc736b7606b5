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
from collections import Counter
from pathlib import Path

from bridle.files import locked

POINTS = {
    "kmeans.iteration": "in a codebook start, before each look at the signals",
    "step.begin": "before the first micro-batch of an optimizer step",
    "step.input": "a micro-batch is on its device; nan spoils it",
    "step.loss": "a micro-batch's loss is known; nan spoils it",
    "step.gradient": "gradients are computed but not checked; nan makes one of them infinite",
    "step.after_backward": "gradients are checked, nothing is updated yet",
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


class Armed:
    """The faults asked for, how often each place was passed in this process, and the log of faults that fired."""

    def __init__(self, text: str, log: str | None) -> None:
        self.log, self.passed, self.entries = log, Counter[str](), list[re.Match[str]]()
        for part in filter(None, map(str.strip, text.split(";"))):
            found = ENTRY.fullmatch(part)
            if found is None or found["name"] not in POINTS:
                names = sorted(POINTS)
                raise ValueError(f"BRIDLE_FAILPOINTS: {part!r} is not NAME[@N[+]]=ACTION with a name of {names}")
            self.entries.append(found)

    def hit(self, name: str) -> bool:
        """Count a passage and do what is due; True where the caller is to spoil its value."""
        self.passed[name] += 1
        spoil = False
        for entry in self.entries:
            late = self.passed[name] - int(entry["count"] or 1)
            if entry["name"] == name and (late == 0 or (entry["on"] and late > 0)) and self.claim(entry):
                spoil = act(entry["action"], name) or spoil
        return spoil

    def claim(self, entry: re.Match[str]) -> bool:
        """Write a line into the log; False where an entry that fires once is already there."""
        if self.log is None:
            return True
        log = Path(self.log)
        # Other processes may pass the place at the same time.
        with locked(log.with_name(f".{log.name}.lock")), log.open("a+", encoding="utf-8") as file:
            file.seek(0)
            if not entry["on"] and entry[0] in file.read().splitlines():
                return False
            file.write(entry[0] + "\n")
            file.flush()
        return True


armed: Armed | None = None


def hit(name: str) -> bool:
    """Pass the place `name`; True where the caller is to spoil its value (the action nan)."""
    return armed is not None and armed.hit(name)


def arm(text: str, *, log: str | None = None) -> None:
    """Ask for faults, as BRIDLE_FAILPOINTS does; an empty text asks for none."""
    global armed  # noqa: PLW0603 - one switch for the whole process
    armed = Armed(text, log) if text.strip() else None


def act(action: str, name: str) -> bool:
    """Do an action at a place; True for nan, which is the caller's to do."""
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
