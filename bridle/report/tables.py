"""Results as a table for the terminal, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from bridle.report.runs import RunSummary, item, items, main_score, mapping, model_name, number, score_name, whole

FEW_SHOT_NOTE = "± half the 95 % interval over draws; * above the untrained encoder on the same draws"
UNEVEN = 0.03  # between accuracy and balanced accuracy
BASELINES = {"raw": "raw input", "untrained": "untrained encoder", "classical": "whitened k-means"}


class Column(NamedTuple):
    """A heading, and what stands below it for an entry of a results file."""

    heading: str
    cell: Callable[[Mapping[str, Any]], str]
    number: bool = False  # set flush right


def results_table(runs: Sequence[RunSummary]) -> Table | None:
    """The paper-style table: data × method × iteration, probe scores, CUR and ECU per stage, and flags."""
    entries = [entry for run in runs for _, entry in _rows(run)]
    columns = _columns(entries, kind=str(next((run.results.get("evaluation", "probe") for run in runs), "probe")))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("features of")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.number else "left")
    title = None
    for run in runs:
        if run.title != title:
            title = run.title
            table.add_row(f"[bold cyan]{escape(title)}[/]{_folds(run)}")
            for name, entry in _baselines(run):
                table.add_row(f"  {name}", *(column.cell(entry) for column in columns if column.number))
        for name, entry in _evaluations(run):
            table.add_row(f"  {escape(name)}", *(column.cell(entry) for column in columns))
    return table if table.row_count > 1 else None


def _baselines(run: RunSummary) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, words in BASELINES.items():
        if (found := run.baseline(name)) is not None:
            yield words, {"probe": found}


def _evaluations(run: RunSummary) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in run.evaluations:
        yield model_name(run.method, entry["iteration"]), entry


def _rows(run: RunSummary) -> list[tuple[str, Mapping[str, Any]]]:
    return [*_baselines(run), *_evaluations(run)]


def _columns(entries: Sequence[Mapping[str, Any]], *, kind: str) -> list[Column]:
    """What there is to show. More scores than one leave no room for CUR, which the flags tell too."""
    probes = [probe for probe in (_probe(entry) for entry in entries) if probe]
    names = {score_name(probe) for probe in probes} or {"accuracy"}
    short = {"accuracy": "acc. %", "mAP": "mAP %"}[names.pop()] if len(names) == 1 else "%"
    columns = [Column(f"{kind} {short}", lambda entry: _score(_probe(entry)), True)]
    if any(_uneven(probe) for probe in probes):
        columns.append(_plain_score("balanced %", "balanced_accuracy", 100, 1))
    elif any("folds" in probe and "accuracy" in probe for probe in probes):
        columns.append(_plain_score("mAP %", "mean_average_precision", 100, 1))
    if any("retrieval" in probe for probe in probes):
        columns.append(Column("retrieval mAP %", lambda entry: _score(mapping(_probe(entry).get("retrieval"))), True))
    if any("mean_auc" in probe for probe in probes):
        columns += [_plain_score("AUC", "mean_auc", 1, 3), _plain_score("d′", "d_prime", 1, 2)]
    if not any(entry.get("codebooks") for entry in entries):
        return columns
    if len(columns) == 1:
        columns.append(Column("CUR per stage", lambda entry: _stages(entry, "usage_rate")))
    return [
        *columns,
        Column("ECU per stage", lambda entry: _stages(entry, "effective_usage")),
        Column("codebooks", _flag),
    ]


def _uneven(probe: Mapping[str, Any]) -> bool:
    """Do some classes have so many more test items than others that accuracy alone misleads?"""
    plain, balanced = number(probe.get("accuracy")), number(probe.get("balanced_accuracy"))
    return plain is not None and balanced is not None and abs(plain - balanced) > UNEVEN


def few_shot_table(run: RunSummary) -> Table | None:
    """One column for each number of labels per class; None where nothing was probed with few labels."""
    rows = [(name, items(_probe(entry).get("few_shot"))) for name, entry in _rows(run)]
    shots = sorted({whole(mapping(few).get("shots")) for _, found in rows for few in found})
    if not shots:
        return None
    draws = next(whole(mapping(few).get("draws")) for _, found in rows for few in found)
    short = max(whole(mapping(few).get("short")) for _, found in rows for few in found)
    note = FEW_SHOT_NOTE + (f"; of {short} classes with too few items all were taken" if short else "")
    table = Table(box=None, header_style="bold", pad_edge=False, caption=note, caption_justify="left")
    table.add_column(f"few labels, {draws} draws")
    for n in shots:
        table.add_column(f"{n} per class, %", justify="right")
    for name, found in rows:
        by_shots = {whole(mapping(few).get("shots")): mapping(few) for few in found}
        table.add_row(f"  {escape(name)}", *(_few_shot(by_shots.get(n, {})) for n in shots))
    return table


def _few_shot(few: Mapping[str, Any]) -> str:
    """Mean over draws with half of its 95 % interval; a star where it clearly beats the untrained encoder."""
    low, high = (number(item(few.get("interval"), end)) for end in (0, 1))
    score = main_score(few)
    if score is None or low is None or high is None:
        return "–"
    over = mapping(mapping(few.get("over")).get("untrained"))
    change, half = number(over.get("change")), number(over.get("half"))
    # Draws without any spread took the same items, or happen to agree: nothing is known of chance then.
    star = " *" if change is not None and half is not None and 1e-9 < half < change else ""
    return f"{100 * score:.1f} ±{50 * (high - low):.1f}{star}"


def _probe(entry: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(entry.get("probe"))


def _plain_score(heading: str, key: str, scale: int, digits: int) -> Column:
    def cell(entry: Mapping[str, Any]) -> str:
        found = number(_probe(entry).get(key))
        return "–" if found is None else f"{scale * found:.{digits}f}"

    return Column(heading, cell, True)


def _score(probe: Mapping[str, Any]) -> str:
    """The main score with its spread, in percent: over folds, or half the width of the 95 % interval."""
    score, sd = main_score(probe), number(probe.get("sd"))
    if score is None:
        return "–"
    if sd is not None:
        return f"{100 * score:.1f} ±{100 * sd:.1f} sd"
    low, high = (number(item(probe.get("interval"), end)) for end in (0, 1))
    return f"{100 * score:.1f}" if low is None or high is None else f"{100 * score:.1f} ±{50 * (high - low):.1f}"


def _folds(run: RunSummary) -> str:
    counts = {len(items(_probe(entry).get("folds"))) for _, entry in _rows(run)} - {0}
    return f" ({counts.pop()} folds)" if len(counts) == 1 else ""


def _flag(entry: Mapping[str, Any]) -> str:
    if not entry.get("codebooks"):
        return "–"
    levels = [mapping(verdict).get("level") for verdict in items(entry.get("verdicts"))]
    return "[red]bad[/]" if "bad" in levels else "[yellow]warning[/]" if "warn" in levels else "[green]healthy[/]"


def _stages(entry: Mapping[str, Any], key: str) -> str:
    """Two digits each, and four of them in fifteen columns."""
    shown = (f"{stage[key]:.2f}" for stage in items(entry.get("codebooks")))
    return " ".join("1.0" if text == "1.00" else text.removeprefix("0") for text in shown) or "–"
