"""Small icons: 16 symbols as colour pictures of 32×32, .png.

Position, size, rotation, colours (dark on light or light on dark), background and noise are drawn. In the test part
symbols are smaller or larger and turned further, on rectangles instead of clouds.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from drawing import Array, boxes, clouds, items, to_bytes, two_colours
from PIL import Image, ImageDraw, ImageFont

SIZE = 32
SYMBOLS = {
    **{"sun": "☀", "cloud": "☁", "umbrella": "☂", "star": "★", "phone": "☎", "skull": "☠", "peace": "☮", "smile": "☺"},
    **{
        "knight": "♞",
        "club": "♣",
        "notes": "♫",
        "flag": "⚑",
        "anchor": "⚓",
        "scissors": "✂",
        "plane": "✈",
        "letter": "✉",
    },
}
FONT = Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
COUNTS = {"train": 100, "test": 40}


def mask(symbol: str, side: float, angle: float, draws: np.random.Generator) -> Array:
    """Coverage (32, 32) of a symbol whose longer side has `side` pixels, at a drawn place."""
    drawn = Image.new("L", (256, 256))
    ImageDraw.Draw(drawn).text((128, 128), symbol, 255, ImageFont.truetype(FONT, 150), anchor="mm")
    turned = drawn.rotate(angle, Image.Resampling.BICUBIC)
    turned = turned.crop(turned.getbbox())
    ratio = side / max(turned.size)
    small = turned.resize([max(1, round(ratio * n)) for n in turned.size], Image.Resampling.LANCZOS)
    place = Image.new("L", (SIZE, SIZE))
    place.paste(small, tuple(int(draws.integers(0, SIZE - n + 1)) for n in small.size))
    return np.asarray(place) / 255


def icon(kind: int, split: str, draws: np.random.Generator) -> Array:
    """One picture (32, 32, 3)."""
    if split == "train":
        side, angle, ground = draws.uniform(16, 24), draws.uniform(-15, 15), clouds(SIZE, 4, draws)
    else:
        side = draws.uniform(*((13, 16), (24, 28))[draws.integers(2)])
        angle, ground = draws.choice([-1, 1]) * draws.uniform(15, 25), boxes(SIZE, draws)
    shape = mask(list(SYMBOLS.values())[kind], side, angle, draws)[..., None]
    levels = (0.3, 0.85) if draws.uniform() < 0.5 else (0.7, 0.15)
    behind = levels[0] + 0.4 * (two_colours(ground, 0.5, draws) - 0.5)
    front = np.clip(levels[1] + draws.normal(0, 0.15, 3), 0, 1)
    picture = behind * (1 - shape) + front * shape
    return picture + draws.normal(0, draws.uniform(0.02, 0.08), picture.shape)


def write(root: Path, share: float) -> None:
    for split, kind, path, draws in items(root, list(SYMBOLS), COUNTS, share):
        Image.fromarray(to_bytes(icon(kind, split, draws))).save(path.with_suffix(".png"))
