"""The figure of the longer run is drawn from the table of docs/results.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_the_table_has_every_bar_with_score_and_spread(benchmark_script: Callable[[str], Any]) -> None:
    figure = benchmark_script("long_run_figure")
    scores = figure.read_scores(figure.RESULTS.read_text(encoding="utf-8"))
    assert list(scores) == list(figure.BARS)
    for pair in scores.values():
        assert len(pair) == 2
        for score, spread in pair:
            assert 0 < spread < 10 < score < 100
