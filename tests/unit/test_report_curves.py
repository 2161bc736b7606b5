"""Probe curves: what is read, how seeds are averaged, and that there is a picture."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bridle import api
from bridle.config import Config
from bridle.evaluate.command import curve_run
from bridle.report.curves import Point, averaged, curve_of, write_curves
from bridle.train.log import read_rows
from bridle.train.run import Results
from bridle.train.runtime import cpu_seconds

RESULTS = {
    "baselines": {"untrained": {"accuracy": 0.4}},
    "evaluations": [
        {"iteration": 1, "step": 10, "cpu_seconds": 60.0, "probe": {"accuracy": 0.5}},
        {"iteration": 1, "step": 20, "cpu_seconds": None, "probe": {"accuracy": 0.55}},
        {"iteration": 1, "step": 30, "cpu_seconds": 180.0, "probe": None},
        {"iteration": 2, "step": 10, "cpu_seconds": 300.0, "probe": {"accuracy": 0.6}},
    ],
}


def test_a_curve_begins_untrained_and_has_no_holes() -> None:
    assert curve_of(RESULTS) == [Point(1, 0, 0.0, 0.4), Point(1, 10, 1.0, 0.5), Point(2, 10, 5.0, 0.6)]


def test_seeds_are_averaged_where_all_of_them_have_a_point() -> None:
    first = [Point(1, 10, 1.0, 0.5), Point(1, 20, 2.0, 0.7)]
    second = [Point(1, 10, 3.0, 0.3)]
    assert averaged([first, second]) == [(2.0, pytest.approx(0.4), 0.3, 0.5)]


def test_curves_become_pictures_and_single_points_do_not(tmp_path: Path) -> None:
    line = [Point(1, 0, 0.0, 0.4), Point(1, 10, 1.0, 0.5)]
    written = write_curves({"RQ": [line, line], "VQ": [line[:1]]}, tmp_path / "figures" / "curve")
    assert [path.name for path in written] == ["curve.svg", "curve.png"]
    text = written[0].read_text()
    assert "RQ" in text and "VQ" not in text and "CPU minutes" in text
    assert write_curves({"VQ": [line[:1]]}, tmp_path / "none") == []


def test_cpu_time_counts_children_at_work_and_ended_once() -> None:
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("no /proc with children here")
    before = cpu_seconds()
    spin = "import time\nwhile time.process_time() < 0.6: pass\nprint('spun', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "spun\n"
    at_work = cpu_seconds() - before
    child.communicate("\n")
    ended = cpu_seconds() - before
    assert 0.5 < at_work <= ended + 0.05 < at_work + 0.5
    time.sleep(0.05)
    assert cpu_seconds() - before == pytest.approx(ended, abs=0.05)


def test_every_kept_checkpoint_is_probed_once(small: Callable[..., Config], tmp_path: Path) -> None:
    kept = ["runtime.checkpoint_every=2", "runtime.keep=9", "runtime.keep_finished=true"]
    config = small(*kept, "tokenizer_phase.steps=3", steps=5)
    api.pretrain(config, out=tmp_path / "run")
    found = Results(curve_run(tmp_path / "run", []), {}).value
    points = curve_of(found)
    assert [(point.iteration, point.step) for point in points] == [(1, 0), *((r, s) for r in (1, 2) for s in (2, 4, 5))]
    minutes = [point.minutes for point in points]
    assert minutes == sorted(minutes) and minutes[-1] > minutes[1] > 0
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert 60 * minutes[-1] == pytest.approx(rows[-1]["cpu_seconds"])
    known = Results(tmp_path / "run" / "results.json", {}).value
    assert found["baselines"] == known["baselines"]  # taken over
    assert found["evaluations"][-1]["probe"]["accuracy"] == known["evaluations"][-1]["probe"]["accuracy"]
    stamp = (tmp_path / "run" / "curve.json").stat().st_mtime_ns
    curve_run(tmp_path / "run", [])
    assert (tmp_path / "run" / "curve.json").stat().st_mtime_ns == stamp  # nothing was measured again
