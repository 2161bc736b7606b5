"""Results as Python shows them."""

from __future__ import annotations

import numpy as np

import bridle
from bridle.runs.results import Evaluation, Hits, Interval, Results, Score, Scores


def scored(value: float) -> Scores:
    hits = Hits.pack(np.ones(400, dtype=bool), sizes=[400], truth="x")
    shots = {"10 per class": Score(value=value / 2, shots=10, draws=(value / 2,) * 10)}
    return Scores(
        accuracy=value, interval=Interval(value - 0.1, value + 0.1), test_items=400, classes=8, hits=hits, further=shots
    )


def test_results_fit_a_screen_and_show_every_score() -> None:
    evaluations = tuple(Evaluation(iteration=n, probe=scored(0.6 + n / 10)) for n in (1, 2))
    results = Results(title="birds", method="RQ", baselines={"raw": scored(0.5)}, evaluations=evaluations)
    lines = repr(results).splitlines()
    assert lines[0] == "Results('birds', probe, seed 0)"
    assert [line.split()[:2] for line in lines[1:]] == [["raw", "input"], ["RQ", "iter1"], ["RQ", "iter2"]]
    assert "accuracy 0.800 [0.700, 0.900], 10 per class 0.400, 400 test items, 8 classes" in lines[-1]
    assert max(map(len, lines)) < 120


def test_the_public_names_are_listed_and_can_be_had() -> None:
    assert {"load", "pretrain", "Model", "Finished", "__version__"} <= set(dir(bridle))
    assert all(getattr(bridle, name) is not None for name in dir(bridle))
