"""The harness that trains a recipe and reads its features in one go."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    quick = [*SMALL, "max_steps=3", "probe.items=200", "probe.enabled=false", "probe.on=validation"]
    monkeypatch.setattr(sys, "argv", ["method_rows.py", "digits-tiny", *quick, *arguments])
    script.main()


def test_a_row_names_its_run_and_has_every_reading(
    benchmark_script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, rows = benchmark_script("method_rows"), tmp_path / "rows.jsonl"
    run(script, monkeypatch, "seed=3", "encoder.whiten=1.0", "--set", "digits", "--row", "white", "--rows", str(rows))
    run(script, monkeypatch, "--set", "digits", "--baselines", "--rows", str(rows))
    trained, baselines = map(json.loads, rows.read_text().splitlines())
    assert (trained["set"], trained["row"], trained["seed"], trained["on"]) == ("digits", "white", 3, "validation")
    assert trained["cpu_minutes"] > 0 and "encoder.whiten=1.0" in trained["command"]
    assert list(trained["scores"]) == ["iter1", "iter2"]
    assert set(trained["scores"]["iter2"]) == {
        *(f"block{n}-{pool}" for n in (0, 1, 2) for pool in ("all", "mean", "axis")),
        *("stack-all", "stack-axis"),
    }
    assert set(trained["scores"]["iter1"]["block2-all"]) == {
        "linear",
        "knn",
        "knn_plain",
        "shots1",
        "shots5",
        "shots10",
    }
    assert {"raw", "classical", "untrained block2-all"} <= set(baselines["scores"])
    assert baselines["scores"]["raw"]["linear"] > 50  # digits are easy
