"""Probe curves: what is read, how seeds are averaged, and that there is a picture."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from stored_results import results

from bridle import api
from bridle.config import Config
from bridle.errors import Interrupted
from bridle.evaluate.probe_command import curve_run
from bridle.files import read_lines
from bridle.machine import cpu_seconds
from bridle.report.curves import Point, averaged, curve_of, write_curves
from bridle.runs.folder import RunFolder
from bridle.runs.results import read_results

RESULTS: dict[str, Any] = {
    "baselines": {"untrained": {"accuracy": 0.4}},
    "evaluations": [
        {"iteration": 1, "step": 10, "cpu_seconds": 60.0, "probe": {"accuracy": 0.5}},
        {"iteration": 1, "step": 20, "cpu_seconds": None, "probe": {"accuracy": 0.55}},
        {"iteration": 1, "step": 30, "cpu_seconds": 180.0, "probe": None},
        {"iteration": 2, "step": 10, "cpu_seconds": 300.0, "probe": {"accuracy": 0.6}},
    ],
}


def test_a_curve_begins_untrained_unless_training_did_not() -> None:
    points = [Point(1, 10, 1.0, 0.5), Point(1, 20, None, 0.55), Point(2, 10, 5.0, 0.6)]
    assert curve_of(results(RESULTS)) == [Point(1, 0, 0.0, 0.4), *points]
    start = {"iteration": 1, "step": 0, "cpu_seconds": 3.0, "probe": {"accuracy": 0.45}}  # brought along
    brought = results({**RESULTS, "evaluations": [start, *RESULTS["evaluations"]]})
    assert curve_of(brought) == [Point(1, 0, 0.05, 0.45), *points]


def test_seeds_are_averaged_where_all_of_them_have_a_point() -> None:
    first = [Point(1, 10, 1.0, 0.5), Point(1, 20, 2.0, 0.7)]
    second = [Point(1, 10, 3.0, 0.3)]
    assert averaged([first, second]) == [(2.0, pytest.approx(0.4), 0.3, 0.5)]
    assert averaged([first, [Point(1, 10, None, 0.3), Point(1, 20, 4.0, 0.9)]]) == [(3.0, pytest.approx(0.8), 0.7, 0.9)]


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
    kept = ["runtime.checkpoint_every=2", "runtime.keep=9", "runtime.keep_finished=true", "runtime.log_every=3"]
    config = small(*kept, "tokenizer_phase.steps=3", steps=5)
    api.pretrain(config, out=tmp_path / "run")
    found = read_results(curve_run(tmp_path / "run", []))
    points = curve_of(found)
    assert [(point.iteration, point.step) for point in points] == [(1, 0), *((r, s) for r in (1, 2) for s in (2, 4, 5))]
    minutes = [point.minutes for point in points]
    assert minutes == sorted(set(minutes)) and minutes[1] > 0  # each its own, though not all of them are logged
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert 60 * minutes[-1] == pytest.approx(rows[-1]["cpu_seconds"], abs=1.0)
    known = read_results(tmp_path / "run" / "results.json")
    assert found.baselines == known.baselines  # taken over
    assert found.evaluations[-1].probe.accuracy == known.evaluations[-1].probe.accuracy
    stamp = (tmp_path / "run" / "curve.json").stat().st_mtime_ns
    curve_run(tmp_path / "run", [])
    assert (tmp_path / "run" / "curve.json").stat().st_mtime_ns == stamp  # nothing was measured again


def test_a_continued_run_counts_on_and_one_of_an_older_version_does_not_pretend(
    small: Callable[..., Config], tmp_path: Path
) -> None:
    run, config = tmp_path / "run", small("schedule.iterations=1", "probe.enabled=false", steps=4)

    class Stop:
        def on_start(self, **_: Any) -> None: ...

        def on_metrics(self, row: Mapping[str, Any]) -> None:
            if row["step"] == 2 and row["resumed_from"] is None:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

        def on_end(self) -> None: ...

    with pytest.raises(Interrupted):
        api.pretrain(config, out=run, callbacks=[Stop()])
    before = RunFolder(run).cpu_seconds_at(phase_index=0, step=2)
    assert before is not None and before > 0
    older = tmp_path / "older"
    shutil.copytree(run, older)
    api.pretrain(config, out=run)
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["cpu_seconds"] > before
    (older / "costs.jsonl").unlink()
    lines = [{k: v for k, v in row.items() if k != "cpu_seconds"} for row in read_lines(older / "metrics.jsonl")]
    (older / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    api.pretrain(config, out=older)
    assert [row.get("cpu_seconds") for row in read_lines(older / "metrics.jsonl")] == [None] * 4
