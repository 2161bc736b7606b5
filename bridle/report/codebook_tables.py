"""What `bridle codebooks` shows of codebooks.json: a table for the terminal, and figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from bridle.console import plain_table
from bridle.report.plots import code_norm_files, code_usage_files
from bridle.runs.results import Evaluation, StageHealth

COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}


def codebook_table(entry: Evaluation) -> Table:
    """One column per stage and one row per quantity, so that four stages fit 80 columns."""
    table = plain_table()
    table.add_column(f"iteration {entry.iteration}")
    for stage in entry.codebooks:
        table.add_column(f"stage {stage.stage}", justify="right")
    for label, values in _rows(entry.codebooks):
        table.add_row(label, *values)
    return table


def _rows(stages: Sequence[StageHealth]) -> list[tuple[str, list[str]]]:
    def column(key: str, digits: int = 2, scale: float = 1.0, *, absent: str = "–") -> list[str]:
        return [_written(getattr(stage, key), digits, scale, absent) for stage in stages]

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
        ("directions of its codes", [_directions(stage) for stage in stages]),
        ("first direction, % of variance", column("code_first", 0, 100)),
        ("position tells, nats", column("position_information", absent="too few")),
    ]
    if all(stage.code_dimension is None for stage in stages):
        rows = [row for row in rows if "direction" not in row[0]]
    if any(stage.label_information is not None for stage in stages):
        rows.append(("label tells, nats", column("label_information", absent="too few")))
    rows.append(("distinct tuples so far", [_tuples(stage) for stage in stages]))
    for name in dict.fromkeys(name for stage in stages for name in stage.agreement):
        kept = [_written(stage.agreement.get(name), 1, 100) for stage in stages]
        rows.append((f"codes kept, {escape(name)}, %", kept))
    return rows


def _directions(stage: StageHealth) -> str:
    """The effective dimension of the codes, and how many directions there are: 3.5/64."""
    return f"{_written(stage.code_dimension, 1, 1.0)}/{_written(stage.directions, 0, 1.0)}"


def _tuples(stage: StageHealth) -> str:
    return "–" if stage.tuples is None else f"{'' if stage.tuples_exact else '≈'}{stage.tuples:,}"


def _written(value: float | None, digits: int, scale: float, absent: str = "–") -> str:
    return absent if value is None else f"{scale * value:,.{digits}f}"


def verdict_lines(entry: Evaluation) -> list[str]:
    """The verdicts of one iteration as lines with markup."""
    return [
        f"[{COLORS[verdict.level]}]{verdict.level:<4}[/] stage {verdict.stage}: {escape(verdict.text)}"
        for verdict in entry.verdicts
    ]


def write_codebook_figures(evaluations: Sequence[Evaluation], folder: Path) -> list[Path]:
    """Code usage of all iterations, and the lengths of the code vectors of each, as SVG and PNG in `folder`."""
    drawn = {"code-usage": code_usage_files([(f"iteration {e.iteration}", e.codebooks) for e in evaluations])}
    for entry in evaluations:
        drawn[f"code-norms-iteration{entry.iteration}"] = code_norm_files(entry.codebooks)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, files in drawn.items():
        for kind, content in files.items():
            path = folder / f"{stem}.{kind}"
            path.write_bytes(content)
            written.append(path)
    return written
