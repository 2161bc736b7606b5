"""Results as a table for the terminal, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from bridle.report.runs import RunSummary


def results_table(runs: Sequence[RunSummary]) -> Table | None:
    """The paper-style table: data × method × iteration, probe accuracy, CUR and ECU per stage, and flags."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("features of")
    table.add_column("probe acc. %", justify="right")
    for heading in ("CUR per stage", "ECU per stage", "codebooks"):
        table.add_column(heading)
    title = None
    for summary in runs:
        if summary.title != title:
            title = summary.title
            table.add_row(f"[bold cyan]{escape(title)}[/]")
            for name in ("raw", "untrained"):
                if (baseline := summary.baseline(name)) is not None:
                    table.add_row(f"  {name} {'input' if name == 'raw' else 'encoder'}", _probe(baseline))
        for row in _rows(summary):
            table.add_row(*row)
    return table if table.row_count > 1 else None


def _rows(summary: RunSummary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in summary.evaluations:
        stages = entry.get("codebooks") or []
        flags = [verdict["level"] for verdict in entry.get("verdicts", [])]
        health = "[red]bad[/]" if "bad" in flags else "[yellow]warning[/]" if "warn" in flags else "[green]healthy[/]"
        name = f"  {summary.method} iter{entry['iteration']}"
        cur, ecu = (_stages(stages, key) for key in ("usage_rate", "effective_usage"))
        rows.append((name, _probe(entry.get("probe")), cur, ecu, health if stages else "–"))
    return rows


def _probe(probe: dict[str, Any] | None) -> str:
    """Accuracy and half the width of its 95 % interval, in percent."""
    if not probe:
        return "–"
    low, high = probe["interval"]
    return f"{100 * probe['accuracy']:.1f} ±{50 * (high - low):.1f}"


def _stages(stages: Sequence[dict[str, Any]], key: str) -> str:
    """Two digits each, and four of them in fifteen columns."""
    shown = (f"{stage[key]:.2f}" for stage in stages)
    return " ".join("1.0" if text == "1.00" else text.removeprefix("0") for text in shown) or "–"
