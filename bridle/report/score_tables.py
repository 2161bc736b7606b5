"""The two tables of scores on the page: of the runs' own probes, and of probes, k-NN and fine-tuning made later.

Rows of the same data and protocol stand together, the baselines first, so that what is compared was measured alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from bridle.report.runs import FURTHER, Measured, RunSummary, decimal, percent
from bridle.report.tables import score_text
from bridle.runs.results import BASELINES, Evaluation, Results, Scores

KINDS = {"probe": "linear probe", "knn": "k-NN", "finetune": "fine-tuning"}
HEADS = {"sgd": "SGD", "adamw": "AdamW"}  # the other is solved to the optimum


class ScoreRow(NamedTuple):
    """One line of a table: a baseline or a model, and what it scored."""

    model: str
    scores: Scores | None
    anchor: str | None = None  # of the run's section; None for a baseline
    entry: Evaluation | None = None  # what else is known of the model, in the summary

    @property
    def main(self) -> float | None:
        return None if self.scores is None else self.scores.main


def summary_tables(runs: Sequence[RunSummary]) -> dict[str, list[ScoreRow]]:
    """By title the baselines, then the evaluations of every run."""
    found: dict[str, list[ScoreRow]] = {}
    for title in dict.fromkeys(run.title for run in runs):
        mine = [run for run in runs if run.title == title]
        rows = found.setdefault(title, [])
        for words in BASELINES.values():
            # Other seeds, items or poolings have other baselines: each is shown, and whose it is.
            known: dict[float | None, tuple[str, Scores]] = {}
            for run in mine:
                if (baseline := run.results.named_baselines.get(words)) is not None:
                    known.setdefault(baseline.main, (run.label, baseline))
            several = len(known) > 1
            rows += [ScoreRow(f"{words}, {label}" if several else words, one) for label, one in known.values()]
        for run in mine:
            rows += [ScoreRow(run.label, entry.probe, run.anchor, entry) for entry in run.evaluations]
            if not run.evaluations:
                rows.append(ScoreRow(run.label, None, run.anchor))
    return found


def further_tables(runs: Sequence[RunSummary]) -> dict[str, dict[str, list[ScoreRow]]]:
    """By title and protocol what was measured after the runs; empty where nothing was."""
    found: dict[str, dict[str, list[ScoreRow]]] = {}
    for title in dict.fromkeys(run.title for run in runs):
        groups: dict[str, list[ScoreRow]] = {}
        for kind in FURTHER:
            for run in (run for run in runs if run.title == title):
                for measured in run.further:
                    if measured.kind == kind and not _repeats(measured, run):
                        group = groups.setdefault(protocol_words(kind, measured.results), [])
                        group += [row for row in _rows(measured.results, run) if not _is_known(row, group)]
        sorted_groups = {words: sorted(rows, key=lambda row: row.anchor is not None) for words, rows in groups.items()}
        if shown := {words: rows for words, rows in sorted_groups.items() if rows}:
            found[title] = shown
    return found


def protocol_words(kind: str, results: Results) -> str:
    """What was done, in a few words: kind, pooling, length, data, and how much of it."""
    protocol, words = results.protocol, [KINDS[kind]]
    if protocol is None:
        return KINDS[kind]
    settings = protocol.finetune if kind == "finetune" else protocol.probe
    if settings is not None:
        if settings.pool == "attentive":
            words = ["attentive probe"]
        elif settings.pool != "mean":
            words.append(f"axis {settings.axis} kept" if settings.pool == "axis" else "class token")
        if settings.deviation and settings.pool in ("mean", "axis"):
            words.append("mean and deviation")
    if kind == "finetune" and protocol.finetune is not None:
        words += [protocol.finetune.loss.upper()] if protocol.finetune.loss != "auto" else []
        lengths = {"epochs": protocol.finetune.epochs, "steps": protocol.finetune.steps}
        words += [f"{count:,g} {name}" for name, count in lengths.items() if count is not None]
    elif protocol.probe is not None:
        layer = protocol.probe.layer
        named = {"all": "every block", "stem": "the stem"}
        words += [] if layer is None else [named.get(str(layer), f"block {layer}")]
        if kind == "probe" and protocol.probe.head in HEADS:
            words.append(f"{HEADS[protocol.probe.head]} head")
            words += [protocol.probe.loss.upper()] if protocol.probe.loss != "auto" else []
    words += [f"{protocol.views} views"] if protocol.views > 1 else []
    words += ["trimmed"] if protocol.trim else []
    if settings is not None and settings.items is not None:
        words.append(f"at most {settings.items:,} items")
    where = protocol.manifest or protocol.root
    # The last part of a path names the data; the rest would tell where on somebody's disk it lies.
    return ", ".join(words) + ("" if where is None else f", on {PurePath(where).name}")


def _repeats(measured: Measured, run: RunSummary) -> bool:
    """Does the file only hold what the run measured itself, and the summary shows?"""
    found = [entry.probe for entry in measured.results.evaluations]
    return measured.kind == "probe" and found == [entry.probe for entry in run.evaluations]


def _rows(results: Results, run: RunSummary) -> Iterator[ScoreRow]:
    """The baselines and models of a results file that have a main score."""
    rows = [ScoreRow(words, scores) for words, scores in results.named_baselines.items()]
    for entry in results.evaluations:
        if entry.start == "scratch":
            rows.append(ScoreRow("from scratch", entry.scores))
        else:
            imported = results.method == "imported"  # from elsewhere: it knows no iterations
            name = run.label if imported else f"{run.label} iteration {entry.iteration}"
            rows.append(ScoreRow(name, entry.scores, run.anchor))
    return (row for row in rows if row.main is not None)


def _is_known(row: ScoreRow, group: Sequence[ScoreRow]) -> bool:
    """Baselines are the same for all runs of a title; one that another run measured alike is shown once."""
    return row.anchor is None and (row.model, row.main) in [(other.model, other.main) for other in group]


def score_words(scores: Scores, *, brief: bool = False) -> list[str]:
    """The spread over folds and the scores beside the main one; `brief` leaves out what is secondary."""
    words = [] if scores.sd is None else [f"sd {percent(scores.sd)} over {len(scores.folds)} folds"]
    if scores.name == "mAP":
        words += ["mAP", f"AUC {decimal(scores.mean_auc, 3)}", f"d′ {decimal(scores.d_prime)}"]
    elif not brief:
        known = {"top-5": scores.top5, "balanced": scores.balanced_accuracy, "mAP": scores.mean_average_precision}
        words += [f"{name} {percent(value)}" for name, value in known.items() if value is not None]
    if not brief and (neighbours := scores.setting.get("neighbours")) is not None:
        words.append(f"k = {neighbours:g}")
    for name, score in scores.further.items():
        if score.shots is None:
            words.append(f"{name} {score_text(score)}")
        elif not brief:
            words.append(f"{name}{f' ({score.short} have fewer)' if score.short else ''}: {score_text(score)}")
    return words
