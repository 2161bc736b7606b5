"""Rate and distortion of codes as tables for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from bridle.console import plain_table
from bridle.report.plots import CARD
from bridle.report.svg import Plot, Theme, legend, quiet
from bridle.runs.reconstruction import AnchorPoint, Distortion, RateDistortion, RatePoint, cheapest

MEASURES = {
    "psnr": "PSNR dB",
    "ssim": "SSIM",
    "feature_distance": "features, LSD dB",
    "log_spectral_distance": "sound, LSD dB",
}
BESIDE = 15.0  # dB shown above and below the codes
UNITS = {"bits per pixel": "bits a pixel", "bits per second": "kbit a second", "bits per value": "bits a value"}


class RateRow(NamedTuple):
    """A row as text: what it is, its rates, its distortions, and what known codecs need to be as good."""

    name: str
    bits: str  # per token
    rate: str
    lost: list[str]
    anchors: list[str]


class RateView(NamedTuple):
    """A table of rows with its column names."""

    unit: str
    measures: list[str]
    codecs: list[str]
    rows: list[RateRow]
    about: str
    notes: tuple[str, ...]


def rate_view(found: Sequence[tuple[str, RateDistortion]]) -> RateView:
    """The rates of one or several runs of the same data, each with its name ("" for a single one)."""
    every = [point for _, one in found for point in one.by_stages]
    first = found[0][1]
    keys = [key for key in MEASURES if any(getattr(point, key) is not None for point in every)]
    codecs = list(dict.fromkeys(point.codec for _, one in found for point in one.anchors))
    rows = []
    for name, one in found:
        for point in one.by_stages:
            label = f"{name} {point.stages}".strip()
            needs = [anchor_text(one, codec, point) for codec in codecs]
            rate = rate_text(point.rate, one.unit)
            rows.append(RateRow(label, f"{point.bits_per_token:.4g}", rate, lost_texts(point, keys), needs))
    if first.inversion is not None:
        rows.append(RateRow("mel inversion alone", "", "", lost_texts(first.inversion, keys), [""] * len(codecs)))
    items = f"{first.items} {'test items' if first.held_out == 'test' else first.held_out}"
    notes = tuple(dict.fromkeys(note for _, one in found for note in one.notes))
    return RateView(UNITS[first.unit], [MEASURES[key] for key in keys], codecs, rows, items, notes)


def lost_texts(point: Distortion, keys: Sequence[str]) -> list[str]:
    """The measures named by `keys` as text."""
    values = ((key, getattr(point, key)) for key in keys)
    return ["–" if value is None else f"{value:.3f}" if key == "ssim" else f"{value:.1f}" for key, value in values]


def rate_text(rate: float, unit: str) -> str:
    """A rate in the unit of the tables."""
    return f"{rate / 1000:.3g}" if unit == "bits per second" else f"{rate:.3g}"


def anchor_text(one: RateDistortion, codec: str, point: Distortion) -> str:
    """The rate a codec needs to be as good, with its setting; "≤" where its coarsest setting is better already."""
    mine = sorted((anchor for anchor in one.anchors if anchor.codec == codec), key=lambda anchor: anchor.rate)
    needed = cheapest(one.anchors, codec, point)
    if not mine:
        return "–"
    if needed is None:
        return f"> {rate_text(mine[-1].rate, one.unit)}"
    return f"{'≤ ' if needed == mine[0] else ''}{rate_text(needed.rate, one.unit)} ({needed.setting})"


def rate_table(found: RateDistortion) -> Table:
    """For the terminal."""
    view = rate_view([("", found)])
    needs = [f"{codec} needs" for codec in view.codecs]
    table = plain_table("stages", "bits a token", view.unit, *view.measures, *needs)
    for column in table.columns:
        column.justify = "right"
        column.no_wrap = column.header in needs
    for row in view.rows:
        anchors = (text.replace(" (", "\n(") for text in row.anchors)
        table.add_row(row.name, row.bits, row.rate, *row.lost, *anchors)
    table.caption = " ".join([f"{view.about}. Codecs: rate at the same distortion or less.", *view.notes])
    return table


def shown_range(codes: Sequence[float], whole: tuple[float, float]) -> tuple[float, float]:
    """Limits of the axis: a codec that loses nothing (PSNR 120) must not press the codes into a line."""
    return max(whole[0], min(codes) - BESIDE), min(whole[1], max(codes) + BESIDE)


def rate_curves(found: Sequence[tuple[str, RateDistortion]]) -> Plot | None:
    """PSNR, or log-spectral distance of the sound, by rate: of the codes and of known codecs."""
    first = found[0][1]
    key = next((key for key in ("psnr", "log_spectral_distance") if getattr(first.by_stages[0], key) is not None), None)
    if key is None:
        return None
    lines: list[tuple[str, Sequence[RatePoint | AnchorPoint], str]] = []
    for n, (name, one) in enumerate(found):
        lines.append(
            (f"{name} codes".replace(", ", " ").replace("$", r"\$"), one.by_stages, "first" if n else "second")
        )
    codecs = dict.fromkeys(point.codec for point in first.anchors)
    lines += [(codec, [p for p in first.anchors if p.codec == codec], "plain") for codec in codecs]
    scale = 1000 if first.unit == "bits per second" else 1

    def draw(figure: Any, theme: Theme) -> None:
        ax = figure.subplots()
        quiet(ax, theme)
        for n, (name, points, color) in enumerate(lines):
            shown = sorted((point.rate / scale, getattr(point, key)) for point in points)
            style = {"marker": "o", "ms": 3.5} if color != "plain" else {"ls": ("-", "--", ":")[n % 3]}
            ax.plot(*zip(*shown, strict=True), color=theme[color], lw=1.6, label=name, **style)
        ax.set_ylim(*shown_range([getattr(p, key) for _, one in found for p in one.by_stages], ax.get_ylim()))
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        ax.set_xlabel(f"{UNITS[first.unit]}; {MEASURES[key]}", color=theme["muted"])
        legend(ax, theme, columns=3, entries=len(lines))

    return Plot("distortion by rate", CARD, draw)
