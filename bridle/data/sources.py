"""What the rest of bridle sees of any data set: an indexed source of samples, its splits, and readers of single files.

A source knows how to load sample i, with or without augmentation, and nothing about batches, order or ranks.
Shapes: one sample is (C, *input), float32, not yet normalised; K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from bridle.data.listing.columns import WHOLE, Span
from bridle.errors import ConfigError, DataError, quoted
from bridle.geometry import Geometry

if TYPE_CHECKING:
    from bridle.data.shards.tar_member import Location

Labels = Sequence[int | tuple[int, ...]]  # of each sample one label, or any number of them


class Sample(NamedTuple):
    """One loaded sample."""

    x: Tensor  # (C, *input) float32, before normalisation
    label: int | Tensor | None = None  # a class, or the share (K,) of every class: several labels, mixed samples
    valid: Tensor | None = None  # (T,) bool; False where a token is padding; None means all tokens are real


class Sound(NamedTuple):
    """Something to listen to."""

    wave: Tensor  # (N,) in ±1
    rate: int  # samples per second


class Source(Protocol):
    """An indexed collection of samples. `load` raises DataError for a sample that cannot be used."""

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the labels, or None for unlabelled data."""
        ...

    @property
    def labels(self) -> Labels | None: ...

    def __len__(self) -> int: ...

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        """Sample `index`; with a generator it is augmented as for pretraining, without one it is not."""
        ...

    def describe(self, index: int) -> str:
        """A path or name of sample `index` for messages and the quarantine list."""
        ...


@runtime_checkable
class Viewed(Protocol):
    """A source whose items are larger than the model's input: evaluation looks at `views` parts of each item."""

    @property
    def views(self) -> int: ...

    def load_view(self, index: int, view: int) -> Sample:
        """Part `view` of `views` of sample `index`, un-augmented, spread evenly over the item."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A source whose items have a length in time."""

    def seconds(self, index: int) -> float | None:
        """Length of item `index`, without decoding it where its file tells; None where that cannot be known."""
        ...


@runtime_checkable
class Audible(Protocol):
    """A source whose samples can be listened to."""

    def listen(self, index: int) -> Sound:
        """What un-augmented sample `index` sounds like."""
        ...


class Splits(NamedTuple):
    """A data set: `train` for pretraining and probes; `test` only for final scores (None: probes split train)."""

    train: Source
    test: Source | None
    folds: Sequence[int] | None = None  # fold of every train sample, for cross-validation
    notes: tuple[str, ...] = ()  # what a user should hear about how the data was read


class Window(NamedTuple):
    """A model-sized part of a file of any length."""

    x: Tensor  # (C, *input) float32, before normalisation
    valid: Tensor | None  # (T,) bool, False where a token is padding
    start: int  # frames (steps of the first axis) that lie before this window
    seconds: tuple[float, ...] | None = None  # times of its real frames, where only the file itself can tell


class Reader(Protocol):
    """Reads single files as windows that follow one another without overlap, in constant memory."""

    @property
    def extensions(self) -> tuple[str, ...]: ...

    @property
    def frame_seconds(self) -> float | None:
        """Time between two frames; None where they are not moments, or every file has its own."""
        ...

    @property
    def timed(self) -> bool:
        """Is the first axis time?"""
        ...

    def windows(self, path: Location, span: Span = WHOLE) -> Iterator[Window]:
        """All windows of a file, the last one padded (too short a rest is left out); DataError if it cannot be read.

        Where the first axis is time, of the part between two moments: frames are counted from its beginning, but
        `seconds` of a window are those of the file.
        """
        ...


@runtime_checkable
class Blending(Protocol):
    """A source that can mix two of its items itself, before it turns them into features."""

    def load_mixed(self, index: int, other: int, share: float, generator: torch.Generator) -> Sample:
        """share·item + (1 − share)·other item, augmented; the labels' shares alike."""
        ...


