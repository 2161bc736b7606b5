"""A run that goes on from a copy of another's first iteration ends like one that made it itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridle import api
from bridle.config import Config
from bridle.files import read_json, read_lines
from bridle.grid.shared_iteration import borrow_beginning, lender_of

Small = Callable[..., Config]
ONE, KEEP = "schedule.iterations=1", "schedule.tokenizer=keep"


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "checkpoints").glob("*-end"))[-1] / "model.safetensors")


def test_a_borrowed_beginning_changes_nothing(small: Small, tmp_path: Path) -> None:
    lender = tmp_path / "one"
    api.pretrain(small(ONE), out=lender)
    config = small("tokenizer_phase.learning_rate=1e-4", "loss.commitment_weight=1")
    assert borrow_beginning(config, tmp_path / "two", [tmp_path / "nowhere", lender]) == lender
    assert lender_of(tmp_path / "two") == "one"
    assert lender_of(lender) is None
    api.pretrain(config, out=tmp_path / "two")
    api.pretrain(config, out=tmp_path / "alone")
    two, alone = last_state(tmp_path / "two"), last_state(tmp_path / "alone")
    assert two.keys() == alone.keys()
    assert all(torch.equal(two[name], alone[name]) for name in two)
    judged = [read_json(tmp_path / name / "results.json")["evaluations"] for name in ("two", "alone")]
    for own, other in zip(*judged, strict=True):
        assert own["iteration"] == other["iteration"]
        assert own["probe"]["hits"] == other["probe"]["hits"]
    steps = [
        [(row["phase_index"], row["step"]) for row in read_lines(tmp_path / name / "metrics.jsonl")]
        for name in ("two", "alone")
    ]
    assert steps[0] == steps[1]


def test_paths_may_be_written_otherwise(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signals").mkdir()
    for n in range(20):
        random = np.random.default_rng(n)
        np.save(tmp_path / "signals" / f"{n}.npy", random.standard_normal((1, 1024)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    api.pretrain(small(ONE, "data.root=signals", recipe="signal"), out=tmp_path / "one")
    config = small(KEEP, "schedule.iterations=2", "data.root=signals", recipe="signal")
    assert borrow_beginning(config, tmp_path / "two", [tmp_path / "one"]) == tmp_path / "one"
    api.pretrain(config, out=tmp_path / "two")
    assert [entry["iteration"] for entry in read_json(tmp_path / "two" / "results.json")["evaluations"]] == [1, 2]


@pytest.mark.parametrize(
    "other", [("mask.ratio=0.7",), ("seed=1",), ("probe.pool=axis",), ("encoder_phase.learning_rate=3e-4",), (ONE,)]
)
def test_what_begins_otherwise_borrows_nothing(small: Small, tmp_path: Path, other: tuple[str, ...]) -> None:
    api.pretrain(small(ONE, "probe.enabled=false"), out=tmp_path / "unjudged")
    assert borrow_beginning(small(KEEP, "probe.enabled=false"), tmp_path / "new", [tmp_path / "unjudged"]) is None
    api.pretrain(small(ONE), out=tmp_path / "one")
    assert borrow_beginning(small(KEEP, *other), tmp_path / "new", [tmp_path / "one"]) is None
    assert not (tmp_path / "new").exists()
    (tmp_path / "begun").mkdir()
    assert borrow_beginning(small(KEEP), tmp_path / "begun", [tmp_path / "one"]) is None
    assert borrow_beginning(small(KEEP), tmp_path / "new", [tmp_path / "one"]) == tmp_path / "one"


def test_only_runs_of_one_iteration_lend(small: Small, tmp_path: Path) -> None:
    api.pretrain(small(KEEP), out=tmp_path / "two")
    assert borrow_beginning(small(KEEP, "schedule.iterations=3"), tmp_path / "three", [tmp_path / "two"]) is None


def test_checkpoints_on_the_way_are_borrowed_where_they_are_kept(small: Small, tmp_path: Path) -> None:
    kept = ("runtime.keep_finished=true", "runtime.checkpoint_every=2")
    api.pretrain(small(ONE, *kept, steps=4), out=tmp_path / "one")
    config = small(KEEP, *kept, steps=4)
    assert borrow_beginning(config, tmp_path / "two", [tmp_path / "one"]) == tmp_path / "one"
    names = [sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("one", "two")]
    assert names[0] == names[1]
    assert len(names[0]) == 4  # steps 0, 2 and 4, and which one is the latest
    often = small(KEEP, *kept, "runtime.checkpoint_every=1", steps=4)
    assert borrow_beginning(often, tmp_path / "often", [tmp_path / "one"]) is None
