"""The table of codes as a product: a row is made from small data, and the table sums up its seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL


def test_a_row_holds_every_measure(benchmark_script: Callable[[str], Any]) -> None:
    short = ["detokenizer.steps=4", "detokenizer.warmup_steps=1", "detokenizer.items=8"]
    row = benchmark_script("token_table").make_row("digits-tiny", [*SMALL, *short], items=40, lm_steps=3)
    assert row["bits_per_token"] == 16.0
    assert len(row["psnr"]) == 4 and row["log_spectral_distance"] == [None] * 4
    assert 0 <= row["probe"] <= 100 and 0 <= row["map"] <= 100
    assert list(row["steady"]) == ["JPEG 90", "JPEG 50", "JPEG 20"]
    fine, coarse = row["steady"]["JPEG 90"], row["steady"]["JPEG 20"]
    assert fine[0] >= coarse[0]
    assert row["lm_bits"] > 0 and row["items"] == [40, 40]


def test_bags_count_the_codes_of_real_tokens(benchmark_script: Callable[[str], Any]) -> None:
    script = benchmark_script("token_table")
    codes = torch.tensor([[[0, 1], [2, 1], [2, 0]]])
    part = script.Part(None, [0], codes, torch.tensor([[True, True, False]]), np.array([0]))
    assert script.bags(part, (3, 2)).tolist() == [[1, 0, 1, 0, 2]]


def test_the_table_has_means_with_students_interval(
    benchmark_script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark_script("token_table")
    row = {
        "set": "x", "row": "RQ", "bits_per_token": 8.0, "psnr": [20.0, 21.0], "probe": 50.0, "map": 10.0,
        "lm_bits": 4.0, "lm_share": 0.5, "steady": {"JPEG 90": [1.0], "JPEG 50": [0.7, 0.5]}, "seed": 0,
        "cpu_minutes": 1.5,
    }  # fmt: skip
    script.print_table([row, {**row, "seed": 1, "probe": 52.0}])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "| 51.0 ±12.7 |" in last  # 12.706 · 1.4142 / √2
    assert "| 20.0 / 21.0 ±0.0 |" in last and "70.0 / 50.0 ±0.0 (JPEG 50)" in last and "| 1.5 | 0, 1 |" in last
