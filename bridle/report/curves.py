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

from bridle.report.drawing import FONT_SIZE, LIGHT, Theme, drawing, legend, png, quiet, svg
from bridle.report.numbers import decimal, percent, thousands
from bridle.report.runs import items, main_score, mapping, number, whole

COLUMNS = 2  # of the legend


class Point(NamedTuple):
    """One checkpoint."""

    iteration: int
    step: int
    minutes: float  # CPU, of training up to here
    score: float


Curve = Sequence[Point]


def curve_of(results: Mapping[str, Any]) -> list[Point]:
    """The points of a curve.json, led by the untrained encoder; those without a time or a score are left out."""
    untrained = main_score(mapping(mapping(results.get("baselines")).get("untrained")))
    points = [] if untrained is None else [Point(1, 0, 0.0, untrained)]
    for entry in map(mapping, items(results.get("evaluations"))):
        seconds, score = number(entry.get("cpu_seconds")), main_score(mapping(entry.get("probe")))
        if seconds is not None and score is not None:
            points.append(Point(whole(entry.get("iteration")), whole(entry.get("step")), seconds / 60, score))
    return points


def curve_table(results: Mapping[str, Any]) -> Table:
    """The same for a terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("iteration", "step", "CPU min", "probe %"):
        table.add_column(head, justify="right")
    for point in curve_of(results):
        table.add_row(
            *(str(point.iteration), thousands(point.step), decimal(point.minutes, 1), percent(point.score)),
        )
    return table


def averaged(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """(minutes, mean, least, most) at every place that all curves have; minutes are averaged too."""
    by_place = [{(point.iteration, point.step): point for point in curve} for curve in curves]
    shared = [place for place in by_place[0] if all(place in points for points in by_place)]
    found = []
    for place in shared:
        here = [points[place] for points in by_place]
        scores = [point.score for point in here]
        found.append((mean(point.minutes for point in here), mean(scores), min(scores), max(scores)))
    return found


def write_curves(curves: Mapping[str, Sequence[Curve]], stem: Path) -> list[Path]:
    """Draw named groups of curves to STEM.svg and STEM.png; nothing where no curve has two points."""
    shown = {name: line for name, group in curves.items() if group and len(line := averaged(group)) > 1}
    if not shown:
        return []
    stem.parent.mkdir(parents=True, exist_ok=True)
    with drawing((6.0, 3.2 + 0.2 * -(-len(shown) // COLUMNS)), LIGHT, margin=0.1) as figure:
        _draw(figure.subplots(), shown, LIGHT)
        files = {"svg": svg(figure, LIGHT), "png": png(figure, LIGHT)}
    for kind, content in files.items():
        stem.with_suffix(f".{kind}").write_bytes(content)
    return [stem.with_suffix(f".{kind}") for kind in files]


def _draw(ax: Any, shown: Mapping[str, Sequence[tuple[float, float, float, float]]], theme: Theme) -> None:
    quiet(ax, theme)
    colors = _colors(len(shown))
    for color, (name, line) in zip(colors, shown.items(), strict=True):
        minutes, middle, low, high = zip(*line, strict=True)
        ax.plot(minutes, middle, color=color, lw=1.6, marker="o", ms=3, label=name)
        if high != low:
            ax.fill_between(minutes, low, high, color=color, alpha=0.15, lw=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ax.set_xlim(left=0)
    ax.set_xlabel("CPU minutes of training", color=theme.muted, fontsize=FONT_SIZE - 0.5)
    legend(ax, theme, columns=min(COLUMNS, len(shown)), entries=len(shown))


def _colors(count: int) -> list[Any]:
    """Colours that people who see few colours can tell apart."""
    from matplotlib import colormaps

    return [colormaps["tab10" if count <= 10 else "tab20"](n) for n in range(count)]
