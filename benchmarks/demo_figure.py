"""Draw the demo's figure and print its table for docs/results.md, from what `bridle demo` wrote with several seeds.

    for seed in 0 1 2; do bridle demo --seed $seed --out demo-$seed; done
    python benchmarks/demo_figure.py --demo demo-0 demo-1 demo-2 [--out docs/figures]

Mean and sample standard deviation over seeds; in brackets the gain of RQ over a row, paired by seed, with half of
Student's 95 % interval. The figure shows ten labels a class, with the lowest and the highest seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from bridle.evaluate.significance import compare
from bridle.grid.demo import MODALITIES, SHOTS
from bridle.report.plots import draw_probes
from bridle.report.runs import read_run
from bridle.report.svg import FONT_SIZE, LIGHT, MARGIN, drawing
from bridle.report.tables import models_of
from bridle.runs.results import Interval, Scores, read_results

DRAWN = 10  # labels a class
Row = dict[int | None, list[float]]  # for each number of labels (None: all) the accuracy of every seed


def rows_of(folders: Sequence[Path], modality: str) -> tuple[str, dict[str, Row]]:
    """The data's title, and the rows of its table: the baselines, VQ and RQ. Runs that are missing are left out."""
    title, rows = "", dict[str, Row]()
    for folder in folders:
        for method in ("rq", "vq"):  # baselines beside both: those of RQ count
            if not (folder / f"{modality}-{method}").is_dir():
                continue
            run = read_run(folder / f"{modality}-{method}")
            title = run.title
            found = {name: entry.probe for name, entry in models_of(run.results)}
            if method == "rq":
                found = {**run.results.named_baselines, **scratch_of(folder / f"{modality}-scratch"), **found}
            for name, scores in found.items():
                row = rows.setdefault(name.removesuffix(" iter1"), {})
                for n, one in (scores or Scores()).few_shot.items():
                    row.setdefault(n, []).append(one.value or 0.0)
                row.setdefault(None, []).append((scores or Scores()).main or 0.0)
    return title, {name: rows[name] for name in sorted(rows, key=lambda name: name == "RQ")}


def scratch_of(folder: Path) -> dict[str, Scores]:
    """Scores of the same network trained on the labels alone, where they were measured."""
    path = folder / "finetune.json"
    scores = read_results(path).evaluations[0].scores if path.is_file() else None
    return {} if scores is None else {"from scratch": scores}


def cell(own: list[float], best: list[float] | None) -> str:
    """Mean and spread over seeds, and what RQ gains over it on the same seeds."""
    text = f"{100 * mean(own):.1f}" + (f" ±{100 * stdev(own):.1f}" if len(own) > 1 else "")
    if best is None:
        return text
    return f"{text} ({compare(best[: len(own)], own)})"


def markdown(title: str, rows: dict[str, Row]) -> list[str]:
    """Lines of the table as docs/results.md shows it."""
    lines = []
    for name, row in rows.items():
        seeds = len(row[None])
        best = {} if name == "RQ" else rows["RQ"]
        cells = [cell(row[n], best.get(n)) if n in row else "–" for n in (*SHOTS, None)]
        lines.append(f"| {title} | {name}, {seeds} seeds | {' | '.join(cells)} |")
    return lines


def draw(panels: dict[str, dict[str, Row]], path: Path) -> None:
    """A PNG with one panel per data set."""
    shown = {
        title: {
            f"{name} iter" if name in ("VQ", "RQ") else name: Scores(
                accuracy=mean(row[DRAWN]), interval=Interval(min(row[DRAWN]), max(row[DRAWN]))
            )
            for name, row in rows.items()
        }
        for title, rows in panels.items()
    }
    with drawing((1.1 + 2.6 * len(shown), 2.2), LIGHT, margin=MARGIN) as figure:
        for n, (ax, (title, probes)) in enumerate(zip(figure.subplots(1, len(shown)), shown.items(), strict=True)):
            draw_probes(ax, probes, LIGHT)
            ax.set_yticklabels([""] * len(probes) if n else [name.removesuffix(" iter") for name in probes])
            ax.set_title(title, loc="left", fontsize=FONT_SIZE + 1.5, fontweight="bold", color=LIGHT["ink"])
        below = {"color": LIGHT["muted"], "fontsize": FONT_SIZE - 0.5}
        figure.supxlabel(f"accuracy in % with {DRAWN} labels a class; lines: lowest and highest seed", **below)
        figure.savefig(path, dpi=200, facecolor=LIGHT["paper"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, nargs="+", default=[Path("demo")], help="folders of one seed each")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    every = [rows_of(arguments.demo, modality) for modality in MODALITIES]
    panels = {title: rows for title, rows in every if "RQ" in rows}
    draw(panels, arguments.out / "demo.png")
    heads = [*(f"{n} label{'s' if n > 1 else ''}, %" for n in SHOTS), "all labels, %"]
    print(f"| data | features of | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 2)}")
    for title, rows in panels.items():
        print("\n".join(markdown(title, rows)))


if __name__ == "__main__":
    main()
