"""What `bridle codebooks` shows of codebooks.json: a table for the terminal, and figures as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from bridle.report.plots import code_norm_files, code_usage_files
from bridle.report.runs import items, mapping, number, whole

COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}


def codebook_table(entry: Mapping[str, Any]) -> Table:
    """One column per stage and one row per quantity, so that four stages fit 80 columns."""
    stages = [mapping(stage) for stage in items(entry.get("codebooks"))]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"iteration {whole(entry.get('iteration'))}")
    for stage in stages:
        table.add_column(f"stage {whole(stage.get('stage'))}", justify="right")
    for label, values in _rows(stages):
        if values:
            table.add_row(label, *values)
    return table


def _rows(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    def column(key: str, digits: int = 2, scale: float = 1.0) -> list[str]:
        return [_written(number(stage.get(key)), digits, scale) for stage in stages]

    changes = list(dict.fromkeys(name for stage in stages for name in mapping(stage.get("agreement"))))
    rows = [
        ("codes", column("codes", 0)),
        ("in use (CUR)", column("usage_rate")),
        ("entropy (UE), nats", column("entropy")),
        ("effective use (ECU)", column("effective_usage")),
        ("perplexity", column("perplexity", 1)),
        ("never used", column("dead", 0)),
        ("top code, % of tokens", column("top_share", 1, 100)),
        ("left over, % of energy", column("energy", 1, 100)),
        ("directions of its inputs", column("latent_dimension", 1) if _any(stages, "latent_dimension") else []),
        ("directions of its codes", _directions(stages)),
        ("first direction, % of variance", column("code_first", 0, 100) if _any(stages, "code_first") else []),
        ("position tells, nats", _told(column("position_information"))),
        ("label tells, nats", _told(column("label_information")) if _any(stages, "label_information") else []),
        ("distinct tuples so far", [_tuples(stage) for stage in stages]),
    ]
    for name in changes:
        kept = [_written(number(mapping(stage.get("agreement")).get(name)), 1, 100) for stage in stages]
        rows.append((f"codes kept, {escape(name)}, %", kept))
    return rows


def _directions(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effective dimension of the codes, and how many directions there are: 3.5/64."""
    if not _any(stages, "code_dimension"):
        return []
    return [
        f"{_written(number(stage.get('code_dimension')), 1, 1.0)}/{_written(number(stage.get('directions')), 0, 1.0)}"
        for stage in stages
    ]


def _any(stages: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(number(stage.get(key)) is not None for stage in stages)


def _told(values: Sequence[str]) -> list[str]:
    """Information that could not be measured was left out for one reason."""
    return ["too few" if value == "–" else value for value in values]


def _tuples(stage: Mapping[str, Any]) -> str:
    found = number(stage.get("tuples"))
    return "–" if found is None else f"{'' if stage.get('tuples_exact', True) else '≈'}{found:,.0f}"


def _written(value: float | None, digits: int, scale: float) -> str:
    return "–" if value is None else f"{scale * value:,.{digits}f}"


def verdict_lines(entry: Mapping[str, Any]) -> list[str]:
    """The verdicts of one iteration as lines with markup."""
    lines = []
    for verdict in map(mapping, items(entry.get("verdicts"))):
        level = str(verdict.get("level"))
        color = COLORS.get(level, "white")
        lines.append(
            f"[{color}]{escape(level):<4}[/] stage {whole(verdict.get('stage'))}: {escape(str(verdict.get('text')))}"
        )
    return lines


def write_codebook_figures(evaluations: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Code usage of all iterations, and the lengths of the code vectors of each, as SVG and PNG in `folder`."""
    named = [
        (f"iteration {whole(entry.get('iteration'))}", [mapping(stage) for stage in items(entry.get("codebooks"))])
        for entry in evaluations
    ]
    drawn = {"code-usage": code_usage_files(named)}
    for name, stages in named:
        before, after = ([items(stage.get(key)) for stage in stages] for key in ("norms_start", "norms"))
        drawn[f"code-norms-{name.replace(' ', '')}"] = code_norm_files(before, after)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, files in drawn.items():
        for kind, content in files.items():
            path = folder / f"{stem}.{kind}"
            path.write_bytes(content)
            written.append(path)
    return written
