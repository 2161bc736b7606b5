"""A data set full of bad files: the run completes, every bad file is listed once with its reason, no good one is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMALL
from soak import media

from bridle import api
from bridle.config import Config, load_config
from bridle.data.build import open_data
from bridle.data.loader import sequential
from bridle.errors import DataError

Small = Callable[..., Config]
SHAPES = {
    "audio": ["geometry.input=[32, 16]", "geometry.patch=[8, 8]"],
    "image": ["geometry.input=[16, 16]", "geometry.patch=[4, 4]"],
    "video": ["geometry.input=[2, 16, 16]", "geometry.patch=[2, 8, 8]", "video.stride=1"],
}


def config_for(kind: str, root: Path, *more: str) -> Config:
    data = [f"data.manifest={root / 'list.csv'}", "data.bad_share=0.6", "probe.enabled=false", "data.mean=[0.1]"]
    return load_config(kind, ["size=tiny", *SMALL, *SHAPES[kind], *data, "data.std=[1.0]", *more])


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_pretraining_completes_and_lists_every_bad_file_once(tmp_path: Path, kind: str) -> None:
    bad = media.make(tmp_path / "data", kind, good=2 * len(media.KINDS[kind][2]))
    steps = -(-3 * len(bad) // 8)  # one epoch
    config = config_for(kind, tmp_path / "data", "schedule.iterations=1", f"max_steps={steps}")
    api.pretrain(config, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    listed = [Path(row["path"]).name for row in rows]
    assert sorted(listed) == sorted(bad)
    assert all(row["reason"] and row["phase"] == "iter1-encoder" for row in rows)


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_evaluation_refuses_a_set_that_is_not_whole(tmp_path: Path, kind: str) -> None:
    media.make(tmp_path / "data", kind, good=2)
    source = open_data(config_for(kind, tmp_path / "data")).train
    with pytest.raises(DataError, match="bad"):
        list(sequential(source, batch=1, mean=[0.0], std=[1.0]))
