"""The figures of a report, each made from plain rows and numbers.

Rows are those of metrics.jsonl, stages those of results.json; a number that is missing or not finite leaves a gap.
A figure for the page is inline SVG (see `drawing`), and the empty string where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridle.report.runs import Row, item, items, number, whole
from bridle.report.svg import DARK, FONT_SIZE, LIGHT, PAGE, Theme, drawing, inline_svg, legend, png, quiet, svg
from bridle.runs.results import Scores, StageHealth

NamedStages = tuple[str, Sequence[StageHealth]]  # what an evaluation is called, and its codebooks

CARD = (4.5, 2.5)  # inches of a figure on the page; about a phone's width at 72 points an inch


class Curve(NamedTuple):
    """What to read from each row: a number, or one stage of a list."""

    label: str
    key: str
    color: str
    stage: int | None = None

    def read(self, row: Row) -> float:
        value = row.get(self.key)
        return _or_nan(value if self.stage is None else item(value, self.stage))


class Bar(NamedTuple):
    """One probe result."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


# curves


def loss_curves(rows: Sequence[Row], *, phase: str = "encoder") -> str:
    """Loss over the steps of all iterations of one phase; where the tokenizer learns also its two parts."""
    curves = [Curve("loss", "loss", PAGE.second)]
    if phase != "encoder":
        curves += [Curve("cosine", "cosine", PAGE.first), Curve("commitment", "commitment", PAGE.plain)]
    return _timeline(rows, curves, phase=phase, label=f"{phase} loss by step", percent=False)


def token_accuracy_curves(rows: Sequence[Row], *, phase: str = "encoder") -> str:
    """Share of masked tokens whose code is predicted, one curve per stage."""
    stages = max((len(items(row.get("token_accuracy"))) for row in rows), default=0)
    curves = [Curve(f"stage {m + 1}", "token_accuracy", _stage_color(m, stages), m) for m in range(stages)]
    return _timeline(rows, curves, phase=phase, label="token accuracy per stage by step", percent=True)


def code_usage_curves(rows: Sequence[Row], *, phase: str = "encoder") -> str:
    """Share of each codebook's codes that occurred in the last steps, one curve per stage."""
    stages = max((len(items(row.get("code_usage"))) for row in rows), default=0)
    curves = [Curve(f"stage {m + 1}", "code_usage", _stage_color(m, stages), m) for m in range(stages)]
    return _timeline(rows, curves, phase=phase, label=f"codes in use per stage by {phase} step", percent=True)


def _timeline(rows: Sequence[Row], curves: Sequence[Curve], *, phase: str, label: str, percent: bool) -> str:
    """Curves over the steps of a phase, the iterations one after the other with a rule between them."""
    # A run that was resumed may have written a step twice; the later row counts.
    found = {(whole(r.get("iteration")), whole(r.get("step"))): r for r in rows if r.get("phase") == phase}
    curves = [curve for curve in curves if not all(math.isnan(curve.read(row)) for row in found.values())]
    if not curves:
        return ""
    with drawing(CARD) as figure:
        ax = figure.subplots()
        quiet(ax)
        offset, starts = 0, list[tuple[int, int]]()
        for iteration in sorted({i for i, _ in found}):
            steps = sorted(step for i, step in found if i == iteration)
            part = [found[iteration, step] for step in steps]
            for curve in curves:
                style = {"marker": "o", "ms": 3} if len(part) == 1 else {}
                ys = [curve.read(row) for row in part]
                ax.plot([offset + s for s in steps], ys, color=curve.color, lw=1.6, label=curve.label, **style)
            starts.append((offset, iteration))
            offset += max(whole(part[-1].get("steps")), steps[-1])
        ax.set_xlim(0, max(offset, 1))
        if percent:
            _percent_axis(ax)
        if len(starts) > 1:
            _mark_iterations(ax, starts)
        ax.set_xlabel(f"{phase} steps", color=PAGE.muted)
        if len(curves) > 1:
            legend(ax, columns=4, entries=len(curves))
        return inline_svg(figure, label)


def _mark_iterations(ax: Any, starts: Sequence[tuple[int, int]]) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.12 * (high - low))  # room for the names above the curves
    for start, iteration in starts:
        ax.axvline(start, color=PAGE.line, lw=0.8, zorder=0)
        ax.text(start, 1.0, f" iteration {iteration}", transform=ax.get_xaxis_transform(), va="top", color=PAGE.muted)


