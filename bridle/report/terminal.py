"""Results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bridle.report.runs import RunSummary, read_run


def results_table(runs: Sequence[Path | str]) -> Table | None:
    """The paper-style table: data × method × iteration, probe accuracy, CUR and ECU per stage, and flags."""
    summaries = [read_run(run) for run in runs]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("data", "method", "iteration"):
        table.add_column(heading)
    for heading in ("probe acc. %", "95 % interval"):
        table.add_column(heading, justify="right")
    for heading in ("CUR per stage", "ECU per stage", "codebooks"):
        table.add_column(heading)
    title = None
    for summary in summaries:
        if summary.title != title:
            if title is not None:
                table.add_section()
            title = summary.title
            for name in ("raw", "untrained"):
                if (baseline := summary.baseline(name)) is not None:
                    table.add_row(title, f"{name} {'features' if name == 'raw' else 'encoder'}", "–", *_probe(baseline))
        for row in _rows(summary):
            table.add_row(*row)
    return table if table.row_count else None


def _rows(summary: RunSummary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in summary.evaluations:
        stages = entry.get("codebooks") or []
        flags = [v["level"] for v in entry.get("verdicts", []) if v["level"] != "ok"]
        health = "[red]bad[/]" if "bad" in flags else "[yellow]warning[/]" if flags else "[green]healthy[/]"
        rows.append(
            (
                summary.title,
                summary.method,
                f"iter{entry['iteration']}",
                *_probe(entry.get("probe")),
                _stages(stages, "usage_rate"),
                _stages(stages, "effective_usage"),
                health if stages else "–",
            )
        )
    return rows


def _probe(probe: dict[str, Any] | None) -> tuple[str, str]:
    if not probe:
        return "–", "–"
    low, high = probe["interval"]
    return f"{100 * probe['accuracy']:.1f}", f"{100 * low:.1f}–{100 * high:.1f}"


def _stages(stages: Sequence[dict[str, Any]], key: str) -> str:
    return " ".join(f"{stage[key]:.2f}" for stage in stages) or "–"
