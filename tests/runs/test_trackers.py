"""`log=` with the real trackers, offline: one curve over a stop and a resume, and media."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bridle import api
from bridle.config import load_config
from bridle.errors import Interrupted, UsageError
from bridle.runs.folder import RunFolder
from bridle.runs.trackers import Tracker, Value, open_trackers, read_ids

SMALL = [
    *("max_steps=3", "schedule.iterations=2", "data.workers=0", "runtime.log_every=1", "runtime.checkpoint_every=1"),
    *("encoder_phase.batch=8", "tokenizer_phase.batch=8", "probe.items=40"),
]
STEPS = list(range(1, 10))  # encoder, tokenizer, encoder: three steps each
MAP = "token_maps/1"


class StopAt:
    """Asks the run to stop at a step of the first phase, in the middle of the steps that are logged."""

    def on_start(self, *, folder: Path, config: Mapping[str, Any]) -> None: ...

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        if row["step"] == 2:
            raise Interrupted("stopped", exit_code=130)

    def on_evaluation(self, result: Mapping[str, Any]) -> None: ...

    def on_end(self) -> None: ...


def train_in_parts(out: Path, log: str) -> str:
    """Train with a tracker, stopped after step 2 is logged but not saved; returns the run's id in the tracker."""
    config = load_config("digits-tiny", [*SMALL, f"log={log}"])
    with pytest.raises(Interrupted):
        api.pretrain(config, out=out, callbacks=[StopAt()])
    first = read_ids(out)[log]
    api.pretrain(config, out=out)
    assert read_ids(out)[log] == first
    assert [row["step"] for row in RunFolder(out).metrics()] == [1, 2, 3] * 3
    return first


def by_phase(steps: Mapping[str, list[int]]) -> list[int]:
    names = ("iter1-encoder/loss", "iter2-tokenizer/loss", "iter2-encoder/loss")
    return [step for name in names for step in steps[name]]


def test_tensorboard_has_one_curve_and_media(tmp_path: Path) -> None:
    train_in_parts(tmp_path / "run", "tensorboard")
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    seen.Reload()
    assert by_phase({tag: [event.step for event in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}) == STEPS
    assert [event.step for event in seen.Scalars("probe/accuracy")] == [3, 9]
    assert "codebooks/norms/1" in seen.Tags()["histograms"] and MAP in seen.Tags()["images"]
    assert seen.Images(MAP)[0].width == (1 + 4) * seen.Images(MAP)[0].height  # a digit and its four stages


def test_mlflow_in_a_folder_has_one_curve_and_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # skinny, as installed here, has no database
    run = train_in_parts(tmp_path / "run", "mlflow")
    client = MlflowClient()
    found = client.get_run(run)
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert by_phase({k: [m.step for m in client.get_metric_history(run, k)] for k in found.data.metrics}) == STEPS
    assert {a.path for a in client.list_artifacts(run)} == {"codebooks", "config.json", "images"}
    table = (tmp_path / "mlruns").rglob("stages-9.csv")
    assert len(next(table).read_text().splitlines()) == 1 + 4  # a heading and four stages


def leveldb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: a LevelDB log, blocks of 32 KiB whose first one begins with seven bytes of W&B's."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := -at % 32768) < 7 and left:  # too short for another header
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def whole_log(path: Path, kind: Callable[[], Any]) -> list[Any]:
    """All records of a .wandb file; W&B's own process may still be writing the last ones when a run has ended."""
    deadline = time.monotonic() + 60
    while True:
        records = []
        for data in leveldb_records(path):
            records.append(kind())
            records[-1].ParseFromString(data)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.1)


def test_wandb_offline_has_one_curve_and_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "DISABLE_STATS": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = train_in_parts(tmp_path / "run", "wandb")
    steps: dict[str, list[int]] = {}
    ids = set()
    for path in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):  # by the time they began
        for record in whole_log(path, wandb_internal_pb2.Record):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            for item in record.history.item:
                steps.setdefault(item.key or "/".join(item.nested_key), []).append(record.history.step.num)
    assert ids == {run}
    assert by_phase(steps) == STEPS
    assert steps["codebooks/stages/nrows"] == steps["codebooks/norms/1/bins"] == steps[f"{MAP}/width"] == [3, 9]


def test_trackio_has_one_curve_and_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio 0.43 needs pillow<13; constraints.txt has 13. See docs/with.md")
    run = train_in_parts(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "bridle.db") as store:
        found = store.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run,)).fetchall()
    steps: dict[str, list[int]] = {}
    for step, values in found:
        for name in json.loads(values):
            steps.setdefault(name, []).append(step)
    assert by_phase(steps) == STEPS
    assert steps["codebooks/stages"] == steps["codebooks/norms/1"] == steps[MAP] == [3, 9]


class Broken(Tracker):
    """A tracker whose server goes away."""

    name = "broken"
    calls = 0

    def open(self, run_id: str, *, resumed: bool, config: Mapping[str, Any]) -> str:
        return run_id

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self.calls += 1
        raise ConnectionError("server is away")

    def close(self) -> None:
        raise AssertionError("is not called once it has failed")


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Broken()
    broken.on_start(folder=tmp_path, config={})
    row = {"iteration": 1, "phase": "encoder", "phase_index": 0, "steps": 2, "loss": 1.0}
    for step in (1, 2):
        broken.on_metrics({**row, "step": step})
    broken.on_end()
    assert broken.calls == 1
    assert capsys.readouterr().err.count("log=broken failed and is off") == 1


def test_a_tracker_that_is_not_installed_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tracker,) = open_trackers("wandb")
    with pytest.raises(UsageError, match=r'wandb is not installed; install it with `pip install "bridle\[wandb\]"`'):
        tracker.on_start(folder=tmp_path, config={})
    assert open_trackers("none") == []
