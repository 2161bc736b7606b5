"""Commands that were started by another one do not outlive it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bridle.grid import subprocesses
from bridle.grid.subprocesses import Started, run_beside

# Becomes `command` where the real one becomes `python`.
CHILD = "import sys; sys.executable = './command'; from bridle.grid.subprocesses import main; main()"
PARENT = f"""
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid()), "one", "two"])
time.sleep(60)
"""
# Stands in for the command: says that it runs, and when it is told to leave.
COMMAND = """
import os, signal, sys, time
def leave(number, frame):
    open("left", "w").write(" ".join(sys.argv[1:]))
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open("pid.tmp", "w").write(str(os.getpid()))
os.rename("pid.tmp", "pid")
time.sleep(60)
"""


def wait_for(path: Path, seconds: float = 30.0) -> str:
    until = time.monotonic() + seconds
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until, f"{path.name} did not appear"
        time.sleep(0.02)
    return path.read_text()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a program that stands in for bridle."""
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "command").write_text(f'#!/bin/sh\nexec {sys.executable} command.py "$@"\n')
    (tmp_path / "command").chmod(0o755)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_a_parent_that_is_killed_takes_its_children_along(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=place) as parent:
        try:
            child = int(wait_for(place / "pid"))
        finally:
            parent.send_signal(signal.SIGKILL)
    assert wait_for(place / "left") == "-m bridle one two"  # asked to leave, in time to save
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_a_child_whose_parent_died_before_it_was_watched_does_not_begin(place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], cwd=place, check=False, timeout=30)
    assert done.returncode == 143
    assert not (place / "pid").exists()


def test_a_command_waits_for_the_one_it_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def start(name: str, arguments: Sequence[str], *_: object) -> Started:
        assert name != "second" or "first" in ended
        process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({arguments[0]})"], text=True)
        return Started(process, threading.Thread(), [])

    monkeypatch.setattr(subprocesses, "start", start)
    monkeypatch.setattr(subprocesses, "finish", lambda name, _: ended.append(name))
    commands = {"second": ["0"], "first": ["0.5"], "other": ["0"]}
    run_beside(commands, jobs=2, console=Console(), after={"second": "first"})
    assert ended == ["other", "first", "second"]
