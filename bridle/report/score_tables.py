"""Further measurements of runs (other probes, k-NN, fine-tuning) as rows of one table of the page.

Rows of the same data and protocol stand together, the baselines first, so that what is compared was measured alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from bridle.report.plots import Bar, bar_of
from bridle.report.runs import Measured, RunSummary, decimal, percent, thousands
from bridle.report.tables import best_of, score_text
from bridle.runs.results import BASELINES, Results, Scores

KINDS = {"probe": "linear probe", "knn": "k-NN", "finetune": "fine-tuning"}
HEADS = {"sgd": "SGD", "adamw": "AdamW"}  # the other is solved to the optimum


class Labelled(NamedTuple):
    """A run, what it is called among those with its title, and the anchor of its section."""

    run: RunSummary
    label: str
    anchor: str


class FurtherRow(NamedTuple):
    """One line: a model, what it scored by which protocol, and on how much."""

    title: str
    protocol: str
    model: str
    bar: Bar
    chance: float | None
    beside: list[str]  # further scores
    amount: str  # items of training and test
    anchor: str | None = None  # of the run's section; None for a baseline
    span: int = 0  # lines that share this title, those of the protocols too; 0 on all but the first of them
    leads: bool = False  # the first of its protocol, below a line with the protocol's words?
    best: bool = False  # of its protocol


class Found(NamedTuple):
    """One scored model before it is a row."""

    model: str
    scores: Scores
    anchor: str | None


def further_rows(runs: Sequence[Labelled]) -> list[FurtherRow]:
    """All rows, grouped by title and protocol; none where no run was measured again."""
    rows: list[FurtherRow] = []
    for title in dict.fromkeys(one.run.title for one in runs):
        groups: dict[str, list[Found]] = {}
        for kind in KINDS:
            for one in (one for one in runs if one.run.title == title):
                for measured in one.run.further:
                    if measured.kind == kind and not _repeats(measured, one.run):
                        group = groups.setdefault(protocol_words(kind, measured.results), [])
                        group.extend(found for found in _found(measured.results, one) if not _known(found, group))
        mine = [row for words, group in groups.items() for row in _rows(title, words, group)]
        if mine:
            rows += [mine[0]._replace(span=len(mine) + sum(row.leads for row in mine)), *mine[1:]]
    return rows


def protocol_words(kind: str, results: Results) -> str:
    """What was done, in a few words: kind, pooling, length, data, and how much of it."""
    protocol = results.protocol
    if protocol is None:
        return KINDS[kind]
    settings = protocol.finetune if kind == "finetune" else protocol.probe
    words = [KINDS[kind]]
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
        words += [] if protocol.probe.layer is None else [f"block {protocol.probe.layer}"]
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
    """Does the file only hold what the run measured itself, and the table above shows?"""
    return measured.kind == "probe" and [entry.probe for entry in measured.results.evaluations] == [
        entry.probe for entry in run.evaluations
    ]


def _found(results: Results, one: Labelled) -> Iterator[Found]:
    for key, words in BASELINES.items():
        if key in results.baselines:
            yield Found(words, results.baselines[key], None)
    for entry in results.evaluations:
        if entry.scores is None:
            continue
        if entry.start == "scratch":
            yield Found("from scratch", entry.scores, None)
        else:
            imported = results.method == "imported"  # from elsewhere: it knows no iterations
            yield Found(one.label if imported else f"{one.label} iteration {entry.iteration}", entry.scores, one.anchor)


def _known(found: Found, group: Sequence[Found]) -> bool:
    """Baselines are the same for all runs of a title; one that another run measured alike is shown once."""
    return found.anchor is None and any(
        other.model == found.model and other.scores.main == found.scores.main for other in group
    )


def _rows(title: str, words: str, group: Sequence[Found]) -> list[FurtherRow]:
    rows, ordered = [], sorted(group, key=lambda found: found.anchor is not None)  # stable: baselines first
    best = best_of([found.scores for found in ordered])
    for place, (model, scores, anchor) in enumerate(ordered):
        if (bar := bar_of(model, scores)) is not None:
            amount = f"{thousands(scores.train_items)} / {thousands(scores.test_items)}"
            row = FurtherRow(title, words, model, bar, scores.chance, _beside(scores), amount, anchor)
            rows.append(row._replace(best=place == best))
    return [rows[0]._replace(leads=True), *rows[1:]] if rows else []


def _beside(scores: Scores) -> list[str]:
    """The spread over folds, the scores beside the main one, and the number of neighbours."""
    words = []
    if scores.sd is not None:
        words.append(f"sd {percent(scores.sd)} over {len(scores.folds)} folds")
    if scores.name == "mAP":
        words += ["mAP", f"AUC {decimal(scores.mean_auc, 3)}", f"d′ {decimal(scores.d_prime)}"]
    else:
        known = {"top-5": scores.top5, "balanced": scores.balanced_accuracy, "mAP": scores.mean_average_precision}
        words += [f"{name} {percent(value)}" for name, value in known.items() if value is not None]
    if (neighbours := scores.setting.get("neighbours")) is not None:
        words.append(f"k = {neighbours:g}")
    for name, score in scores.further.items():
        short = f" ({score.short} have fewer)" if score.short and score.shots is not None else ""
        words.append(f"{name}{short}{':' if score.shots is not None else ''} {score_text(score)}")
    return words
