"""Fine-tuning results as a table for the terminal: one row per starting point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bridle.report.runs import items, mapping, model_name, number, whole

SINGLE = (("top5", "top-5 %", 100), ("balanced_accuracy", "balanced %", 100), ("mean_average_precision", "mAP %", 100))
SEVERAL = (("mean_auc", "AUC %", 100), ("d_prime", "d′", 1))


def finetune_table(results: Mapping[str, Any]) -> Table | None:
    """Method and start, the first figure with its spread, and the figures beside it; None if nothing was scored."""
    entries = [mapping(entry) for entry in items(results.get("evaluations"))]
    rows = [(entry, mapping(entry.get("finetune"))) for entry in entries if mapping(entry.get("finetune"))]
    if not rows:
        return None
    single = "accuracy" in rows[0][1]
    first, beside = ("accuracy", SINGLE) if single else ("mean_average_precision", SEVERAL)
    shown = [column for column in beside if any(number(figures.get(column[0])) is not None for _, figures in rows)]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("fine-tuned from")
    for heading in ("accuracy %" if single else "mAP %", *(heading for _, heading, _ in shown), "items", "minutes"):
        table.add_column(heading, justify="right")
    for entry, figures in rows:
        start = "scratch" if entry.get("start") == "scratch" else model_name(results.get("method"), entry["iteration"])
        folds = len(items(figures.get("folds")))
        table.add_row(
            f"{start}, {folds} folds" if folds else start,
            _with_spread(figures, first),
            *(_scaled(figures.get(key), scale) for key, _, scale in shown),
            f"{whole(figures.get('train_items'))}/{whole(figures.get('test_items'))}",
            f"{(number(figures.get('seconds')) or 0) / 60:.1f}",
        )
    if single and (chance := number(rows[0][1].get("chance"))) is not None:
        table.add_row("commonest class", f"{100 * chance:.1f}")
    return table


def _with_spread(figures: Mapping[str, Any], key: str) -> str:
    """In percent: folds with their standard deviation, else half the 95 % interval."""
    value = _scaled(figures.get(key), 100)
    if items(figures.get("folds")):
        return f"{value} ±{_scaled(figures.get('sd'), 100)} sd"
    low, high = (number(end) for end in items(figures.get("interval")) or (None, None))
    return value if low is None or high is None else f"{value} ±{50 * (high - low):.1f}"


def _scaled(value: object, scale: float) -> str:
    found = number(value)
    return "–" if found is None else f"{scale * found:.{1 if scale > 1 else 2}f}"
