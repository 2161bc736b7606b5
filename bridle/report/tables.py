"""Results as tables for the terminal, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from bridle.console import plain_table
from bridle.evaluate.significance import compare
from bridle.evaluate.verdict import Verdict
from bridle.report.runs import RunSummary, decimal, percent
from bridle.runs.results import Evaluation, Results, Score, Scores, StageHealth

FEW_SHOT_NOTE = "± half the 95 % interval over draws; * above the untrained encoder on the same draws"
LEVEL_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}  # of a verdict
UNEVEN = 0.03  # between accuracy and balanced accuracy


class Column(NamedTuple):
    """A heading, and what stands below it for a model."""

    heading: str
    cell: Callable[[Evaluation], str]
    number: bool = False  # set flush right


class Named(NamedTuple):
    """A model or baseline and its scores."""

    name: str
    entry: Evaluation


def results_table(runs: Sequence[RunSummary]) -> Table | None:
    """The paper-style table: data × method × iteration, probe scores, CUR and ECU per stage, and flags.

    The best row of each data set is bold.
    """
    columns = _columns([named.entry for run in runs for named in rows_of(run.results)], runs)
    table = plain_table()
    table.add_column("features of")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.number else "left")
    for title in dict.fromkeys(run.title for run in runs):
        mine = [run for run in runs if run.title == title]
        table.add_row(f"[bold cyan]{escape(title)}[/]{_folds(mine[0].results)}")
        rows = [*baselines_of(mine[0].results), *(named for run in mine for named in models_of(run.results))]
        best = best_of([named.entry.scores for named in rows])
        for place, (name, entry) in enumerate(rows):
            shown = [column.cell(entry) for column in columns if column.number or entry.iteration]
            table.add_row(f"  {escape(name)}", *shown, style="bold" if place == best else None)
    return table if table.row_count > 1 else None


def best_of(scores: Sequence[Scores | None]) -> int | None:
    """The place of the highest main score; None where nothing is scored."""
    known = [(one.main, -place) for place, one in enumerate(scores) if one is not None and one.main is not None]
    return -max(known)[1] if known else None


def baselines_of(results: Results) -> Iterator[Named]:
    for words, scores in results.named_baselines.items():
        yield Named(words, Evaluation(iteration=0, probe=scores))


def models_of(results: Results) -> Iterator[Named]:
    for entry in results.evaluations:
        yield Named(results.model_name(entry), entry)


def rows_of(results: Results) -> list[Named]:
    return [*baselines_of(results), *models_of(results)]


def _columns(entries: Sequence[Evaluation], runs: Sequence[RunSummary]) -> list[Column]:
    """What there is to show. More scores than one leave no room for CUR, which the flags tell too."""
    probes = [entry.probe for entry in entries if entry.probe is not None]
    kind = next((run.results.evaluation for run in runs), "probe")
    names = {scores.name for scores in probes} or {"accuracy"}
    short = {"accuracy": "acc. %", "mAP": "mAP %"}[names.pop()] if len(names) == 1 else "%"
    columns = [Column(f"{kind} {short}", lambda entry: with_spread(entry.probe), True)]
    if any(_uneven(scores) for scores in probes):
        columns.append(_column("balanced %", lambda scores: percent(scores.balanced_accuracy)))
    elif any(scores.folds and scores.accuracy is not None for scores in probes):
        columns.append(_column("mAP %", lambda scores: percent(scores.mean_average_precision)))
    if any(scores.mean_auc is not None for scores in probes):
        columns.append(_column("AUC", lambda scores: decimal(scores.mean_auc, 3)))
        columns.append(_column("d′", lambda scores: decimal(scores.d_prime)))
    columns += [_further_column(name, score) for name, score in further_scores(probes).items()]
    if not any(entry.codebooks for entry in entries):
        return columns
    if len(columns) == 1:
        columns.append(Column("CUR per stage", lambda entry: stages_text(entry, "usage_rate")))
    return [
        *columns,
        Column("ECU per stage", lambda entry: stages_text(entry, "effective_usage")),
        Column("codebooks", _flag),
    ]


def further_scores(scores: Sequence[Scores]) -> dict[str, Score]:
    """Names of further scores that are not few-shot scores, each with the first one of that name."""
    found: dict[str, Score] = {}
    for one in scores:
        for name, score in one.further.items():
            if score.shots is None:
                found.setdefault(name, score)
    return found


def _column(heading: str, shown: Callable[[Scores], str]) -> Column:
    return Column(heading, lambda entry: "–" if entry.probe is None else shown(entry.probe), True)


def _further_column(name: str, first: Score) -> Column:
    return _column(f"{name} {first.unit}".strip(), lambda scores: score_text(scores.further.get(name)))


def score_text(score: Score | None) -> str:
    """A value with half of its interval."""
    if score is None or score.value is None:
        return "–"
    scale, digits = (100, 1) if score.unit == "%" else (1, 2)
    half = "" if score.interval is None else f" ±{scale * score.interval.half:.{digits}f}"
    return f"{scale * score.value:.{digits}f}{half}"


def _uneven(scores: Scores) -> bool:
    """Do some classes have so many more test items than others that accuracy alone misleads?"""
    plain, balanced = scores.accuracy, scores.balanced_accuracy
    return plain is not None and balanced is not None and abs(plain - balanced) > UNEVEN


def few_shot_table(results: Results) -> Table | None:
    """One column for each number of labels per class; None where nothing was probed with few labels."""
    rows = [(name, {} if entry.probe is None else entry.probe.few_shot) for name, entry in rows_of(results)]
    every = [score for _, found in rows for score in found.values()]
    if not every:
        return None
    shots, short = sorted({score.shots or 0 for score in every}), max(score.short for score in every)
    note = FEW_SHOT_NOTE + (f"; of {short} classes with too few items all were taken" if short else "")
    table = plain_table(caption=note, caption_justify="left")
    table.add_column(f"few labels, {max(len(score.draws) for score in every)} draws")
    for n in shots:
        table.add_column(f"{n} per class, %", justify="right")
    untrained = results.baselines.get("untrained", Scores()).few_shot
    best = {n: max((found[n].value or 0.0 for _, found in rows if n in found), default=None) for n in shots}
    for name, found in rows:
        table.add_row(f"  {escape(name)}", *(_few_shot(found.get(n), untrained.get(n), best[n]) for n in shots))
    return table


def _few_shot(score: Score | None, untrained: Score | None, best: float | None) -> str:
    """Mean over draws with half of its 95 % interval; a star where it clearly beats the untrained encoder."""
    if score is None or score.value is None:
        return "–"
    star = ""
    if untrained is not None and 1 < len(score.draws) == len(untrained.draws):
        change = compare(score.draws, untrained.draws)
        star = " *" if change.is_clear and change.change > 0 else ""
    text = f"{score_text(score)}{star}"
    return f"[bold]{text}[/]" if score.value == best else text


def with_spread(scores: Scores | None) -> str:
    """The main score in percent with its spread: over folds, or half the width of the 95 % interval."""
    if scores is None or scores.main is None:
        return "–"
    if scores.sd is not None:
        return f"{100 * scores.main:.1f} ±{100 * scores.sd:.1f} sd"
    return score_text(Score(value=scores.main, interval=scores.interval))


def _folds(results: Results) -> str:
    counts = {len(entry.probe.folds) for _, entry in rows_of(results) if entry.probe is not None} - {0}
    return f" ({counts.pop()} folds)" if len(counts) == 1 else ""


def _flag(entry: Evaluation) -> str:
    if not entry.codebooks:
        return "–"
    levels = [verdict.level for verdict in entry.verdicts]
    return "[red]bad[/]" if "bad" in levels else "[yellow]warning[/]" if "warn" in levels else "in use"


def stages_text(entry: Evaluation, key: str) -> str:
    """Two digits each, and four of them in fifteen columns."""
    shown = (f"{getattr(stage, key):.2f}" for stage in entry.codebooks)
    return " ".join("1.0" if text == "1.00" else text.removeprefix("0") for text in shown) or "–"


def verdict_text(verdict: Verdict) -> list[str]:
    """The verdict and its advice as lines with markup."""
    lines = [f"[{LEVEL_COLOURS[verdict.level]}]{escape(verdict.text)}[/]"]
    if verdict.advice:
        lines.append("Try, in this order:")
        lines += [f"  {n}. {escape(tip)}" for n, tip in enumerate(verdict.advice, start=1)]
    return lines


# fine-tuning

SINGLE = {"top-5 %": "top5", "balanced %": "balanced_accuracy", "mAP %": "mean_average_precision"}
MULTILABEL = {"AUC %": "mean_auc", "d′": "d_prime"}


def finetune_table(results: Results) -> Table | None:
    """One row per starting point: the main score with its spread, and others; None if nothing was scored."""
    rows = [(entry, entry.finetune) for entry in results.evaluations if entry.finetune is not None]
    if not rows:
        return None
    main = rows[0][1].name
    beside = SINGLE if main == "accuracy" else MULTILABEL
    shown = {head: key for head, key in beside.items() if any(getattr(scores, key) is not None for _, scores in rows)}
    table = plain_table()
    table.add_column("fine-tuned from")
    few = sorted({n for _, scores in rows for n in scores.few_shot})
    for heading in (f"{main} %", *(f"{n} per class" for n in few), *shown, "items", "minutes"):
        table.add_column(heading, justify="right")
    best = best_of([scores for _, scores in rows])
    for place, (entry, scores) in enumerate(rows):
        start = "scratch" if entry.start == "scratch" else results.model_name(entry)
        cells = [
            f"{start}, {len(scores.folds)} folds" if scores.folds else start,
            with_spread(scores),
            *(score_text(scores.few_shot.get(n)) for n in few),
            *((percent if "%" in head else decimal)(getattr(scores, key)) for head, key in shown.items()),
            f"{scores.train_items}/{scores.test_items}",
            f"{scores.seconds / 60:.1f}",
        ]
        table.add_row(*cells, style="bold" if place == best else None)
    if main == "accuracy" and rows[0][1].chance is not None:
        table.add_row("commonest class", percent(rows[0][1].chance))
    return table


# codebooks


def codebook_table(entry: Evaluation) -> Table:
    """One column per stage and one row per quantity, so that four stages fit 80 columns."""
    table = plain_table()
    table.add_column(f"iteration {entry.iteration}")
    for stage in entry.codebooks:
        table.add_column(f"stage {stage.stage}", justify="right")
    for label, values in _codebook_rows(entry.codebooks):
        table.add_row(label, *values)
    return table


def _codebook_rows(stages: Sequence[StageHealth]) -> list[tuple[str, list[str]]]:
    def column(key: str, digits: int = 2, scale: float = 1.0, *, absent: str = "–") -> list[str]:
        return [_written(getattr(stage, key), digits, scale, absent) for stage in stages]

    of_all = zip(column("code_dimension", 1), column("directions", 0), strict=True)  # 3.5/64
    rows = [
        ("codes", column("codes", 0)),
        ("in use (CUR)", column("usage_rate")),
        ("entropy (UE), nats", column("entropy")),
        ("effective use (ECU)", column("effective_usage")),
        ("perplexity", column("perplexity", 1)),
        ("never used", column("dead", 0)),
        ("top code, % of tokens", column("top_share", 1, 100)),
        ("left over, % of energy", column("energy", 1, 100)),
        ("directions of its inputs", column("latent_dimension", 1)),
        ("directions of its codes", list(map("/".join, of_all))),
        ("first direction, % of variance", column("code_first", 0, 100)),
        ("position tells, nats", column("position_information", absent="too few")),
    ]
    if all(stage.code_dimension is None for stage in stages):
        rows = [row for row in rows if "direction" not in row[0]]
    if any(stage.label_information is not None for stage in stages):
        rows.append(("label tells, nats", column("label_information", absent="too few")))
    for name in dict.fromkeys(name for stage in stages for name in stage.agreement):
        kept = [_written(stage.agreement.get(name), 1, 100) for stage in stages]
        rows.append((f"codes kept, {escape(name)}, %", kept))
    return rows


def _written(value: float | None, digits: int, scale: float, absent: str = "–") -> str:
    return absent if value is None else f"{scale * value:,.{digits}f}"


def verdict_lines(entry: Evaluation) -> list[str]:
    """The verdicts of one iteration as lines with markup."""
    return [
        f"[{LEVEL_COLOURS[verdict.level]}]{verdict.level:<4}[/] stage {verdict.stage}: {escape(verdict.text)}"
        for verdict in entry.verdicts
    ]
