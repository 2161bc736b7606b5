"""Draw the README's first figure from a run of the demo on pictures: what goes in, what comes out, what it is worth.

    bridle demo --out demo
    python benchmarks/first_figure.py --demo demo [--out docs/figures/first.png]

Left: test pictures, their codes, what is decoded from them, and the most similar other test picture by features.
Right: accuracy with five and with ten labels per class, with 95 % intervals over draws of the labels.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bridle
from bridle.data.build import open_data
from bridle.grid.demo import JUDGED, Story, demo_arguments
from bridle.report.plots import draw_probes
from bridle.report.sample_pictures import code_colors
from bridle.report.svg import FONT_SIZE, LIGHT, MARGIN, drawing
from bridle.report.tables import models_of
from bridle.runs.folder import RunFolder
from bridle.runs.results import Scores

ROWS, MODALITY = 4, "image"


def columns(folder: Path) -> dict[str, Tensor]:
    """Pictures (ROWS, height, width) or in colour (…, 3) by the heading of their column."""
    model, splits = bridle.load(folder), open_data(RunFolder(folder).config())
    assert splits.test is not None
    x = torch.stack([splits.test.load(n, None).x for n in range(len(splits.test))])  # (N, 1, H, W)
    labels = torch.tensor(splits.test.labels)
    features = torch.nn.functional.normalize(model.encode(x, pool="probe").flatten(1) * 1.0)
    features = torch.nn.functional.normalize(features - features.mean(0))
    rows = torch.tensor([int((labels == label).nonzero()[0]) for label in (0, 3, 5, 7)[:ROWS]])  # of several classes
    similar = features[rows] @ features.T
    similar[torch.arange(len(rows)), rows] = -1
    codes = model.tokenize(x[rows])  # (ROWS, T, M)
    colors = code_colors(model.tokenizer.quantizer.code_vectors()[0])[codes[..., 0].numpy()]  # (ROWS, T, 3)
    stages = codes.shape[2]
    return {
        "picture": x[rows, 0],
        "codes, stage 1": torch.from_numpy(colors.reshape(len(rows), *model.geometry.grid, -1)),
        "decoded, 1 stage": model.decode_to_input(codes[..., :1], stages=1)[:, 0],
        f"decoded, {stages} stages": model.decode_to_input(codes)[:, 0],
        "most similar": x[similar.argmax(1), 0],
    }


def bars(out: Path) -> dict[int, dict[str, Scores]]:
    """Accuracy by labels per class and name, the names as in the demo's table."""
    methods = [method for method in demo_arguments(MODALITY, seed=0) if (out / f"{MODALITY}-{method}").is_dir()]
    story = Story(MODALITY, out, methods, 1)
    runs = story.runs()
    found = {**runs[-1].results.named_baselines, "from scratch": story.from_scratch}
    found |= {name: entry.probe or Scores() for run in runs for name, entry in models_of(run.results)}
    return {
        n: {
            name.removesuffix(" iter1"): Scores(accuracy=one.value, interval=one.interval)
            for name, scores in found.items()
            if (one := scores.few_shot.get(n)) is not None
        }
        for n in JUDGED
    }


def show(axes: Any, found: dict[str, Tensor]) -> None:
    """A grid of pictures, one column for each heading."""
    for column, (heading, pictures) in enumerate(found.items()):
        for row, picture in enumerate(pictures):
            ax = axes[row][column]
            gray = {"cmap": "gray", "vmin": 0, "vmax": 1} if picture.ndim == 2 else {}
            ax.imshow(np.asarray(picture), interpolation="nearest", **gray)
            ax.set_axis_off()
        axes[0][column].set_title(heading, fontsize=FONT_SIZE - 1, color=LIGHT["muted"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures/first.png"))
    arguments = parser.parse_args()
    found, probes = columns(arguments.demo / f"{MODALITY}-rq"), bars(arguments.demo)
    with drawing((9.6, 3.6), LIGHT, margin=0.02) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=(1.5, 1), wspace=0.04)
        show(left.subplots(ROWS, len(found)), found)
        plots = right.subplots(len(probes), 1)
        for ax, (labels, scores) in zip(plots, probes.items(), strict=True):
            draw_probes(ax, {name.replace("RQ", "RQ iter"): one for name, one in scores.items()}, LIGHT)
            ax.set_yticklabels(list(scores))
            title = {"fontsize": FONT_SIZE - 1, "color": LIGHT["muted"], "loc": "left"}
            ax.set_title(f"accuracy with {labels} labels per class, %", **title)
        widest = max(ax.get_xlim()[1] for ax in plots)
        for ax in plots:  # one scale, so that bars can be compared
            ax.set_xlim(0, widest)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(arguments.out, dpi=160, facecolor=LIGHT["paper"], bbox_inches="tight", pad_inches=MARGIN)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