# codebooks


def code_usage_bars(evaluations: Sequence[NamedStages]) -> str:
    """Codes in use (CUR, wide) and effective use (ECU, narrow), a pair per stage, for each (name, stages)."""
    shown = _with_usage(evaluations)
    if not shown:
        return ""
    with drawing(CARD) as figure:
        _draw_usage(figure.subplots(), shown, PAGE)
        return inline_svg(figure, "codes in use and effective use per stage")


def code_usage_files(evaluations: Sequence[NamedStages]) -> dict[str, bytes]:
    """The same bars as {"svg": …, "png": …}; empty where there is nothing to draw."""
    shown = _with_usage(evaluations)
    if not shown:
        return {}
    with drawing(CARD, LIGHT, margin=0.1) as figure:
        _draw_usage(figure.subplots(), shown, LIGHT)
        return {"svg": svg(figure, LIGHT), "png": png(figure, LIGHT)}


def _with_usage(evaluations: Sequence[NamedStages]) -> list[NamedStages]:
    return [(name, stages) for name, stages in evaluations if any(stage.usage_rate for stage in stages)]


def _draw_usage(ax: Any, shown: Sequence[NamedStages], theme: Theme) -> None:
    quiet(ax, theme)
    x, places, names = 0.0, list[float](), list[str]()
    for name, stages in shown:
        mine = [x + m for m in range(len(stages))]
        rate, effective = (
            [_or_nan(getattr(stage, key)) for stage in stages] for key in ("usage_rate", "effective_usage")
        )
        ax.bar(mine, rate, 0.74, color=theme.second_soft, label="in use (CUR)")
        ax.bar(mine, effective, 0.38, color=theme.second, label="effective (ECU)")
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


def code_norm_histograms(stages: Sequence[StageHealth]) -> str:
    """Distribution of the code vectors' lengths per stage, right after the start and now; one scale for all stages."""
    if _longest(stages) <= 0:
        return ""
    with drawing((CARD[0], _norms_height(stages))) as figure:
        _draw_norms(figure, stages, PAGE)
        return inline_svg(figure, "lengths of the code vectors before and after training")


def code_norm_files(stages: Sequence[StageHealth]) -> dict[str, bytes]:
    """The same histograms (the paper's figures 2 and 3) as {"svg": …, "png": …}; empty where there are no norms."""
    if _longest(stages) <= 0:
        return {}
    with drawing((CARD[0], _norms_height(stages)), LIGHT, margin=0.1) as figure:
        _draw_norms(figure, stages, LIGHT)
        return {"svg": svg(figure, LIGHT), "png": png(figure, LIGHT)}


def _longest(stages: Sequence[StageHealth]) -> float:
    """The longest code vector, with a margin; 0 without any."""
    return max((v for stage in stages for v in (*stage.norms, *stage.norms_start)), default=0.0) * 1.05


def _norms_height(stages: Sequence[StageHealth]) -> float:
    return max(CARD[1], 0.5 * len(stages) + 0.5)


def _draw_norms(figure: Any, stages: Sequence[StageHealth], theme: Theme) -> None:
    import numpy as np

    top = _longest(stages)
    edges = np.linspace(0, top, 49)
    axes = figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]
    for stage, ax in zip(stages, axes, strict=True):
        quiet(ax, theme, grid=False)
        for norms, name, color in (
            (stage.norms_start, "at the start", theme.plain),
            (stage.norms, "now", theme.second),
        ):
            heights = np.histogram(norms, edges)[0]
            ax.stairs(heights / max(heights.max(), 1), edges, fill=True, color=color, alpha=0.6, lw=0, label=name)
        ax.set_yticks([0.3], [f"stage {stage.stage}"] if len(stages) > 1 else [""])
        ax.set_ylim(0, 1.1)
        ax.set_xlim(0, top)
    axes[-1].set_xlabel("length of the code vector", color=theme.muted)
    legend(axes[0], theme, columns=2, entries=2)


# probes


def probe_bars(bars: Sequence[Bar], *, chance: float | None = None) -> str:
    """Probe accuracies of one data set as horizontal bars with their 95 % intervals."""
    if not bars:
        return ""
    with drawing((CARD[0], 0.27 * len(bars) + 0.55)) as figure:
        _draw_probes(figure.subplots(), bars, chance, PAGE, labels=True)
        return inline_svg(figure, "probe accuracy")


