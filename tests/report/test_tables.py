from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from stored_results import STAGE, evaluation, results, summary

from bridle.report.tables import codebook_table, few_shot_table, results_table, verdict_lines
from bridle.runs.results import Evaluation

STAGES = [{**STAGE, "usage_rate": 1.0, "effective_usage": 0.87}] * 4
PLAIN: dict[str, Any] = {"accuracy": 0.8, "interval": [0.75, 0.83], "chance": 0.1}
FOLDED = {
    **PLAIN,
    "accuracy": 0.523,
    "mean_average_precision": 0.561,
    "sd": 0.011,
    "folds": [{"fold": n} for n in range(5)],
}
LABELS = {"mean_average_precision": 0.312, "interval": [0.30, 0.33], "mean_auc": 0.9412, "d_prime": 2.214}


def shown(probe: dict[str, Any], *, stages: Any = STAGES, **header: Any) -> list[str]:
    """The lines of the table in 80 columns, blanks made single."""
    evaluation = {
        "iteration": 1,
        "probe": probe,
        "codebooks": stages,
        "verdicts": [{"stage": 1, "level": "ok", "text": ""}],
    }
    found = {"baselines": {"raw": probe}, "evaluations": [evaluation], **header}
    table = results_table([summary(found, title="set [x]")])
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
        "RQ iter1 80.0 ±4.0 1.0 1.0 1.0 1.0 .87 .87 .87 .87 in use",
    ]


def test_folds_show_their_spread_their_number_and_map() -> None:
    assert shown(FOLDED) == [
        "features of probe acc. % mAP % ECU per stage codebooks",
        "set [x] (5 folds)",
        "raw input 52.3 ±1.1 sd 56.1",
        "RQ iter1 52.3 ±1.1 sd 56.1 .87 .87 .87 .87 in use",
    ]


def test_several_labels_show_map_auc_and_d_prime() -> None:
    assert shown(LABELS) == [
        "features of probe mAP % AUC d′ ECU per stage codebooks",
        "set [x]",
        "raw input 31.2 ±1.5 0.941 2.21",
        "RQ iter1 31.2 ±1.5 0.941 2.21 .87 .87 .87 .87 in use",
    ]


def test_without_codebooks_their_columns_are_left_out_and_neighbours_are_named() -> None:
    assert shown(PLAIN, stages=[], evaluation="k-NN")[0] == "features of k-NN acc. %"


def test_a_run_without_results_has_no_table() -> None:
    assert results_table([summary({})]) is None


def test_where_classes_are_uneven_balanced_accuracy_stands_beside() -> None:
    assert shown({**PLAIN, "balanced_accuracy": 0.71}, stages=[])[-1] == "RQ iter1 80.0 ±4.0 71.0"
    assert shown({**PLAIN, "balanced_accuracy": 0.79}, stages=[])[-1] == "RQ iter1 80.0 ±4.0"


def test_retrieval_stands_beside_the_neighbours() -> None:
    probe = {**PLAIN, "further": {"retrieval mAP": {"value": 0.312, "interval": [0.30, 0.33]}}}
    assert shown(probe, stages=[], evaluation="k-NN")[-1] == "RQ iter1 80.0 ±4.0 31.2 ±1.5"


def few(score: float, *, spread: float = 0.01, short: int = 0) -> dict[str, Any]:
    """A few-shot score with five labels per class, of two draws."""
    draws = [score - spread, score + spread]
    one = {"value": score, "interval": [score - 0.02, score + 0.02], "shots": 5, "draws": draws, "short": short}
    return {"further": {"5 per class": one}}


def few_shot_lines(found: dict[str, Any]) -> list[str]:
    table = few_shot_table(results({"method": "RQ", **found}))
    assert table is not None
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_few_labels_have_a_table_of_their_own_with_a_star_above_the_untrained_encoder() -> None:
    evaluations = [
        {"iteration": 1, "probe": few(0.5, spread=0.011)},
        {"iteration": 2, "probe": few(0.3)},
        {"iteration": 3},
    ]
    lines = few_shot_lines({"baselines": {"untrained": few(0.3)}, "evaluations": evaluations})
    assert lines[:5] == [
        "few labels, 2 draws 5 per class, %",
        "untrained encoder 30.0 ±2.0",
        "RQ iter1 50.0 ±2.0 *",
        "RQ iter2 30.0 ±2.0",
        "RQ iter3 –",
    ]
    assert "* above the untrained encoder on the same draws" in " ".join(lines[5:])
    assert few_shot_table(results({})) is None


def test_draws_that_are_all_alike_get_no_star_and_classes_with_too_few_items_are_told() -> None:
    found = {"baselines": {"untrained": few(0.3)}, "evaluations": [{"iteration": 1, "probe": few(0.5, short=4)}]}
    text = " ".join(few_shot_lines(found))
    assert "RQ iter1 50.0 ±2.0 *" not in text
    assert "of 4 classes with too few items all were taken" in text


def test_the_best_row_is_bold_and_not_the_last() -> None:
    found = {"baselines": {"raw": PLAIN}, "evaluations": [{"iteration": 1, "probe": {**PLAIN, "accuracy": 0.7}}]}
    table = results_table([summary(found)])
    assert table is not None
    assert [row.style for row in table.rows] == [None, "bold", None]  # the title, raw input, the model


CODEBOOK = {
    "stage": 1,
    "codes": 256,
    "usage_rate": 0.5,
    "entropy": 2.0,
    "effective_usage": 0.18,
    "perplexity": 7.4,
    "top_share": 0.41,
    "energy": 0.125,
    "position_information": None,
    "label_information": None,
    "dead": 128,
    "agreement": {"noise 1 %": 0.975},
    "norms": [0.9, 1.0],
    "norms_start": [0.5, 0.6],
    "directions": 64,
    "latent_dimension": 21.3,
    "code_dimension": 3.5,
    "code_first": 0.52,
}


def printed_codebooks(*entries: Evaluation) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    for entry in entries:
        console.print(codebook_table(entry))
        for line in verdict_lines(entry):
            console.print(line)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_a_column_per_stage_and_fits_80_columns() -> None:
    text = printed_codebooks(evaluation(iteration=2, codebooks=[{**CODEBOOK, "stage": m} for m in (1, 2, 3, 4)]))
    lines = {line.split("  ")[0]: line.split()[-4:] for line in text.splitlines()}
    assert "iteration 2" in text and max(map(len, text.splitlines())) <= 80
    assert lines["never used"] == ["128"] * 4
    assert lines["top code, % of tokens"] == ["41.0"] * 4
    assert lines["codes kept, noise 1 %, %"] == ["97.5"] * 4
    assert lines["directions of its inputs"] == ["21.3"] * 4
    assert lines["directions of its codes"] == ["3.5/64"] * 4
    assert lines["first direction, % of variance"] == ["52"] * 4
    assert "too few" in text, "position information that cannot be trusted"
    assert "label tells" not in text, "nothing is said of labels where there are none"


def test_a_verdict_is_a_line_and_hostile_text_stays_text() -> None:
    verdict = {"stage": 2, "level": "bad", "text": "[red]collapsed[/red]"}
    assert "bad  stage 2: [red]collapsed[/red]" in printed_codebooks(evaluation(verdicts=[verdict]))
