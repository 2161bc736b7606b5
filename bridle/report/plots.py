"""The figures of a report, each made from plain rows and numbers.

Rows are those of metrics.jsonl, stages those of results.json; a number that is missing or not finite leaves a gap.
Where there is nothing to draw, there is no figure: None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridle.report.runs import Row, items, number, whole
from bridle.report.svg import FONT_SIZE, Plot, Theme, legend, quiet
from bridle.runs.results import Evaluation, Scores, StageHealth

NamedStages = tuple[str, Sequence[StageHealth]]  # what an evaluation is called, and its codebooks

CARD = (4.5, 2.5)  # inches of a figure on the page; about a phone's width at 72 points an inch
STAGE_CURVES = {"token_accuracy": "token accuracy", "code_usage": "codes in use"}


class Curve(NamedTuple):
    """What to read from each row: a number, or one stage of a list."""

    label: str
    key: str
    color: str  # of a theme
    stage: int | None = None

    def read(self, row: Row) -> float:
        """The number, NaN where there is none."""
        value = row.get(self.key)
        if self.stage is not None:
            value = dict(enumerate(items(value))).get(self.stage)
        found = number(value)
        return math.nan if found is None else found


def loss_curves(rows: Sequence[Row], *, phase: str) -> Plot | None:
    """Loss over the steps of all iterations of one phase; where the tokenizer learns also its two parts."""
    curves = [Curve("loss", "loss", "second")]
    if phase != "encoder":
        curves += [Curve("cosine", "cosine", "first"), Curve("commitment", "commitment", "plain")]
    return _timeline(rows, curves, phase=phase, label=f"{phase} loss by step", percent=False)


def stage_curves(rows: Sequence[Row], key: str, *, phase: str) -> Plot | None:
    """A share per stage, one curve each: masked tokens whose code is predicted, or codes that occurred lately."""
    stages = max((len(items(row.get(key))) for row in rows), default=0)
    shades = [2] if stages == 1 else [1 + round(3 * m / (stages - 1)) for m in range(stages)]
    curves = [Curve(f"stage {m + 1}", key, f"stage-{shade}", m) for m, shade in enumerate(shades)]
    return _timeline(rows, curves, phase=phase, label=f"{STAGE_CURVES[key]} per stage by {phase} step", percent=True)


def _timeline(rows: Sequence[Row], curves: Sequence[Curve], *, phase: str, label: str, percent: bool) -> Plot | None:
    """Curves over the steps of a phase, the iterations one after the other with a rule between them."""
    # A run that was resumed may have written a step twice; the later row counts.
    found = {(whole(r.get("iteration")), whole(r.get("step"))): r for r in rows if r.get("phase") == phase}
    shown = [curve for curve in curves if not all(math.isnan(curve.read(row)) for row in found.values())]

    def draw(figure: Any, theme: Theme) -> None:
        ax = figure.subplots()
        quiet(ax, theme)
        offset, starts = 0, list[tuple[int, int]]()
        for iteration in sorted({i for i, _ in found}):
            steps = sorted(step for i, step in found if i == iteration)
            part = [found[iteration, step] for step in steps]
            style = {"marker": "o", "ms": 3} if len(part) == 1 else {}
            for curve in shown:
                xs, ys = [offset + step for step in steps], [curve.read(row) for row in part]
                ax.plot(xs, ys, color=theme[curve.color], lw=1.6, label=curve.label, **style)
            starts.append((offset, iteration))
            offset += max(whole(part[-1].get("steps")), steps[-1])
        ax.set_xlim(0, max(offset, 1))
        if percent:
            _percent_axis(ax)
        if len(starts) > 1:
            _mark_iterations(ax, starts, theme)
        ax.set_xlabel(f"{phase} steps", color=theme["muted"])
        if len(shown) > 1:
            legend(ax, theme, columns=4, entries=len(shown))

    return Plot(label, CARD, draw) if shown else None


def _mark_iterations(ax: Any, starts: Sequence[tuple[int, int]], theme: Theme) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))  # room for the names above the curves
    for start, iteration in starts:
        ax.axvline(start, color=theme["line"], lw=0.8, zorder=0)
        place = {"transform": ax.get_xaxis_transform(), "va": "top"}
        ax.text(start, 1.0, f" iteration {iteration}", color=theme["muted"], **place)


def code_usage_bars(evaluations: Sequence[NamedStages]) -> Plot | None:
    """Codes in use (CUR, wide) and effective use (ECU, narrow), a pair per stage, for each (name, stages)."""
    shown = [(name, stages) for name, stages in evaluations if any(stage.usage_rate for stage in stages)]

    def draw(figure: Any, theme: Theme) -> None:
        ax = figure.subplots()
        quiet(ax, theme)
        x, places, names = 0.0, list[float](), list[str]()
        for name, stages in shown:
            mine = [x + m for m in range(len(stages))]
            ax.bar(mine, [s.usage_rate for s in stages], 0.74, color=theme["second-soft"], label="in use (CUR)")
            ax.bar(mine, [s.effective_usage for s in stages], 0.38, color=theme["second"], label="effective (ECU)")
            places += mine
            middle = (len(stages) - 1) // 2
            # The name of the evaluation goes below the number of its middle stage.
            names += [f"{m + 1}\n{name}" if m == middle and len(shown) > 1 else f"{m + 1}" for m in range(len(stages))]
            x = mine[-1] + 2.0
        ax.set_xticks(places, names)
        # At least room for six bars, so that a single codebook does not become a wall.
        centre, half = places[-1] / 2, max(places[-1] / 2 + 0.9, 3.2)
        ax.set_xlim(centre - half, centre + half)
        _percent_axis(ax)
        ax.set_ylim(0, 1)
        legend(ax, theme, columns=2, entries=2)

    return Plot("codes in use and effective use per stage", CARD, draw) if shown else None


def code_norm_histograms(stages: Sequence[StageHealth]) -> Plot | None:
    """Distribution of the code vectors' lengths per stage, right after the start and now (the paper's figures 2 and 3).

    All stages have one scale.
    """
    top = max((v for stage in stages for v in (*stage.norms, *stage.norms_start)), default=0.0) * 1.05

    def draw(figure: Any, theme: Theme) -> None:
        edges = np.linspace(0, top, 49)
        axes = figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]
        for stage, ax in zip(stages, axes, strict=True):
            quiet(ax, theme, grid=False)
            for norms, name, color in ((stage.norms_start, "at the start", "plain"), (stage.norms, "now", "second")):
                heights = np.histogram(norms, edges)[0]
                style = {"fill": True, "color": theme[color], "alpha": 0.6, "lw": 0}
                ax.stairs(heights / max(heights.max(), 1), edges, label=name, **style)
            ax.set_yticks([0.3], [f"stage {stage.stage}"] if len(stages) > 1 else [""])
            ax.set_ylim(0, 1.1)
            ax.set_xlim(0, top)
        axes[-1].set_xlabel("length of the code vector", color=theme["muted"])
        legend(axes[0], theme, columns=2, entries=2)

    size = (CARD[0], max(CARD[1], 0.5 * len(stages) + 0.5))
    return Plot("lengths of the code vectors before and after training", size, draw) if top > 0 else None


def write_codebook_figures(evaluations: Sequence[Evaluation], folder: Path) -> list[Path]:
    """Code usage of all iterations, and the lengths of the code vectors of each, as SVG and PNG in `folder`."""
    plots = {"code-usage": code_usage_bars([(f"iteration {e.iteration}", e.codebooks) for e in evaluations])}
    plots |= {f"code-norms-iteration{e.iteration}": code_norm_histograms(e.codebooks) for e in evaluations}
    return [path for stem, plot in plots.items() if plot is not None for path in plot.write(folder / stem)]


def probe_bars(probes: Mapping[str, Scores]) -> Plot | None:
    """Main scores of one data set as horizontal bars with their 95 % intervals."""
    shown = {name: scores for name, scores in probes.items() if scores.main is not None}

    def draw(figure: Any, theme: Theme) -> None:
        draw_probes(figure.subplots(), shown, theme)

    return Plot("probe accuracy", (CARD[0], 0.27 * len(shown) + 0.55), draw) if shown else None


def draw_probes(ax: Any, probes: Mapping[str, Scores], theme: Theme) -> None:
    """Bars with their names, numbers and intervals, and a line at chance level."""
    places = range(len(probes))[::-1]
    shown = [(scores.main or 0.0, scores.interval) for scores in probes.values()]
    ends = [value if interval is None else interval.high for value, interval in shown]
    ax.barh(places, [value for value, _ in shown], 0.7, color=_probe_colors(list(probes), theme))
    top = max(*ends, 0.01)
    for y, (value, interval), end in zip(places, shown, ends, strict=True):
        if interval is not None:
            ax.plot(interval, [y, y], color=theme["ink"], lw=0.9, solid_capstyle="butt")
        ax.text(end + 0.02 * top, y, f"{100 * value:.1f}", va="center", color=theme["ink"])
    chance = next(iter(probes.values())).chance
    if chance is not None:
        ax.axvline(chance, color=theme["muted"], lw=0.9, ls=(0, (2, 2)))
        ax.text(chance, -0.55, " chance", va="top", color=theme["muted"], fontsize=FONT_SIZE - 1.5)
    ax.set_yticks(places, [name if len(name) <= 28 else f"{name[:27]}…" for name in probes])
    ax.tick_params(length=0, labelcolor=theme["ink"])
    ax.set_xticks([])
    ax.set_xlim(0, top * 1.16)
    ax.set_ylim(-1.1, len(probes) - 0.5)
    ax.set_facecolor("none")
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.spines["left"].set_color(theme["line"])


def _probe_colors(labels: Sequence[str], theme: Theme) -> list[str]:
    """Grey for baselines, one hue for VQ, one for other methods; the last bar of each has the full colour."""
    kinds = ["first" if label.startswith("VQ") else "second" if "iter" in label else "plain" for label in labels]
    last = {kind: n for n, kind in enumerate(kinds)}
    return [theme[kind if last[kind] == n else f"{kind}-soft"] for n, kind in enumerate(kinds)]


def _percent_axis(ax: Any) -> None:
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
