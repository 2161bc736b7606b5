"""Small data sets that come with the package, made in memory: `digits`, `moving_digits`, `patterns`, `moving_patterns`
and `sounds`.

Each is the same on every call and kept for the process. Test samples share no image and no drawn parameter with train.
Shapes: digits (1, 16, 16); patterns (1, 32, 32); moving digits (1, 8, 24, 24) and patterns (1, 12, 24, 24): frames,
height, width; sounds (1, 96, 64): frames, mels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bridle.data.arrays.memory import TensorSource
from bridle.data.audio.logmel import LogMel
from bridle.data.embedded.patterns import COURSES, PATTERNS, pattern_clips, pattern_pictures
from bridle.data.embedded.sounds import KINDS, RATE, make_sounds
from bridle.data.image.source import ImageReader
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.shards.tar_member import Location
from bridle.data.sources import Sound, Splits, Window
from bridle.errors import ConfigError, needs
from bridle.geometry import Geometry
from bridle.seeding import generator

POINTS = 8  # height and width of a scanned digit
DIGITS_TEST = 360  # of 1797 images; 1437 stay for training
SHIFT = 2  # pixels by which augmentation moves a digit, of 16

DIRECTIONS = ("east", "southeast", "south", "southwest", "west", "northwest", "north", "northeast")  # 45° apart
CLIPS = {"train": 2400, "test": 600}
FRAMES, FIELD = 8, 24
SPEED = (1.0, 2.5)  # pixels per frame

SCENES = {"train": 4000, "test": 600}  # pictures, and clips
PICTURE = 32
COURSE_FRAMES = 12

SOUNDS = {"train": 2000, "test": 500}
SOUND_FRAMES, MELS = 96, 64


class Pictures(NamedTuple):
    """Digit images (N, 16, 16) in [0, 1] and what they show (N,)."""

    x: Tensor
    label: Tensor


@lru_cache(maxsize=1)
def digit_pictures() -> dict[str, Pictures]:
    """scikit-learn's 1797 scanned digits of 8×8 points, enlarged to 16×16, split evenly in every class."""
    with needs("train"):
        from sklearn.datasets import load_digits

    loaded = load_digits()
    label = torch.from_numpy(loaded.target).long()
    x = enlarge(torch.from_numpy(loaded.images).float()[:, None] / 16)[:, 0]  # (N, 8, 8) -> (N, 16, 16)
    # Each image's place within its class, as a share of the class: the lowest 20 % of all are 20 % of every class.
    lot = torch.rand(len(x), generator=generator("digits", "split"))
    place = torch.empty(len(x), dtype=torch.float64)
    for digit in range(10):
        members = torch.nonzero(label == digit).flatten()
        place[members[lot[members].argsort()]] = (torch.arange(len(members)) + 0.5).double() / len(members)
    ranked = torch.argsort(place, stable=True)
    test, train = ranked[:DIGITS_TEST].sort().values, ranked[DIGITS_TEST:].sort().values
    return {name: Pictures(x[part], label[part]) for name, part in (("train", train), ("test", test))}


def enlarge(x: Tensor) -> Tensor:
    """Digits of 8×8 points (N, 1, 8, 8) in [0, 1] as the data set shows them: (N, 1, 16, 16)."""
    return nn.functional.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False).clamp(0, 1)


