"""A table that reads every iteration, by the commands themselves: pretraining, codebooks, probes, fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL
from forked import bridle

from bridle.grid import ablation, every_iteration
from bridle.grid.every_iteration import fill_every_iteration
from bridle.grid.table_file import read_grid

TABLE = """
title: Small
every_iteration: true
iterations: 2
measures: [finetune, probe, codebooks]
rows:
  "VQ, BEATs": [quantizer=beats, quantizer.codes=16]
  "RQ": [quantizer=rq, quantizer.codes=16]
effects:
  "total": ["VQ, BEATs", "RQ"]
"""
SHORT = ("max_steps=2", "finetune.steps=2", "finetune.warmup_steps=1", "finetune.items=60", "finetune.batch=8")


def test_a_paper_table_runs_end_to_end_and_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(commands: dict[str, list[str]], **given: Any) -> None:
        for name, command in commands.items():
            ended = bridle(*command, cwd=tmp_path)
            assert ended.code == 0, ended.err
            ran.append(command[0])
            given["spent"](name, 1.0)

    monkeypatch.setattr(ablation, "run_beside", run)
    monkeypatch.setattr(every_iteration, "run_beside", run)
    (tmp_path / "small.yaml").write_text(TABLE)
    grid = read_grid(str(tmp_path / "small.yaml"))
    for _ in range(2):
        fill_every_iteration("digits-tiny", [*SMALL, *SHORT], grid, seeds=[0], out=tmp_path / "out")
    assert ran == ["pretrain"] * 2 + ["codebooks"] * 2 + ["probe"] * 2 + ["finetune"] * 4  # once
    scores, effects, codebooks = json.loads((tmp_path / "out/table.json").read_text())["tables"]
    assert [line[:2] for line in scores["rows"]] == [
        [row, r] for row in ("VQ, BEATs", "RQ") for r in ("iter1", "iter2")
    ]
    assert scores["columns"][2:] == ["LP top-1", "LP top-5", "FT top-1", "FT top-5"]
    assert all("[" in cell for line in scores["rows"] for cell in (line[2], line[4]))  # intervals
    assert [line[2] for line in effects["rows"]] == ["iter1", "iter2"]
    assert len(codebooks["rows"]) == 2 * (1 + 4)  # a stage of VQ and four of RQ, twice
    assert (tmp_path / "out/figures/row2/code-norms-iteration2.png").is_file()
