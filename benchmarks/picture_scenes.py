"""Write generated pictures (.png, 64×64) or clips (.mp4, 16 frames), as varied as can be, without classes.

    python benchmarks/picture_scenes.py OUT [--clips] [--count 3000] [--seed 0]

A scene is a background and up to 30 shapes in front of each other: drawn outlines, sizes, colours, textures, light,
blur and noise. In a clip the camera and the shapes move, turn and grow, each at its own rate; some rest. Everything is
drawn; nothing is photographed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

sys.path.insert(0, str(Path(__file__).parent / "sets"))
from drawing import Array, clouds, to_bytes, two_colours
from textures import PATTERNS

SIZE, FINE, FRAMES, RATE = 64, 2, 16, 16  # shapes are drawn FINE times as large
TEXTURES = [draw for name, draw in PATTERNS.items() if name != "clouds"]  # clouds have a size of their own


def surface(size: int, draws: np.random.Generator) -> Array:
    """Colours (size, size, 3) of a shape or a background: plain, clouded or textured, and shaded to one side."""
    kind, y_x = draws.uniform(), np.mgrid[:size, :size]
    if kind < 0.3:
        field = np.full((size, size), 0.5)
    elif kind < 0.65:
        field = clouds(size, FINE * 10 ** draws.uniform(0, 1), draws)
    else:
        angle, period = draws.uniform(0, 2 * np.pi), FINE * 10 ** draws.uniform(0.5, 1.2)
        y, x = y_x / period
        u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        field = TEXTURES[draws.integers(len(TEXTURES))](u, v, draws) * 1.0
        field = (field - field.min()) / (np.ptp(field) + 1e-9)
    angle, fall = draws.uniform(0, 2 * np.pi), draws.uniform(0, 0.6)
    light = 1 + fall * (np.array([np.sin(angle), np.cos(angle)]) @ (y_x / size - 0.5).reshape(2, -1)).reshape(
        size, size
    )
    return two_colours(field, draws.uniform(0.05, 0.7), draws) * light[..., None]


def outline(draws: np.random.Generator) -> Array:
    """Corners (n, 2) of a drawn shape around 0, at most 1 from it: a polygon, a star, or a smooth blob."""
    kind = draws.integers(3)
    if kind < 2:
        corners = draws.integers(3, 9) * (1 + kind)
        radii = draws.uniform(0.6, 1, corners)
        radii[1::2] *= 1 if kind == 0 else draws.uniform(0.3, 0.9)
        angles = 2 * np.pi * (np.arange(corners) + draws.uniform(-0.2, 0.2, corners)) / corners
    else:
        angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
        radii = 1 + sum(draws.normal(0, 0.25 / n) * np.cos(n * angles + draws.uniform(0, 7)) for n in range(2, 6))
        radii = np.abs(radii) / np.abs(radii).max()
    stretch = draws.uniform(0.35, 1)
    return np.stack([radii * np.cos(angles), stretch * radii * np.sin(angles)], 1)


def shape(radius: int, draws: np.random.Generator) -> Image.Image:
    """A shape on a transparent square of 2 × radius pixels."""
    mask = Image.new("L", (2 * radius, 2 * radius))
    ImageDraw.Draw(mask).polygon([tuple(point) for point in radius * (1 + outline(draws))], fill=255)
    found = Image.fromarray(to_bytes(surface(2 * radius, draws)))
    found.putalpha(mask)
    return found


def scene(frames: int, draws: np.random.Generator) -> Array:
    """(frames, 64, 64, 3)."""
    full = FINE * SIZE
    count = int(30 ** draws.uniform())
    ground = Image.fromarray(to_bytes(surface(2 * full, draws))).convert("RGBA")
    sizes = full * 10 ** draws.uniform(-1.4, -0.45, count) * (1.5 if count < 4 else 1.0)  # radii
    shapes = [ground, *(shape(int(radius) + 2, draws) for radius in sizes)]
    moves = draws.uniform(size=(count + 1, 1)) < 0.7
    moves[0] = False
    rates = moves * draws.normal(size=(count + 1, 4)) * [1.2 * FINE, 1.2 * FINE, 4, 0.02]  # x, y, degrees, log size
    if draws.uniform() < 0.5:  # the camera
        rates = rates + draws.normal(size=4) * [0.5 * FINE, 0.5 * FINE, 0, 0.008]
    starts = np.concatenate([draws.uniform(0, full, (count + 1, 2)), draws.uniform(0, 360, (count + 1, 1))], 1)
    starts[0] = full / 2, full / 2, 0
    shown = [picture(shapes, starts, rates * (frame - frames // 2)) for frame in range(frames)]
    blur, noise = draws.uniform(0, 0.7), draws.uniform(0, 0.04)
    smooth = gaussian_filter(np.stack(shown) / 255, (0, blur, blur, 0))
    return smooth + draws.normal(0, noise, smooth.shape)


def picture(shapes: list[Image.Image], starts: Array, moved: Array) -> Array:
    """One frame (64, 64, 3), 0 … 255: the shapes, the first at the back, moved from where they start."""
    canvas = Image.new("RGBA", (FINE * SIZE, FINE * SIZE))
    for one, (x, y, turn), (dx, dy, dturn, growth) in zip(shapes, starts, moved, strict=True):
        size = max(2, round(one.width * float(np.exp(growth))))
        placed = one.resize((size, size), Image.Resampling.BILINEAR).rotate(turn + dturn, Image.Resampling.BILINEAR)
        canvas.paste(placed, (round(x + dx - size / 2), round(y + dy - size / 2)), placed)
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX), dtype=np.float64)


def write_clip(path: Path, frames: Array) -> None:
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.bit_rate = SIZE, SIZE, 1_500_000
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
        for frame in to_bytes(frames):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        file.mux(stream.encode())


def write(out: Path, *, clips: bool, count: int, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        frames = scene(FRAMES if clips else 1, np.random.default_rng([seed, i]))
        if clips:
            write_clip(out / f"{i:05}.mp4", frames)
        else:
            Image.fromarray(to_bytes(frames[0])).save(out / f"{i:05}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", action="store_true")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.out, clips=given.clips, count=given.count, seed=given.seed)
