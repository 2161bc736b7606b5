"""Draw probe accuracy against CPU minutes, a panel for each folder that `bridle ablate … --table evidence` wrote.

python benchmarks/features_per_minute.py benchmarks/evidence/esc50-tiny benchmarks/evidence/cifar10-tiny

Lines are means over seeds, bands their range. Also prints when each row passes the last point of "patches".
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from bridle.report.curves import Point, averaged, draw_lines
from bridle.report.svg import FONT_SIZE, LIGHT, MARGIN, drawing

TITLES = {"esc50-tiny": "ESC-50, linear probe", "cifar10-tiny": "CIFAR-10, linear probe"}
NAMES = {"RQ 4 x 256": "RQ 4 × 256", "VQ 1 x 1024": "VQ 1 × 1024", "patches": "patches (MAE)"}
Line = list[tuple[float, float, float, float]]  # minutes, mean, least, most


def read_lines(path: Path) -> dict[str, Line]:
    """The mean over seeds of every row of a curves.csv."""
    found: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["cpu_minutes"]:
                continue  # a run whose costs were not kept
            point = Point(int(row["iteration"]), int(row["step"]), float(row["cpu_minutes"]), float(row["score"]))
            found[NAMES.get(row["row"], row["row"])][row["seed"]].append(point)
    return {name: averaged(list(seeds.values())) for name, seeds in found.items()}


def passed(line: Line, wanted: float) -> float | None:
    """Minutes, between two points by interpolation, at which a line first reaches a score."""
    if line and line[0][1] >= wanted:
        return line[0][0]
    for (t0, before, *_), (t1, after, *_) in pairwise(line):
        if after >= wanted:
            return t0 + (t1 - t0) * max(0.0, wanted - before) / (after - before) if after > before else t1
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/features-per-minute.png"))
    arguments = parser.parse_args()
    with drawing((4.3 * len(arguments.tables), 3.3), LIGHT, margin=MARGIN) as figure:
        axes = figure.subplots(1, len(arguments.tables), squeeze=False)[0]
        for ax, table in zip(axes, arguments.tables, strict=True):
            lines = read_lines(table / "curves.csv")
            draw_lines(ax, lines, LIGHT)
            place = {"transform": ax.transAxes, "ha": "right", "va": "bottom"}  # above the axes stands the legend
            ax.text(0.98, 0.04, TITLES.get(table.name, table.name), fontsize=FONT_SIZE + 0.5, **place)
            regression = lines.get(NAMES["patches"])
            if not regression:
                raise SystemExit(
                    f"{table / 'curves.csv'} has no points of the row 'patches'; run the table to its end."
                )
            end, wanted = regression[-1][:2]
            print(f"{table.name}: patches end at {100 * wanted:.1f} % after {end:.2f} CPU minutes")
            for name, line in lines.items():
                minutes = passed(line, wanted)
                told = (
                    "never" if minutes is None else f"after {minutes:.2f} CPU minutes, {minutes / end:.2f} of its time"
                )
                print(f"  {name} passes that {told}; ends at {100 * line[-1][1]:.1f} %")
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.out, dpi=200, facecolor=LIGHT["paper"])
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
