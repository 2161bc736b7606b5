"""Moving shapes: 10 motions as clips of 16 frames of 48×48 at 16 frames a second, .mp4.

Shape, size, colours, start, speed, a second shape at rest, background and noise are drawn and say nothing about the
class. The test part has other shapes, other speeds and rectangles instead of clouds as background.
"""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
from drawing import Array, boxes, clouds, items, to_bytes, two_colours
from PIL import Image, ImageDraw

SIZE, FRAMES, FINE = 48, 16, 4
MOTIONS = ["left", "right", "up", "down", "clockwise", "anticlockwise", "grow", "shrink", "shake", "bounce"]
SHAPES = {"train": ["square", "circle", "triangle", "star"], "test": ["cross", "pentagon", "ring", "bar"]}
SPEEDS = {"train": ((0.8, 1.3),), "test": ((0.6, 0.8), (1.3, 1.6))}
COUNTS = {"train": 60, "test": 30}


def path_of(motion: str, speed: float, draws: np.random.Generator) -> Array:
    """Centre and radius (16, 3) of the shape in every frame, in pixels."""
    t = np.linspace(-0.5, 0.5, FRAMES) * speed
    x, y, r = np.zeros(FRAMES), np.zeros(FRAMES), np.full(FRAMES, draws.uniform(5, 8))
    if motion in ("left", "right"):
        x = 22 * t * (1 if motion == "right" else -1)
    elif motion in ("up", "down"):
        y = 22 * t * (1 if motion == "down" else -1)
    elif motion in ("clockwise", "anticlockwise"):
        angle = 5 * t * (1 if motion == "clockwise" else -1) + draws.uniform(0, 2 * np.pi)
        x, y = 9 * np.cos(angle), 9 * np.sin(angle)
    elif motion in ("grow", "shrink"):
        r = r * np.exp(0.9 * t * (1 if motion == "grow" else -1))
    elif motion == "shake":
        x = 4 * np.sin(16 * t + draws.uniform(0, 2 * np.pi))
    else:
        y = 10 - 16 * np.abs(np.sin(5 * t + draws.uniform(0, np.pi)))
    centre = SIZE / 2 + draws.uniform(-8, 8, 2)
    return np.stack([x + centre[0], y + centre[1], r], 1)


def coverage(shape: str, x: float, y: float, r: float, tilt: float) -> Array:
    """Where a shape is: (48, 48) between 0 and 1."""
    drawn = Image.new("L", (SIZE * FINE, SIZE * FINE))
    draw, (x, y, r) = ImageDraw.Draw(drawn), (FINE * n for n in (x, y, r))
    around = (x - r, y - r, x + r, y + r)
    if shape in ("circle", "ring"):
        draw.ellipse(around, fill=255 if shape == "circle" else None, outline=255, width=int(r / 2))
    else:
        corners = {"square": 4, "triangle": 3, "pentagon": 5, "star": 10, "cross": 12, "bar": 4}[shape]
        angles = tilt + 2 * np.pi * np.arange(corners) / corners
        radii = np.full(corners, r)
        if shape == "star":
            radii[1::2] *= 0.45
        if shape == "cross":
            radii[::3] *= 0.4
        if shape == "bar":
            angles += np.array([0.5, -0.5, 0.5, -0.5])
        draw.polygon([(x + q * np.cos(a), y + q * np.sin(a)) for q, a in zip(radii, angles, strict=True)], fill=255)
    return np.asarray(drawn.resize((SIZE, SIZE), Image.Resampling.BOX)) / 255


def clip(kind: int, split: str, draws: np.random.Generator) -> Array:
    """One clip (16, 48, 48, 3)."""
    kinds, speeds = SHAPES[split], SPEEDS[split]
    path = path_of(MOTIONS[kind], draws.uniform(*speeds[draws.integers(len(speeds))]), draws)
    shape, other, tilt = draws.choice(kinds), draws.choice(kinds), draws.uniform(0, 2 * np.pi, 2)
    ground = clouds(SIZE, 5, draws) if split == "train" else boxes(SIZE, draws)
    still = two_colours(ground, 0.4, draws)
    rest = coverage(other, *draws.uniform(6, SIZE - 6, 2), draws.uniform(4, 7), tilt[1])[..., None]
    still = still * (1 - rest) + draws.uniform(0, 1, 3) * rest
    light = still.mean() < 0.5  # the moving shape is seen on its background
    colour = np.clip((0.9 if light else 0.1) + draws.normal(0, 0.15, 3), 0, 1)
    masks = np.stack([coverage(shape, *row, tilt[0]) for row in path])[..., None]
    frames = still * (1 - masks) + colour * masks
    return frames + draws.normal(0, draws.uniform(0.01, 0.05), frames.shape)


def write(root: Path, share: float) -> None:
    for split, kind, path, draws in items(root, MOTIONS, COUNTS, share):
        with av.open(str(path.with_suffix(".mp4")), "w") as file:
            stream = file.add_stream("mpeg4", rate=FRAMES)
            stream.width, stream.height, stream.bit_rate = SIZE, SIZE, 600_000
            stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", 1
            for picture in to_bytes(clip(kind, split, draws)):
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            file.mux(stream.encode())
