"""Draw the demo's figure and print its table for docs/results.md, from the runs that `bridle demo` wrote.

make demo && python benchmarks/demo_figure.py [--demo demo] [--out docs/figures]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from bridle.report.page import probes_by_title, read_run
from bridle.report.plots import draw_probes
from bridle.report.runs import RunSummary
from bridle.report.svg import FONT_SIZE, LIGHT, MARGIN, drawing
from bridle.report.tables import baselines_of, with_spread
from bridle.runs.results import Scores


def markdown(runs: list[RunSummary]) -> str:
    """The demo's table as docs/results.md shows it."""
    lines = ["| data | features of | probe acc. % | CUR per stage | ECU per stage |", "|---|---|---|---|---|"]
    shown = set()
    for run in runs:
        if run.title not in shown:
            shown.add(run.title)
            for words, baseline in baselines_of(run.results):
                lines.append(f"| {run.title} | {words} | {with_spread(baseline.probe)} | | |")
        for entry in run.evaluations:
            cur, ecu = (
                " ".join(f"{getattr(stage, key):.2f}" for stage in entry.codebooks)
                for key in ("usage_rate", "effective_usage")
            )
            flag = " ⚠" if any(verdict.level != "ok" for verdict in entry.verdicts) else ""
            name = run.results.model_name(entry)
            lines.append(f"| {run.title} | {name} | {with_spread(entry.probe)} | {cur} | {ecu}{flag} |")
    return "\n".join(lines)


def draw(results: Mapping[str, Mapping[str, Scores]], path: Path) -> None:
    """A PNG of {data set: {"raw input": scores, "VQ iter 1": …, "RQ iter 2": …}}, one panel per data set."""
    size = (1.1 + 2.6 * len(results), 0.27 * max(map(len, results.values())) + 1.1)
    with drawing(size, LIGHT, margin=MARGIN) as figure:
        axes = figure.subplots(1, len(results), squeeze=False)[0]
        first = list(next(iter(results.values())))
        for n, (ax, (title, probes)) in enumerate(zip(axes, results.items(), strict=True)):
            draw_probes(ax, probes, LIGHT)
            if n and list(probes) == first:
                ax.set_yticklabels([""] * len(probes))
            ax.set_title(title, loc="left", fontsize=FONT_SIZE + 1.5, fontweight="bold", color=LIGHT["ink"])
        below = {"color": LIGHT["muted"], "fontsize": FONT_SIZE - 0.5}
        figure.supxlabel("linear probe accuracy in %, with 95 % intervals", **below)
        figure.savefig(path, dpi=200, facecolor=LIGHT["paper"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    names = [f"{m}-{q}" for m in ("image", "video", "audio") for q in ("vq", "rq")]
    runs = [read_run(arguments.demo / name) for name in names]
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(probes_by_title(runs), arguments.out / "demo.png")
    print(markdown(runs))


if __name__ == "__main__":
    main()
