"""Ten woven, tiled and printed patterns on crops of photographs, in uneven light; and clips of how a pattern changes.

    pictures  the label is the pattern: stripes, waves, zigzag, checks, grid, dots, rings, bricks, weave, dashes
    clips     the pattern is any; the label is its course: drift, swing, jerk, turn, zoom, pulse, flicker, ripple

Random for each item: photograph and crop, period, slant, place, bend and contrast of the pattern, level and shading of
the light; for clips also direction and speed. So no pixel tells the label, and most of what varies is not the label.
The photographs are the two that scikit-learn ships; test items show other parts of them than training items.
Shapes: (n, 1, 1, 1) for parameters, (n, frames, size, size) for patterns; pictures have one frame.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import pi

import torch
from torch import Tensor, nn

from bridle.errors import needs

PERIOD = (6.0, 10.0)  # pixels
SLANT = 0.1  # radians either way
CONTRAST = (0.15, 0.6)  # of the pattern against the photograph
LEVEL = (0.4, 1.2)  # of the light
BEND = 0.4  # pixels
SPEED = (0.5, 1.2)  # pixels per frame
BEATS = (0.12, 0.25)  # per frame
SHADING = 1.0  # the light falls off by up to e^±1 across a picture
TRAIN_PART = 0.7  # of every photograph's width

Pattern = Callable[[Tensor, Tensor], Tensor]  # coordinates in periods -> -1 … 1


def wave(u: Tensor) -> Tensor:
    return torch.sin(2 * pi * u)


def triangle(u: Tensor) -> Tensor:
    return (u % 1 - 0.5).abs() * 4 - 1


def marked(where: Tensor) -> Tensor:
    return where.float() * 2 - 1


def off(u: Tensor) -> Tensor:
    """Distance from the middle of a cell."""
    return (u % 1 - 0.5).abs()


PATTERNS: dict[str, Pattern] = {
    "stripes": lambda u, v: wave(u),
    "waves": lambda u, v: wave(u + 0.35 * wave(v / 2)),
    "zigzag": lambda u, v: wave(u + 0.35 * triangle(v / 1.5)),
    "checks": lambda u, v: torch.tanh(6 * wave(u / 2) * wave(v / 2)),
    "grid": lambda u, v: marked(torch.maximum(off(u), off(v)) > 0.36),
    "dots": lambda u, v: marked(torch.hypot(off(u + v.floor() / 2), off(v)) < 0.3),
    "rings": lambda u, v: wave(3.2 * torch.hypot(off(u / 2), off(v / 2))),
    "bricks": lambda u, v: marked((off(u / 2 + v.floor() / 2) > 0.42) | (off(v) > 0.36)),
    "weave": lambda u, v: 2 * torch.sin(pi * torch.where((u.floor() + v.floor()) % 2 > 0, u % 1, v % 1)) - 1,
    "dashes": lambda u, v: marked((off(v) < 0.2) & ((u / 2 + v.floor() * 0.37) % 1 < 0.6)),
}
COURSES = ("drift", "swing", "jerk", "turn", "zoom", "pulse", "flicker", "ripple")


@lru_cache(maxsize=1)
def photographs() -> Tensor:
    """scikit-learn's two photographs in grey (2, 1, height, width), half as large."""
    with needs("train"):
        from sklearn.datasets import load_sample_images

    grey = torch.stack([torch.tensor(image).float().mean(-1) / 255 for image in load_sample_images().images])
    return nn.functional.avg_pool2d(grey[:, None], 2)


