"""A data set full of bad files: the run completes, every bad file is listed once with its reason, no good one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from soak import media

from bridle import api
from bridle.config import Config, load_config
from bridle.data.build import open_data
from bridle.data.loading.loader import sequential
from bridle.errors import DataError


def config_for(kind: str, root: Path, *more: str) -> Config:
    return load_config(kind, [*media.settings(kind, root), *more])


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_pretraining_completes_and_lists_every_bad_file_once(tmp_path: Path, kind: str, start_method: str) -> None:
    bad = media.make(tmp_path / "data", kind, good=2 * len(media.KINDS[kind][2]))
    steps = media.steps_of_an_epoch(3 * len(bad))
    config = config_for(kind, tmp_path / "data", "schedule.iterations=1", f"max_steps={steps}")
    api.pretrain(config, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert media.listing_faults(rows, bad) == []
    assert {row["phase"] for row in rows} == {"iter1-encoder"}


def test_a_file_that_is_missing_twice_or_wrongly_listed_is_noticed() -> None:
    bad = {"a": "noise", "b": "text"}
    listed = [{"path": "x/a", "reason": "r"}, {"path": "x/a", "reason": "r"}, {"path": "x/good", "reason": ""}]
    assert media.listing_faults(listed, bad) == [
        "noise (a) is listed 2 times",
        "text (b) is listed 0 times",
        "good is good and listed",
        "x/good has no reason",
    ]


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_evaluation_refuses_a_set_that_is_not_whole(tmp_path: Path, kind: str) -> None:
    media.make(tmp_path / "data", kind, good=2)
    source = open_data(config_for(kind, tmp_path / "data")).train
    with pytest.raises(DataError, match="bad"):
        list(sequential(source, batch=1, mean=[0.0], std=[1.0], workers=1))
