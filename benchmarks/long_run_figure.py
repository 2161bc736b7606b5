"""Draw the figure of the longer run from the table "A longer run" of docs/results.md.

python benchmarks/long_run_figure.py [--out docs/figures/long-run.png]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
# First cell of a row in the table -> label and colour of its bar.
BARS = {
    "raw input, linear": ("raw input,\nlinear probe", "#cfd4dc"),
    "untrained encoder, linear": ("untrained encoder,\nlinear probe", "#a7afbb"),
    "RQ, linear": ("pretrained,\nlinear probe", "#2a6fb0"),
    "RQ, fine-tuned, 40 / 18 epochs": ("pretrained,\nfine-tuned", "#1b4a78"),
}


def read_scores(text: str) -> dict[str, list[tuple[float, float]]]:
    """Score and its ± for each row of BARS: ESC-50, then CIFAR-10."""
    cells = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines())
    found = {row[0]: row[1:3] for row in cells if row[0] in BARS}
    return {name: [tuple(map(float, re.findall(r"[\d.]+", cell)[:2])) for cell in found[name]] for name in BARS}  # type: ignore[misc]


def draw(scores: dict[str, list[tuple[float, float]]]) -> Figure:
    """Two panels of bars with their ±."""
    figure = Figure(figsize=(8.6, 2.5), layout="constrained")
    titles = ("ESC-50, 32 CPU-minutes", "CIFAR-10, 30 CPU-minutes")
    for n, (ax, title) in enumerate(zip(figure.subplots(1, 2), titles, strict=True)):
        places = range(len(BARS))[::-1]
        values, spreads = zip(*(scores[name][n] for name in BARS), strict=True)
        ax.barh(places, values, 0.7, xerr=spreads, color=[colour for _, colour in BARS.values()], ecolor="#1d222b")
        for y, value, spread in zip(places, values, spreads, strict=True):
            ax.text(value + spread + 1, y, f"{value:.1f}", va="center", fontsize=10)
        ax.set_yticks(places, [label if n == 0 else "" for label, _ in BARS.values()], fontsize=9)
        ax.set(xlim=(0, 92), xticks=[])
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
        ax.tick_params(length=0)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    note = "accuracy in %; ± standard deviation over folds (ESC-50), 95 % interval (CIFAR-10); one seed"
    figure.supxlabel(note, fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "figures" / "long-run.png")
    draw(read_scores(RESULTS.read_text(encoding="utf-8"))).savefig(parser.parse_args().out, dpi=150, facecolor="white")


if __name__ == "__main__":
    main()
