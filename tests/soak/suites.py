"""Files of ordinary tests as rows of the table, each in a process of its own; the counts are read from JUnit XML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from soak.tally import Tally

ROOT = Path(__file__).parents[2]
LIMIT = 1800.0  # seconds for one of them


def run_suite(files: Sequence[str], *, out: Path, area_of: Callable[[str], str]) -> dict[str, Tally]:
    """Run test files of the project; `area_of(name of a test)` says where it counts."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={out}", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_RANKS": "4,8"}
    with out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        finally:
            if process.poll() is None:  # it hangs, or this process is being stopped
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode not in (0, 1) or not out.exists():  # 1: some of them failed, which the results tell
        raise RuntimeError(f"{' '.join(files)} ended with {process.returncode}; see {log.name}")
    return read_junit(out, area_of)


def read_junit(file: Path, area_of: Callable[[str], str]) -> dict[str, Tally]:
    """Tests that ran by area; one that was skipped was not tried, and is named."""
    found: dict[str, Tally] = {}
    for test in ElementTree.parse(file).getroot().iter("testcase"):
        area, name = area_of(test.get("name", "")), f"{test.get('classname')}.{test.get('name')}"
        skipped = test.find("skipped") is not None
        bad = [child.get("message", "") for child in test if child.tag in ("failure", "error")]
        before = found.get(area, Tally(0, 0, [], 0.0))
        found[area] = Tally(
            tried=before.tried + (not skipped),
            held=before.held + (not skipped and not bad),
            wrong=before.wrong + [f"{name}: {text[:200]!r}" for text in bad[:1]],
            seconds=(before.seconds or 0.0) + float(test.get("time", 0)),
            untried=(*before.untried, name) if skipped else before.untried,
        )
    return found