class DigitFrontEnd(nn.Module):
    """Digits of 8×8 points as the embedded ones are: enlarged to 16×16, light on dark.

    Dark ink on light paper is turned into its negative; which of the two it is, the picture's border tells.
    """

    size = (POINTS, POINTS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8, 8) -> (B, 16, 16)"""
        border = torch.cat([x[:, 0], x[:, -1], x[:, 1:-1, 0], x[:, 1:-1, -1]], dim=1)  # (B, 28)
        median = border.sort(dim=1).values[:, (border.shape[1] - 1) // 2]
        return enlarge(torch.where(median[:, None, None] > 0.5, 1 - x, x)[:, None])[:, 0]


class DigitReader:
    """A picture of one digit, of any size, as the embedded digits are."""

    extensions = ImageReader.extensions
    frame_seconds = None
    timed = False

    def __init__(self, *, geometry: Geometry) -> None:
        if geometry.shape != (1, 2 * POINTS, 2 * POINTS):
            raise ConfigError(f"geometry.input {list(geometry.input)} is not that of the embedded digits, [16, 16].")
        self.points, self.front = ImageReader(geometry=Geometry(1, DigitFrontEnd.size, (1, 1))), DigitFrontEnd()

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        """The one window of a picture."""
        for window in self.points.windows(path):
            yield window._replace(x=self.front(window.x))


@lru_cache(maxsize=1)
def digits() -> Splits:
    """Handwritten digits (1, 16, 16) in [0, 1]; the label is the digit. 1437 train, 360 test."""
    train, test = (
        TensorSource(
            x=part.x[:, None],
            labels=part.label.tolist(),
            classes=tuple(map(str, range(10))),
            augment=shift,
            name=f"digits {name}",
        )
        for name, part in digit_pictures().items()
    )
    return Splits(train=train, test=test)


def shift(x: Tensor, generator: torch.Generator) -> Tensor:
    """(C, H, W) moved by up to SHIFT pixels on both axes, black moving in."""
    top, left = torch.randint(2 * SHIFT + 1, (2,), generator=generator).tolist()
    padded = nn.functional.pad(x, (SHIFT, SHIFT, SHIFT, SHIFT))
    return padded[:, top : top + x.shape[1], left : left + x.shape[2]]


@lru_cache(maxsize=1)
def moving_digits() -> Splits:
    """Clips (1, 8, 24, 24) of a digit moving in one of eight directions, the label. 2400 train, 600 test.

    The field is a torus and the start is uniform on it, so that the digit's place at any time is uniform whatever the
    direction: no single frame tells it, only the change between frames does.
    """
    train, test = (
        TensorSource(
            x=moving_clips(part, count=CLIPS[name], randomness=generator("moving_digits", name)),
            labels=[i % 8 for i in range(CLIPS[name])],
            classes=DIRECTIONS,
            augment=roll_field,
            name=f"moving_digits {name}",
        )
        for name, part in digit_pictures().items()
    )
    return Splits(train=train, test=test)


def moving_clips(pictures: Pictures, *, count: int, randomness: torch.Generator) -> Tensor:
    """`count` clips (count, 1, 8, 24, 24); clip i moves in direction i mod 8."""
    shown = pictures.x[torch.randint(len(pictures.x), (count,), generator=randomness)]
    margin = FIELD - shown.shape[-1]
    field = nn.functional.pad(shown, (0, margin, 0, margin))  # (N, 24, 24)
    angle = torch.arange(count) % 8 * (pi / 4)
    heading = torch.stack([angle.sin(), angle.cos()], dim=1)  # (N, 2): down, right
    speed = SPEED[0] + (SPEED[1] - SPEED[0]) * torch.rand(count, 1, generator=randomness)
    start = FIELD * torch.rand(count, 2, generator=randomness)
    place = start[:, None] + torch.arange(FRAMES)[:, None] * (heading * speed)[:, None]  # (N, 8, 2)
    down, right = (moves(place[..., axis]) for axis in (0, 1))  # (N, 8, 24, 24)
    return (down @ field[:, None] @ right.transpose(-1, -2))[:, None]


def moves(offset: Tensor) -> Tensor:
    """Matrices (…, 24, 24) that move a line of 24 points by `offset` (…) around the edge, interpolating linearly."""
    there, here = torch.arange(FIELD)[:, None], torch.arange(FIELD)[None]
    distance = (there - here - offset[..., None, None]).remainder(FIELD)  # 0 … 24 on a circle
    return (1 - torch.minimum(distance, FIELD - distance)).clamp_min(0)


def roll_field(x: Tensor, generator: torch.Generator) -> Tensor:
    """(C, frames, H, W) moved on the torus by any whole number of pixels: an equally likely clip."""
    down, right = torch.randint(FIELD, (2,), generator=generator).tolist()
    return x.roll((down, right), dims=(-2, -1))


@lru_cache(maxsize=1)
def patterns() -> Splits:
    """Pictures (1, 32, 32) of ten patterns, the label, on photographs in uneven light. 4000 train, 600 test."""
    return _scenes("patterns", tuple(PATTERNS), lambda **options: pattern_pictures(size=PICTURE, **options))


@lru_cache(maxsize=1)
def moving_patterns() -> Splits:
    """Clips (1, 12, 24, 24) of such patterns; the label is how they change. 4000 train, 600 test."""
    return _scenes(
        "moving_patterns", COURSES, lambda **options: pattern_clips(frames=COURSE_FRAMES, size=FIELD, **options)
    )


def _scenes(name: str, classes: tuple[str, ...], make: Callable[..., Tensor]) -> Splits:
    """A data set whose item i is of class i mod K."""
    train, test = (
        TensorSource(
            x=make(n=count, split=split, randomness=generator(name, split)),
            labels=[i % len(classes) for i in range(count)],
            classes=classes,
            augment=mirror,
            name=f"{name} {split}",
        )
        for split, count in SCENES.items()
    )
    return Splits(train=train, test=test)


def mirror(x: Tensor, generator: torch.Generator) -> Tensor:
    """(C, …, W), left and right exchanged every other time."""
    return x.flip(-1) if torch.rand((), generator=generator) < 0.5 else x


class SoundSource(TensorSource):
    """The embedded sounds, which can also be heard: the waveforms are made again when one is asked for."""

    def __init__(self, *, split: str, **tensors: Any) -> None:
        super().__init__(**tensors)
        self.split = split

    def listen(self, index: int) -> Sound:
        """What sample `index` sounds like."""
        logmel, (row, kind) = LogMel(sample_rate=RATE, mels=MELS), divmod(index, len(KINDS))
        length = logmel.window + (SOUND_FRAMES - 1) * logmel.shift
        return Sound(waveforms(self.split)[kind][row, :length], RATE)


@lru_cache(maxsize=1)
def waveforms(split: str) -> list[Tensor]:
    """For each kind the waveforms (N/10, samples) of a split."""
    return list(make_sounds(SOUNDS[split], randomness=generator("sounds", split)))


@lru_cache(maxsize=1)
def sounds() -> Splits:
    """Log-mel features (1, 96, 64) of ten kinds of synthetic sounds in noise, see `synth`. 2000 train, 500 test."""
    logmel = LogMel(sample_rate=RATE, mels=MELS)
    splits = {}
    for name, count in SOUNDS.items():
        made = make_sounds(count, randomness=generator("sounds", name))  # yields (N/10, samples) for each kind
        x = torch.stack([logmel(waveform)[:, :SOUND_FRAMES] for waveform in made], dim=1)  # (N/10, 10, 96, 64)
        splits[name] = SoundSource(
            split=name,
            x=x.reshape(count, 1, SOUND_FRAMES, MELS),
            labels=[i % len(KINDS) for i in range(count)],
            classes=tuple(KINDS),
            augment=roll_time,
            name=f"sounds {name}",
        )
    return Splits(train=splits["train"], test=splits["test"])


def roll_time(x: Tensor, generator: torch.Generator) -> Tensor:
    """(C, frames, mels) moved in time by any number of frames, around the end."""
    return x.roll(int(torch.randint(x.shape[1], (), generator=generator)), dims=1)
