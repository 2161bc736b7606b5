"""Probes, k-NN and fine-tuning made after a run, as they stand on its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stored_results import results, summary

from bridle.report.page import write_report
from bridle.report.runs import Measured, RunSummary, read_run
from bridle.report.score_tables import ScoreRow, further_tables, protocol_words, score_words
from bridle.report.tables import finetune_table

SCORES = {"accuracy": 0.84, "interval": [0.82, 0.86], "top5": 0.99, "chance": 0.1, "train_items": 50, "test_items": 20}
KNN = {
    "protocol": {"probe": {"pool": "mean"}},
    "baselines": {"raw": {**SCORES, "accuracy": 0.7}, "untrained": {**SCORES, "accuracy": 0.6}},
    "evaluations": [{"iteration": 1, "probe": {**SCORES, "setting": {"neighbours": 10}}}],
}
TUNED = {
    "protocol": {"finetune": {"epochs": 30.0, "steps": None}},
    "evaluations": [
        {"iteration": 0, "start": "scratch", "finetune": {**SCORES, "accuracy": 0.5}},
        {"iteration": 2, "start": "iter2", "finetune": {**SCORES, "accuracy": 0.95}},
    ],
}


def labelled(label: str = "RQ", **found: dict[str, Any]) -> RunSummary:
    run = summary({"evaluations": [{"iteration": 1, "probe": SCORES}]}, title="digits", method=label)
    further = tuple(Measured(kind, results(one)) for kind, one in found.items())
    return run._replace(further=further, label=label, anchor=f"run-{label}")


def rows_of(*runs: RunSummary) -> list[ScoreRow]:
    """The rows of all protocols."""
    return [row for rows in further_tables(runs).get("digits", {}).values() for row in rows]


def beside(row: ScoreRow) -> list[str]:
    assert row.scores is not None
    return score_words(row.scores)


def test_a_run_that_was_not_measured_again_has_no_rows() -> None:
    assert further_tables([labelled()]) == {}


def test_rows_stand_by_protocol_with_the_baselines_first() -> None:
    found = further_tables([labelled(knn=KNN, finetune=TUNED)])["digits"]
    assert {words: [(row.model, row.main) for row in rows] for words, rows in found.items()} == {
        "k-NN": [("raw input", 0.7), ("untrained encoder", 0.6), ("RQ iteration 1", 0.84)],
        "fine-tuning, 30 epochs": [("from scratch", 0.5), ("RQ iteration 2", 0.95)],
    }
    assert beside(found["k-NN"][2]) == ["top-5 99.0", "k = 10"]


def test_runs_of_one_title_share_their_baselines_and_keep_their_own_scores() -> None:
    rows = rows_of(labelled("RQ", knn=KNN), labelled("VQ", knn=KNN))
    assert [row.model for row in rows] == ["raw input", "untrained encoder", "RQ iteration 1", "VQ iteration 1"]


def test_a_baseline_that_differs_is_not_dropped() -> None:
    other = {**KNN, "baselines": {"untrained": {**SCORES, "accuracy": 0.65}}}
    rows = rows_of(labelled("RQ", knn=KNN), labelled("VQ", knn=other))
    assert [row.main for row in rows if row.model == "untrained encoder"] == [0.6, 0.65]


def test_a_probe_that_repeats_what_the_run_measured_is_not_shown_twice() -> None:
    same = {"protocol": {"probe": {"pool": "mean"}}, "evaluations": [{"iteration": 1, "probe": SCORES}]}
    better = {**same, "evaluations": [{"iteration": 1, "probe": {**SCORES, "accuracy": 0.9}}]}
    assert further_tables([labelled(probe=same)]) == {}
    assert [row.main for row in rows_of(labelled(probe=better))] == [0.9]


def test_folds_and_several_labels_are_told_beside_the_score() -> None:
    several = {
        "mean_average_precision": 0.41,
        "mean_auc": 0.9612,
        "d_prime": 2.494,
        "sd": 0.012,
        "folds": [{"fold": n} for n in range(5)],
    }
    tuned = {"evaluations": [{"iteration": 2, "start": "iter2", "finetune": several}]}
    (row,) = rows_of(labelled(finetune=tuned))
    assert row.main == 0.41
    assert beside(row) == ["sd 1.2 over 5 folds", "mAP", "AUC 0.961", "d′ 2.49"]


@pytest.mark.parametrize(
    ("kind", "protocol", "words"),
    [
        ("probe", {"probe": {"pool": "mean"}, "views": 1, "root": None}, "linear probe"),
        ("probe", {"probe": {"pool": "attentive", "items": 5000}}, "attentive probe, at most 5,000 items"),
        ("probe", {"probe": {"pool": "axis", "axis": 1}, "views": 3}, "linear probe, axis 1 kept, 3 views"),
        ("probe", {"probe": {"layer": 5}, "views": 2, "trim": True}, "linear probe, block 5, 2 views, trimmed"),
        ("knn", {"probe": {"pool": "class"}, "root": "/home/me/secret/birds"}, "k-NN, class token, on birds"),
        ("probe", {"probe": {"pool": "mean", "head": "adamw"}}, "linear probe, AdamW head"),
        ("probe", {"probe": {"head": "sgd", "loss": "bce"}}, "linear probe, SGD head, BCE"),
        ("knn", {"probe": {"head": "adamw", "loss": "ce"}}, "k-NN"),  # which has no head
        ("finetune", {"finetune": {"epochs": 3, "loss": "ce"}}, "fine-tuning, CE, 3 epochs"),
        ("finetune", {"finetune": {"epochs": None, "steps": 4000}}, "fine-tuning, 4,000 steps"),
    ],
)
def test_a_protocol_in_words(kind: str, protocol: dict[str, Any], words: str) -> None:
    assert protocol_words(kind, results({"protocol": protocol})) == words


def test_few_labels_and_retrieval_are_told_beside_the_score() -> None:
    scores = {"accuracy": 0.5, "interval": [0.4, 0.6]}
    some = {"shots": 5, "value": 0.3, "interval": [0.28, 0.32], "short": 2}
    few: dict[str, Any] = {"retrieval mAP": {"value": 0.25}, "1 per class": {"shots": 1, "value": 0.1}}
    few |= {"5 per class": some, "9 per class": "damaged", "width": {"value": 12.345, "unit": ""}}
    (row,) = rows_of(labelled(probe={"evaluations": [{"iteration": 1, "probe": {**scores, "further": few}}]}))
    assert beside(row) == [
        "retrieval mAP 25.0",
        "1 per class: 10.0",
        "5 per class (2 have fewer): 30.0 ±2.0",
        "width 12.35",
    ]


@pytest.mark.parametrize("damaged", [{}, {"evaluations": 3}, {"evaluations": [None, {"probe": "x"}], "baselines": []}])
def test_files_of_unexpected_content_leave_no_rows(damaged: dict[str, Any]) -> None:
    assert further_tables([labelled(probe=damaged, knn=damaged, finetune=damaged)]) == {}


def test_the_page_shows_what_lies_beside_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "finetune.json").write_text(json.dumps({**TUNED, "baselines": {}}))
    (tmp_path / "knn.json").write_text("{ broken")
    page = write_report([read_run(tmp_path)], tmp_path / "report.html").read_text()
    assert "Further measurements" in page
    assert "fine-tuning, 30 epochs" in page
    assert "knn.json could not be read" in page


def test_the_page_without_such_files_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    page = write_report([read_run(tmp_path)], tmp_path / "report.html").read_text()
    assert "Further measurements" not in page


def test_a_hostile_name_of_data_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    hostile = {**TUNED, "protocol": {"root": "/data/<script>alert(1)<script>"}}
    (tmp_path / "finetune.json").write_text(json.dumps(hostile))
    page = write_report([read_run(tmp_path)], tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "on &lt;script&gt;alert(1)&lt;script&gt;" in page


def test_an_encoder_from_elsewhere_has_no_iteration() -> None:
    rows = rows_of(labelled("vit", knn={**KNN, "method": "imported"}))
    assert [row.model for row in rows] == ["raw input", "untrained encoder", "vit"]
    table = finetune_table(results({**TUNED, "method": "imported"}))
    assert table is not None and list(table.columns[0].cells)[:2] == ["scratch", "imported"]
