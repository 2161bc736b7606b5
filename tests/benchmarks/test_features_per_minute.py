"""When a line of the figure "features per minute" passes a score."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = "row,seed,iteration,step,cpu_minutes,score\n"


@pytest.fixture(scope="module")
def figure(benchmark_script: Callable[[str], Any]) -> Any:
    return benchmark_script("features_per_minute")


@pytest.mark.parametrize(
    ("scores", "minutes"),
    [([0.3, 0.5], 0.5), ([0.5, 0.45], 0.0), ([0.4, 0.3, 0.4], 0.0), ([0.3, 0.35], None), ([0.3, 0.3, 0.5], 1.5)],
)
def test_a_line_passes_a_score_where_it_first_reaches_it(
    figure: Any, scores: list[float], minutes: float | None
) -> None:
    line = [(float(t), score, score, score) for t, score in enumerate(scores)]
    found = figure.passed(line, 0.4)
    assert found == (None if minutes is None else pytest.approx(minutes))


def test_a_table_without_patches_is_told(figure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "curves.csv").write_text(
        HEAD + "RQ 4 x 256,0,1,0,0.0,0.3\nRQ 4 x 256,0,1,9,1.0,0.4\npatches,0,1,9,,0.4\n"
    )
    monkeypatch.setattr(sys, "argv", ["features", str(tmp_path), "--out", str(tmp_path / "figure.png")])
    with pytest.raises(SystemExit, match=r"curves\.csv has no points of the row 'patches'"):
        figure.main()
    assert not (tmp_path / "figure.png").exists()