def demo_summary_figure(results: Mapping[str, Mapping[str, Scores]], *, dark: bool = False) -> bytes:
    """A PNG of {data set: {"raw input": scores, "VQ iter 1": …, "RQ iter 2": …}}, one panel per data set."""
    theme = DARK if dark else LIGHT
    panels = [(title, [bar_of(label, probe) for label, probe in probes.items()]) for title, probes in results.items()]
    drawn = [(title, [bar for bar in bars if bar is not None]) for title, bars in panels if any(bars)]
    rows = max((len(bars) for _, bars in drawn), default=1)
    with drawing((1.1 + 2.6 * max(len(drawn), 1), 0.27 * rows + 1.1), theme, margin=0.1) as figure:
        axes = figure.subplots(1, max(len(drawn), 1), squeeze=False)[0]
        for n, (ax, (title, bars)) in enumerate(zip(axes, drawn, strict=False)):
            same = [bar.label for bar in bars] == [bar.label for bar in drawn[0][1]]
            chance = next((scores.chance for scores in results[title].values()), None)
            _draw_probes(ax, bars, chance, theme, labels=n == 0 or not same)
            ax.set_title(_short(title), loc="left", fontsize=FONT_SIZE + 1.5, fontweight="bold", color=theme.ink)
        if not drawn:
            axes[0].text(0.5, 0.5, "no probe results yet", ha="center", va="center", color=theme.muted)
            axes[0].set_axis_off()
        figure.supxlabel("linear probe accuracy in %, with 95 % intervals", color=theme.muted, fontsize=FONT_SIZE - 0.5)
        return png(figure, theme)


def bar_of(label: str, scores: Scores | None) -> Bar | None:
    """The bar of a main score; None where there is none."""
    if scores is None or scores.main is None:
        return None
    low, high = scores.interval or (None, None)
    return Bar(label, scores.main, low, high)


def _draw_probes(ax: Any, bars: Sequence[Bar], chance: float | None, theme: Theme, *, labels: bool) -> None:
    places = range(len(bars))[::-1]
    ax.barh(places, [bar.value for bar in bars], 0.7, color=_probe_colors([bar.label for bar in bars], theme))
    top = max(*(bar.high or bar.value for bar in bars), 0.01)
    for y, bar in zip(places, bars, strict=True):
        if bar.low is not None and bar.high is not None:
            ax.plot([bar.low, bar.high], [y, y], color=theme.ink, lw=0.9, solid_capstyle="butt")
        ax.text((bar.high or bar.value) + 0.02 * top, y, f"{100 * bar.value:.1f}", va="center", color=theme.ink)
    if chance is not None:
        ax.axvline(chance, color=theme.muted, lw=0.9, ls=(0, (2, 2)))
        ax.text(chance, -0.55, " chance", va="top", color=theme.muted, fontsize=FONT_SIZE - 1.5)
    ax.set_yticks(places, [_short(bar.label) for bar in bars] if labels else [""] * len(bars))
    ax.tick_params(length=0, labelcolor=theme.ink)
    ax.set_xticks([])
    ax.set_xlim(0, top * 1.16)
    ax.set_ylim(-1.1, len(bars) - 0.5)
    ax.set_facecolor("none")
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)
    ax.spines["left"].set_color(theme.line)


def _probe_colors(labels: Sequence[str], theme: Theme) -> list[str]:
    """Grey for baselines, one hue for VQ, one for other methods; the last bar of each has the full colour."""
    kinds = ["first" if label.startswith("VQ") else "second" if "iter" in label else "plain" for label in labels]
    last = {kind: n for n, kind in enumerate(kinds)}
    return [getattr(theme, kind if last[kind] == n else f"{kind}_soft") for n, kind in enumerate(kinds)]


def _percent_axis(ax: Any) -> None:
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def _stage_color(m: int, stages: int) -> str:
    last = len(PAGE.stages) - 1
    return PAGE.stages[1 if stages == 1 else round(m * last / (stages - 1))]


def _or_nan(value: object) -> float:
    found = number(value)
    return math.nan if found is None else found


def _short(text: str, limit: int = 28) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
