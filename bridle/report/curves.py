"""The probe over training time: features per minute.

A curve is a list of points of RUN/curve.json. Several curves of one name, one a seed, are drawn as their mean; a band
shows their range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.table import Table

from bridle.console import plain_table
from bridle.errors import needs
from bridle.report.runs import decimal, percent, thousands
from bridle.report.svg import FONT_SIZE, Plot, Theme, legend, quiet
from bridle.runs.results import Results, Scores

COLUMNS = 2  # of the legend


class Point(NamedTuple):
    """One checkpoint."""

    iteration: int
    step: int
    minutes: float | None  # CPU, of training up to here; None where the run does not tell
    score: float


Curve = Sequence[Point]


def curve_of(results: Results) -> list[Point]:
    """The points of a curve.json, led by the untrained encoder where training began with it."""
    points = []
    for entry in results.evaluations:
        if entry.probe is not None and entry.probe.main is not None:
            minutes = None if entry.cpu_seconds is None else entry.cpu_seconds / 60
            points.append(Point(entry.iteration, entry.step, minutes, entry.probe.main))
    untrained = results.baselines.get("untrained", Scores()).main
    if untrained is not None and not any((point.iteration, point.step) == (1, 0) for point in points):
        points.insert(0, Point(1, 0, 0.0, untrained))
    return points


def curve_table(results: Results) -> Table:
    """The same for a terminal."""
    table = plain_table()
    for head in ("iteration", "step", "CPU min", "probe %"):
        table.add_column(head, justify="right")
    for point in curve_of(results):
        table.add_row(str(point.iteration), thousands(point.step), decimal(point.minutes, 1), percent(point.score))
    return table


def averaged(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """(minutes, mean, least, most) at every place whose time all curves tell; minutes are averaged too."""
    by_place = [
        {(p.iteration, p.step): (p.minutes, p.score) for p in curve if p.minutes is not None} for curve in curves
    ]
    shared = [place for place in by_place[0] if all(place in points for points in by_place)]
    found = []
    for place in shared:
        minutes, scores = zip(*(points[place] for points in by_place), strict=True)
        found.append((mean(minutes), mean(scores), min(scores), max(scores)))
    return found


def write_curves(curves: Mapping[str, Sequence[Curve]], stem: Path) -> list[Path]:
    """Draw named groups of curves to STEM.svg and STEM.png; nothing where no curve has two points."""
    shown = {name: line for name, group in curves.items() if group and len(line := averaged(group)) > 1}
    if not shown:
        return []
    size = (6.0, 3.2 + 0.2 * -(-len(shown) // COLUMNS))
    return Plot("probe by CPU minutes", size, lambda figure, theme: draw_lines(figure.subplots(), shown, theme)).write(
        stem
    )


def draw_lines(ax: Any, shown: Mapping[str, Sequence[tuple[float, float, float, float]]], theme: Theme) -> None:
    """One line with its band for each name."""
    with needs("report"):
        from matplotlib import colormaps

    quiet(ax, theme)
    colors = colormaps["tab10" if len(shown) <= 10 else "tab20"]  # can be told apart by people who see few colours
    for color, (name, line) in zip(map(colors, range(len(shown))), shown.items(), strict=True):
        minutes, middle, low, high = zip(*line, strict=True)
        ax.plot(minutes, middle, color=color, lw=1.6, marker="o", ms=3, label=name)
        if high != low:
            ax.fill_between(minutes, low, high, color=color, alpha=0.15, lw=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    ax.set_xlim(left=0)
    ax.set_xlabel("CPU minutes of training", color=theme["muted"], fontsize=FONT_SIZE - 0.5)
    legend(ax, theme, columns=min(COLUMNS, len(shown)), entries=len(shown))
