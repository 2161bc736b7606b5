from __future__ import annotations

from typing import Any

from rich.console import Console

from bridle.report.runs import RunSummary
from bridle.report.terminal import results_table

STAGES = [{"usage_rate": 1.0, "effective_usage": 0.87}] * 4
PLAIN = {"accuracy": 0.8, "interval": [0.75, 0.83], "chance": 0.1}
FOLDED = {**PLAIN, "accuracy": 0.523, "mean_average_precision": 0.561, "sd": 0.011, "folds": [{}] * 5}
LABELS = {"mean_average_precision": 0.312, "interval": [0.30, 0.33], "mean_auc": 0.9412, "d_prime": 2.214}


def shown(probe: dict[str, Any], *, stages: Any = STAGES, **header: Any) -> list[str]:
    """The lines of the table in 80 columns, blanks made single."""
    evaluation = {"iteration": 1, "probe": probe, "codebooks": stages, "verdicts": [{"level": "ok"}]}
    results = {"baselines": {"raw": probe}, "evaluations": [evaluation], **header}
    run = RunSummary("name", "set [x]", "RQ", [], results, "", {})
    table = results_table([run])
    assert table is not None
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    assert all(len(line) <= 80 for line in lines)
    return [" ".join(line.split()) for line in lines]


def test_a_single_split_shows_accuracy_and_half_its_interval() -> None:
    assert shown(PLAIN) == [
        "features of probe acc. % CUR per stage ECU per stage codebooks",
        "set [x]",
        "raw input 80.0 ±4.0",
        "RQ iter1 80.0 ±4.0 1.0 1.0 1.0 1.0 .87 .87 .87 .87 healthy",
    ]


def test_folds_show_their_spread_their_number_and_map() -> None:
    assert shown(FOLDED) == [
        "features of probe acc. % mAP % ECU per stage codebooks",
        "set [x] (5 folds)",
        "raw input 52.3 ±1.1 sd 56.1",
        "RQ iter1 52.3 ±1.1 sd 56.1 .87 .87 .87 .87 healthy",
    ]


def test_several_labels_show_map_auc_and_d_prime() -> None:
    assert shown(LABELS) == [
        "features of probe mAP % AUC d′ ECU per stage codebooks",
        "set [x]",
        "raw input 31.2 ±1.5 0.941 2.21",
        "RQ iter1 31.2 ±1.5 0.941 2.21 .87 .87 .87 .87 healthy",
    ]


def test_without_codebooks_their_columns_are_left_out_and_neighbours_are_named() -> None:
    assert shown(PLAIN, stages=None, evaluation="k-NN")[0] == "features of k-NN acc. %"


def test_a_run_without_results_has_no_table() -> None:
    assert results_table([RunSummary("name", "set", "RQ", [], {}, "", {})]) is None
