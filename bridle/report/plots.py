"""The figures of a report, each made from plain rows and numbers.

Rows are those of metrics.jsonl, stages those of results.json; a number that is missing or not finite leaves a gap.
A figure for the page is inline SVG (see `drawing`), and the empty string where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridle.report.runs import item, items, main_score, number, whole
from bridle.report.svg import DARK, FONT_SIZE, LIGHT, PAGE, Theme, drawing, inline_svg, legend, png, quiet, svg

Row = Mapping[str, Any]

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


def code_usage_bars(evaluations: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Codes in use (CUR, wide) and effective use (ECU, narrow), a pair per stage, for each (name, stages)."""
    shown = _with_usage(evaluations)
    if not shown:
        return ""
    with drawing(CARD) as figure:
        _draw_usage(figure.subplots(), shown, PAGE)
        return inline_svg(figure, "codes in use and effective use per stage")


def code_usage_files(evaluations: Sequence[tuple[str, Sequence[Row]]]) -> dict[str, bytes]:
    """The same bars as {"svg": …, "png": …}; empty where there is nothing to draw."""
    shown = _with_usage(evaluations)
    if not shown:
        return {}
    with drawing(CARD, LIGHT, margin=0.1) as figure:
        _draw_usage(figure.subplots(), shown, LIGHT)
        return {"svg": svg(figure, LIGHT), "png": png(figure, LIGHT)}


def _with_usage(evaluations: Sequence[tuple[str, Sequence[Row]]]) -> list[tuple[str, Sequence[Row]]]:
    return [(name, stages) for name, stages in evaluations if any(number(s.get("usage_rate")) for s in stages)]


def _draw_usage(ax: Any, shown: Sequence[tuple[str, Sequence[Row]]], theme: Theme) -> None:
    quiet(ax, theme)
    x, places, names = 0.0, list[float](), list[str]()
    for name, stages in shown:
        mine = [x + m for m in range(len(stages))]
        rate, effective = ([_or_nan(s.get(key)) for s in stages] for key in ("usage_rate", "effective_usage"))
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


def code_norm_histograms(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> str:
    """Distribution of the code vectors' lengths per stage, right after the start and now; one scale for all stages."""
    norms = Norms.of(before, after)
    if norms.top <= 0:
        return ""
    with drawing((CARD[0], norms.height)) as figure:
        _draw_norms(figure, norms, PAGE)
        return inline_svg(figure, "lengths of the code vectors before and after training")


def code_norm_files(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> dict[str, bytes]:
    """The same histograms (the paper's figures 2 and 3) as {"svg": …, "png": …}; empty where there are no norms."""
    norms = Norms.of(before, after)
    if norms.top <= 0:
        return {}
    with drawing((CARD[0], norms.height), LIGHT, margin=0.1) as figure:
        _draw_norms(figure, norms, LIGHT)
        return {"svg": svg(figure, LIGHT), "png": png(figure, LIGHT)}


class Norms(NamedTuple):
    """Lengths of code vectors, one list per stage."""

    before: list[list[float]]
    after: list[list[float]]
    top: float  # the longest, with a margin; 0 without any

    @classmethod
    def of(cls, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Norms:
        old, new = ([[v for v in map(number, items(stage)) if v is not None] for stage in p] for p in (before, after))
        return cls(old, new, max((v for stage in (*old, *new) for v in stage), default=0.0) * 1.05)

    @property
    def stages(self) -> int:
        return max(len(self.before), len(self.after))

    @property
    def height(self) -> float:
        return max(CARD[1], 0.5 * self.stages + 0.5)


def _draw_norms(figure: Any, norms: Norms, theme: Theme) -> None:
    import numpy as np

    edges = np.linspace(0, norms.top, 49)
    axes = figure.subplots(norms.stages, 1, sharex=True, squeeze=False)[:, 0]
    for m, ax in enumerate(axes):
        quiet(ax, theme, grid=False)
        for part, name, color in (
            (norms.before, "at the start", theme.plain),
            (norms.after, "now", theme.second),
        ):
            heights = np.histogram(part[m] if m < len(part) else [], edges)[0]
            ax.stairs(heights / max(heights.max(), 1), edges, fill=True, color=color, alpha=0.6, lw=0, label=name)
        ax.set_yticks([0.3], [f"stage {m + 1}"] if norms.stages > 1 else [""])
        ax.set_ylim(0, 1.1)
        ax.set_xlim(0, norms.top)
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


def demo_summary_figure(results: Mapping[str, Mapping[str, Row]], *, dark: bool = False) -> bytes:
    """A PNG of {data set: {"raw": probe, "untrained": …, "VQ iter 1": …, "RQ iter 2": …}}, one panel per data set."""
    theme = DARK if dark else LIGHT
    panels = [(title, [bar_of(label, probe) for label, probe in probes.items()]) for title, probes in results.items()]
    drawn = [(title, [bar for bar in bars if bar is not None]) for title, bars in panels if any(bars)]
    rows = max((len(bars) for _, bars in drawn), default=1)
    with drawing((1.1 + 2.6 * max(len(drawn), 1), 0.27 * rows + 1.1), theme, margin=0.1) as figure:
        axes = figure.subplots(1, max(len(drawn), 1), squeeze=False)[0]
        for n, (ax, (title, bars)) in enumerate(zip(axes, drawn, strict=False)):
            same = [bar.label for bar in bars] == [bar.label for bar in drawn[0][1]]
            chances = [number(probe.get("chance")) for probe in results[title].values() if probe]
            _draw_probes(ax, bars, next(iter(chances), None), theme, labels=n == 0 or not same)
            ax.set_title(_short(title), loc="left", fontsize=FONT_SIZE + 1.5, fontweight="bold", color=theme.ink)
        if not drawn:
            axes[0].text(0.5, 0.5, "no probe results yet", ha="center", va="center", color=theme.muted)
            axes[0].set_axis_off()
        figure.supxlabel("linear probe accuracy in %, with 95 % intervals", color=theme.muted, fontsize=FONT_SIZE - 0.5)
        return png(figure, theme)


def bar_of(label: str, probe: Row | None) -> Bar | None:
    """The bar of a probe result as it stands in results.json; None where there is none."""
    value = main_score(probe) if probe else None
    if probe is None or value is None:
        return None
    return Bar(label, value, number(item(probe.get("interval"), 0)), number(item(probe.get("interval"), 1)))


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
