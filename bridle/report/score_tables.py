"""What was measured of a run after it ended: other probes, k-NN and fine-tuning, as rows of one table.

The files have the form of results.json: a header with the protocol, baselines, and one entry per model. Rows of the
same data and protocol stand together, the baselines first, so that what is compared was measured alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from bridle.report.numbers import decimal, percent, thousands
from bridle.report.plots import Bar, bar_of
from bridle.report.runs import RunSummary, item, items, main_score, mapping, number, score_name, whole

BASELINES = {"raw": "raw features", "untrained": "untrained encoder", "classical": "whitened k-means"}
KINDS = {"probe": "linear probe", "knn": "k-NN", "finetune": "fine-tuning"}
HEADS = {"sgd": "SGD", "adamw": "AdamW"}  # the others are solved to the optimum
FIGURES = {"probe": "probe", "knn": "probe", "finetune": "finetune"}  # where an entry of each file keeps its scores


class Labelled(NamedTuple):
    """A run, what it is called among those with its title, and the anchor of its section."""

    run: RunSummary
    label: str
    anchor: str


class JudgedRow(NamedTuple):
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


class Found(NamedTuple):
    """One scored model before it is a row."""

    model: str
    scores: Mapping[str, Any]
    anchor: str | None


def judged_rows(runs: Sequence[Labelled]) -> list[JudgedRow]:
    """All rows, grouped by title and protocol; none where no run was judged again."""
    rows: list[JudgedRow] = []
    for title in dict.fromkeys(one.run.title for one in runs):
        groups: dict[str, list[Found]] = {}
        for kind in KINDS:
            for one in (one for one in runs if one.run.title == title):
                results = mapping(one.run.judged.get(kind))
                if results and not _repeats(kind, results, one.run):
                    group = groups.setdefault(protocol_words(kind, results), [])
                    group.extend(found for found in _found(kind, results, one) if not _known(found, group))
        mine = [row for words, group in groups.items() for row in _rows(title, words, group)]
        if mine:
            rows += [mine[0]._replace(span=len(mine) + sum(row.leads for row in mine)), *mine[1:]]
    return rows


def protocol_words(kind: str, results: Mapping[str, Any]) -> str:
    """What was done, in a few words: kind, pooling, length, data, and how much of it."""
    protocol = mapping(results.get("protocol"))
    settings = mapping(protocol.get(FIGURES[kind]))
    words = [KINDS[kind]]
    pool = settings.get("pool")
    if pool == "attentive":
        words = ["attentive probe"]
    elif pool == "axis":
        words.append(f"axis {whole(settings.get('axis'))} kept")
    elif pool == "class":
        words.append("class token")
    if settings.get("deviation") is True and pool in ("mean", "axis"):
        words.append("mean and deviation")
    if kind != "finetune" and settings.get("layer") is not None:
        words.append(f"block {whole(settings['layer'])}")
    if kind == "probe" and (head := HEADS.get(str(settings.get("head")))):
        words.append(f"{head} head")
    if kind != "knn" and settings.get("loss") in ("ce", "bce"):
        words.append(str(settings["loss"]).upper())
    for length in ("epochs", "steps"):
        if kind == "finetune" and (count := number(settings.get(length))) is not None:
            words.append(f"{count:,g} {length}")
    if whole(protocol.get("views")) > 1:
        words.append(f"{whole(protocol.get('views'))} views")
    if protocol.get("trim") is True:
        words.append("trimmed")
    if (limit := number(settings.get("items"))) is not None:
        words.append(f"at most {thousands(limit)} items")
    where = protocol.get("manifest") or protocol.get("root")
    # The last part of a path names the data; the rest is nobody's business.
    return ", ".join(words) + (f", on {PurePath(where).name}" if isinstance(where, str) else "")


def _repeats(kind: str, results: Mapping[str, Any], run: RunSummary) -> bool:
    """Does the file only hold what the run measured itself, and the table above shows?"""
    if kind != "probe":
        return False
    return [_scores(kind, entry) for entry in _entries(results)] == [_scores(kind, entry) for entry in run.evaluations]


def _found(kind: str, results: Mapping[str, Any], one: Labelled) -> Iterator[Found]:
    for name, words in BASELINES.items():
        if baseline := mapping(mapping(results.get("baselines")).get(name)):
            yield Found(words, baseline, None)
    for entry in _entries(results):
        if entry.get("start") == "scratch":
            yield Found("from scratch", _scores(kind, entry), None)
        else:
            imported = results.get("method") == "imported"  # from elsewhere: it knows no iterations
            name = one.label if imported else f"{one.label} iteration {whole(entry.get('iteration'))}"
            yield Found(name, _scores(kind, entry), one.anchor)


def _known(found: Found, group: Sequence[Found]) -> bool:
    """Baselines are the same for all runs of a title; one that another run measured alike is shown once."""
    return found.anchor is None and any(
        other.model == found.model and main_score(other.scores) == main_score(found.scores) for other in group
    )


def _rows(title: str, words: str, group: Sequence[Found]) -> list[JudgedRow]:
    rows = []
    for found in sorted(group, key=lambda found: found.anchor is not None):  # stable: baselines first
        bar = bar_of(found.model, found.scores)
        if bar is not None:
            amount = f"{thousands(found.scores.get('train_items'))} / {thousands(found.scores.get('test_items'))}"
            chance = number(found.scores.get("chance"))
            rows.append(JudgedRow(title, words, found.model, bar, chance, _beside(found.scores), amount, found.anchor))
    return [rows[0]._replace(leads=True), *rows[1:]] if rows else []


def _beside(scores: Mapping[str, Any]) -> list[str]:
    """The spread over folds, the scores beside the first one, and the number of neighbours."""
    words = []
    if (sd := number(scores.get("sd"))) is not None:
        words.append(f"sd {percent(sd)} over {len(items(scores.get('folds')))} folds")
    if score_name(scores) == "mAP":
        words += ["mAP", f"AUC {decimal(scores.get('mean_auc'), 3)}", f"d′ {decimal(scores.get('d_prime'))}"]
    else:
        known = (("top5", "top-5"), ("balanced_accuracy", "balanced"), ("mean_average_precision", "mAP"))
        words += [f"{name} {percent(scores[key])}" for key, name in known if number(scores.get(key)) is not None]
    if (neighbours := number(scores.get("neighbours"))) is not None:
        words.append(f"k = {neighbours:g}")
    if (found := main_score(mapping(scores.get("retrieval")))) is not None:
        words.append(f"retrieval mAP {percent(found)}")
    for few in map(mapping, items(scores.get("few_shot"))):
        low, high = (number(item(few.get("interval"), end)) for end in (0, 1))
        half = "" if low is None or high is None else f" ±{percent((high - low) / 2)}"
        short = f" ({whole(few.get('short'))} have fewer)" if whole(few.get("short")) else ""
        words.append(f"{whole(few.get('shots'))} per class{short}: {percent(main_score(few))}{half}")
    return words


def _entries(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in items(results.get("evaluations")) if isinstance(entry, dict)]


def _scores(kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(entry.get(FIGURES[kind]))