class SourceView:
    """Base of sources that show another one; unless a subclass says otherwise, all of its samples in its order."""

    def __init__(self, source: Source) -> None:
        self.source, self.classes = source, source.classes
        self.labels: Labels | None = source.labels
        self.views = source.views if isinstance(source, Viewed) else 1

    def __len__(self) -> int:
        return len(self.source)

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        return self.source.load(index, generator)

    def load_view(self, index: int, view: int) -> Sample:
        return self.source.load_view(index, view) if isinstance(self.source, Viewed) else self.source.load(index, None)

    def describe(self, index: int) -> str:
        return self.source.describe(index)


class Views(SourceView):
    """Every view of every sample of a source, as samples of their own: sample i, view v is number i·views + v."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.labels = None if source.labels is None else [y for y in source.labels for _ in range(self.views)]

    def __len__(self) -> int:
        return len(self.source) * self.views

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        if generator is not None:
            raise DataError("views are for evaluation and are not augmented.")
        return self.load_view(*divmod(index, self.views))

    def describe(self, index: int) -> str:
        return self.source.describe(index // self.views)


def class_shares(labels: Sequence[int], classes: int) -> Tensor:
    """(K,) float32 with 1 at each label."""
    shares = torch.zeros(classes)
    shares[list(labels)] = 1.0
    return shares


def label_of(labels: Labels | None, index: int, classes: Sequence[str] | None) -> int | Tensor | None:
    """What a sample carries for row `index` of `labels`: its class, or the shares (K,) where there may be several."""
    label = None if labels is None else labels[index]
    return class_shares(label, len(classes or ())) if isinstance(label, tuple) else label


def real_tokens(frames: int, geometry: Geometry) -> Tensor:
    """(T,) bool of an input of which only the first `frames` frames are real: False where less than half a patch is."""
    length, patch = geometry.input[0], geometry.patch[0]
    real = (frames - torch.arange(0, length, patch)).clamp(0, patch)  # frames of each patch along the first axis
    return (2 * real >= patch).repeat_interleave(geometry.tokens // len(real))


def real_values(valid: Tensor, size: Sequence[int], grid: Sequence[int]) -> Tensor:
    """(B, *size) bool: which values of inputs of `size` lie in real tokens, by valid (B, T) on a grid."""
    real = valid.reshape(len(valid), *grid)
    for axis, (length, tokens) in enumerate(zip(size, grid, strict=True), start=1):
        real = real.repeat_interleave(length // tokens, dim=axis)
    return real


def fill_input(
    x: Tensor, geometry: Geometry, path: Location, *, fill: float | None = None, hint: str = ""
) -> tuple[Tensor, Tensor | None]:
    """x (C, n, …) continued with `fill`, or with its last frame, to the frames of an input, and which tokens are real.

    DataError, which ends with `hint`, if no token is.
    """
    n, length, patch = x.shape[1], geometry.input[0], geometry.patch[0]
    if n == length:
        return x, None
    if n < fewest_frames(geometry):
        needed = f"half a patch of {patch} needs {fewest_frames(geometry)}{hint}"
        raise DataError(f"{quoted(path)} is too short: {n} frames, but {needed}.")
    rest = x[:, -1:] if fill is None else torch.full_like(x[:, :1], fill)
    filled = torch.cat([x, rest.expand(-1, length - n, *x.shape[2:])], dim=1)
    return filled, real_tokens(n, geometry)


def fewest_frames(geometry: Geometry) -> int:
    """Frames that make one token real."""
    return -(-geometry.patch[0] // 2)


def require_axes(geometry: Geometry, what: str, *axes: str, channels: Sequence[int] = ()) -> None:
    """ConfigError for a geometry that `what` cannot have: an input size for each of its axes, and one of `channels`."""
    if geometry.rank != len(axes):
        raise ConfigError(f"geometry.input: {list(geometry.input)} given; {what} need [{', '.join(axes)}].")
    if channels and geometry.channels not in channels:
        known = " or ".join(map(str, channels))
        raise ConfigError(f"geometry.channels: {geometry.channels} given; {what} have {known}.")
