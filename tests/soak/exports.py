"""`bridle tokenize` killed at every place that it passes, and continued: the same files as without."""

from __future__ import annotations

import shutil
from pathlib import Path

from soak.faults import run
from soak.stored import pictures
from soak.tally import Tally, judged

KILLED = "crash: kill while codes are written"
# How often a place is passed before the fault. A result without an ending is a folder of parts.
POINTS: dict[str, dict[str, int]] = {
    "codes": {
        **{"export.before_ledger": 3, "export.file_done": 3, "export.before_note": 1},
        **{"export.after_note": 1, "export.before_index": 1},
    },
    "codes.npz": {
        **{"export.before_ledger": 3, "export.file_done": 3, "export.before_note": 1},
        **{"export.after_note": 1},
    },
}


def kill_tokenize(out: str, point: str, scratch: Path) -> Tally:
    """Killed at `point`, then the same command again, compared with a result that nothing happened to."""
    shutil.rmtree(scratch, ignore_errors=True)
    for place in ("in", "whole", "killed"):
        (scratch / place).mkdir(parents=True)
    for name, content in pictures().items():
        (scratch / "in" / name).write_bytes(content)

    def words(place: str) -> list[str]:
        return ["tokenize", "digits-tiny", str(scratch / "in"), "--out", str(scratch / place / out)]

    fault = f"{point}@{POINTS[out][point]}=kill"
    ended = [run(words("whole"), scratch / "run"), run(words("killed"), scratch / "run", faults=fault)]
    wrong = [] if ended[1].fired == [fault] else [f"fired {ended[1].fired}"]
    ended.append(run(words("killed"), scratch / "run"))
    if [one.code for one in ended] != [0, -9, 0]:
        wrong.append(f"ended with {[one.code for one in ended]}: {ended[-1].said[-200:]}")
    elif contents(scratch / "whole") != contents(scratch / "killed"):
        wrong.append("the files differ")
    shutil.rmtree(scratch)
    return judged(wrong, name=f"{out}, {fault}")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