class Scenes:
    """Random photographs, light and places for n items of a split, all from one generator."""

    def __init__(self, n: int, *, size: int, split: str, randomness: torch.Generator) -> None:
        self.n, self.size, self.split, self.randomness = n, size, split, randomness
        line = torch.arange(size) - (size - 1) / 2  # pixels from the middle
        self.x, self.y = line.expand(size, size), line[:, None].expand(size, size)

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.n, 1, 1, 1, generator=self.randomness)  # (n, 1, 1, 1)

    def photograph(self) -> Tensor:
        """Crops (n, 1, size, size) with mean 0.5, at half to twice the photographs' scale."""
        whole = photographs()
        edge = int(TRAIN_PART * whole.shape[-1])
        part = whole[..., :edge] if self.split == "train" else whole[..., edge:]
        pixels = torch.tensor([part.shape[-1], part.shape[-2]])
        zoom = self.uniform(0.5, 2.0)
        room = 1 - zoom * self.size / pixels  # (n, 1, 1, 2), of half the photograph
        centre = room * torch.cat([self.uniform(-1, 1), self.uniform(-1, 1)], dim=-1)
        grid = centre + torch.stack([self.x, self.y], dim=-1) * zoom * 2 / pixels  # (n, size, size, 2)
        crops = torch.empty(self.n, 1, self.size, self.size)
        which = torch.randint(len(part), (self.n,), generator=self.randomness)
        for photo in range(len(part)):
            rows = which == photo
            tall = grid[rows].reshape(1, -1, self.size, 2)  # one crop above the other
            crops[rows] = nn.functional.grid_sample(part[photo, None], tall, align_corners=False).view_as(crops[rows])
        return (0.5 + crops - crops.mean(dim=(2, 3), keepdim=True)).clamp(0.05, 0.95)

    def light(self) -> Tensor:
        """Light (n, 1, size, size) of a random level that falls off in a random direction."""
        angle, fall = self.uniform(0, 2 * pi), self.uniform(0, SHADING)
        across = (angle.cos() * self.x + angle.sin() * self.y) * 2 / self.size
        return self.uniform(*LEVEL) * torch.exp(fall * across)

    def shown(self, pattern: Tensor) -> Tensor:
        """A pattern (n, frames, size, size) in -1 … 1 printed on photographs, in 0 … 1."""
        return (self.photograph() * self.light() * (1 + self.uniform(*CONTRAST) * pattern)).clamp(0, 1)

    def turned(self, x: Tensor, y: Tensor, angle: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates of the pattern at pixels x, y, from a random place on."""
        u = (angle.cos() * x + angle.sin() * y) * scale + self.uniform(0, 20)
        v = (angle.cos() * y - angle.sin() * x) * scale + self.uniform(0, 20)
        return u, v


def pattern_pictures(n: int, *, size: int, split: str, randomness: torch.Generator) -> Tensor:
    """Pictures (n, 1, size, size); picture i shows pattern i mod 10."""
    scenes = Scenes(n, size=size, split=split, randomness=randomness)
    x = scenes.x + BEND * torch.sin(scenes.y / 5 + scenes.uniform(0, 2 * pi))
    y = scenes.y + BEND * torch.sin(scenes.x / 5 + scenes.uniform(0, 2 * pi))
    u, v = scenes.turned(x, y, scenes.uniform(-SLANT, SLANT), 1 / scenes.uniform(*PERIOD))
    return scenes.shown(drawn(u, v, torch.arange(n) % len(PATTERNS)))


def drawn(u: Tensor, v: Tensor, which: Tensor) -> Tensor:
    """The pattern `which` (n,) of each item at coordinates u, v (n, frames, size, size)."""
    found = torch.empty(u.shape)
    for number, pattern in enumerate(PATTERNS.values()):
        rows = which == number
        found[rows] = pattern(u[rows], v[rows])
    return found


def pattern_clips(n: int, *, frames: int, size: int, split: str, randomness: torch.Generator) -> Tensor:
    """Clips (n, 1, frames, size, size) of any pattern; clip i takes course i mod 8."""
    scenes = Scenes(n, size=size, split=split, randomness=randomness)
    time = torch.arange(frames)[:, None, None]
    label = (torch.arange(n) % len(COURSES))[:, None, None, None]
    course = {name: (label == number).float() for number, name in enumerate(COURSES)}
    speed, beat = scenes.uniform(*SPEED), scenes.uniform(0, 1) + scenes.uniform(*BEATS) * time  # beats since it began
    steps = (time / 4 + beat[:, :1]).floor()  # one every four frames
    way = speed * (course["drift"] * time + course["swing"] * 3 * wave(beat) + course["jerk"] * 4 * steps)
    heading, sense = scenes.uniform(0, 2 * pi), torch.sign(scenes.uniform(-1, 1))
    angle = scenes.uniform(0, 2 * pi) + course["turn"] * sense * 0.06 * (1 + speed) * time
    scale = torch.exp(course["zoom"] * sense * 0.035 * (1 + speed) * (time - frames / 2)) / scenes.uniform(*PERIOD)
    u, v = scenes.turned(scenes.x - way * heading.cos(), scenes.y - way * heading.sin(), angle, scale)
    u = u + course["ripple"] * 0.45 * wave(beat + scenes.y / 12)
    dark = (torch.rand(n, frames, 1, 1, generator=randomness) < 0.5).float()
    strength = 1 - course["pulse"] * (0.5 + 0.5 * wave(beat)) - course["flicker"] * dark
    which = torch.randint(len(PATTERNS), (n,), generator=randomness)
    return scenes.shown(strength * drawn(u, v, which))[:, None]
