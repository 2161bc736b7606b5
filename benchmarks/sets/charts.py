"""Charts: 12 kinds of plots by matplotlib, colour pictures of 64×64, .png.

Data, colours, line widths, style sheet, margins and ticks are drawn. The style sheets of the test part are not seen in
training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from drawing import Array, clouds, items
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from PIL import Image

SIZE = 64
STYLES = {
    "train": ["default", "ggplot", "bmh", "grayscale", "seaborn-v0_8-pastel", "Solarize_Light2"],
    "test": ["dark_background", "fivethirtyeight", "seaborn-v0_8-dark", "classic"],
}
COUNTS = {"train": 80, "test": 30}


def walk(draws: np.random.Generator, n: int) -> Array:
    return np.cumsum(draws.normal(size=n))


def pie(axes: Any, draws: np.random.Generator) -> None:
    axes.pie(
        draws.uniform(0.2, 1, draws.integers(3, 8)), startangle=draws.uniform(0, 360), radius=draws.uniform(0.7, 1.2)
    )


def lines(axes: Any, draws: np.random.Generator) -> None:
    for _ in range(draws.integers(1, 4)):
        axes.plot(walk(draws, 40))


def hexes(axes: Any, draws: np.random.Generator) -> None:
    spread = draws.normal(size=(2, 2))
    axes.hexbin(*(spread @ draws.normal(size=(2, 400))), gridsize=int(draws.integers(8, 14)), mincnt=1)


def arrows(axes: Any, draws: np.random.Generator) -> None:
    n = int(draws.integers(5, 9))
    angle = 3 * clouds(n, 1.5, draws) + draws.uniform(0, 7)
    colour = mpl.rcParams["text.color"]
    axes.quiver(np.cos(angle), np.sin(angle), scale=n, width=0.025, pivot="mid", color=colour)


def boxes(axes: Any, draws: np.random.Generator) -> None:
    axes.boxplot([draws.normal(draws.normal(), draws.uniform(0.3, 1.5), 40) for _ in range(draws.integers(3, 7))])


def surface(axes: Any, draws: np.random.Generator) -> None:
    axes.contourf(clouds(24, draws.uniform(2, 4), draws), levels=int(draws.integers(5, 9)))


CHARTS: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "area": lambda axes, draws: axes.stackplot(np.arange(20), np.exp(0.3 * draws.normal(size=(3, 20)).cumsum(1))),
    "bars": lambda axes, draws: axes.bar(np.arange(n := draws.integers(4, 12)), draws.uniform(0.2, 1, n)),
    "boxplot": boxes,
    "contours": lambda axes, draws: axes.contour(
        clouds(24, draws.uniform(2, 4), draws), levels=int(draws.integers(5, 9))
    ),
    "filled-contours": surface,
    "heatmap": lambda axes, draws: axes.imshow(draws.uniform(size=draws.integers(4, 10, 2)), aspect="auto"),
    "hexbin": hexes,
    "horizontal-bars": lambda axes, draws: axes.barh(np.arange(n := draws.integers(4, 12)), draws.uniform(0.2, 1, n)),
    "lines": lines,
    "pie": pie,
    "quiver": arrows,
    "scatter": lambda axes, draws: axes.scatter(
        *draws.normal(size=(2, draws.integers(15, 60))), s=draws.uniform(4, 20)
    ),
}


def chart(kind: int, split: str, draws: np.random.Generator) -> Image.Image:
    """One picture (64, 64)."""
    with context([str(draws.choice(STYLES[split])), {"font.size": 4, "figure.dpi": SIZE, "lines.linewidth": 1.0}]):
        mpl.rcParams["lines.linewidth"] = draws.uniform(0.6, 2)
        mpl.rcParams["image.cmap"] = draws.choice(["viridis", "magma", "Greys", "coolwarm", "YlGnBu"])
        figure = Figure(figsize=(1, 1))
        low, high = draws.uniform(0.05, 0.25, 2), draws.uniform(0.75, 0.95, 2)
        axes = figure.add_axes((*low, *(high - low)))
        if draws.uniform() < 0.5:
            axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
        list(CHARTS.values())[kind](axes, draws)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def write(root: Path, share: float) -> None:
    for split, kind, path, draws in items(root, list(CHARTS), COUNTS, share):
        chart(kind, split, draws).save(path.with_suffix(".png"))
