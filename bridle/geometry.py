"""What an input looks like: channels, size and patch, for grids of any rank.

Audio is (1, (1024, 128), (16, 16)), an image (3, (224, 224), (16, 16)), a video (3, (16, 224, 224), (2, 16, 16)),
a signal (8, (1000,), (20,)). Everything else follows from these three facts.

Shapes: C channels, T tokens, F patch features.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bridle.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    """Channels, input size and patch size; `patch` divides `input` on every axis."""

    channels: int
    input: tuple[int, ...]
    patch: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ConfigError(f"geometry.channels: {self.channels}; expected at least 1.")
        if not self.input or min(self.input) < 1 or len(self.patch) != len(self.input) or min(self.patch) < 1:
            raise ConfigError(
                f"geometry.patch: {list(self.patch)} and geometry.input {list(self.input)} must be positive sizes "
                "of the same rank, one number per axis."
            )
        wrong = [f"{n} by {p}" for n, p in zip(self.input, self.patch, strict=True) if n % p]
        if wrong:
            raise ConfigError(
                f"geometry.patch: {list(self.patch)} does not divide geometry.input {list(self.input)} "
                f"({', '.join(wrong)}); choose a patch that divides every axis."
            )

    @property
    def rank(self) -> int:
        return len(self.input)

    @property
    def grid(self) -> tuple[int, ...]:
        """Patches per axis."""
        return tuple(n // p for n, p in zip(self.input, self.patch, strict=True))

    @property
    def tokens(self) -> int:
        """T, the number of patches."""
        return prod(self.grid)

    @property
    def patch_features(self) -> int:
        """F, the numbers in one patch."""
        return self.channels * prod(self.patch)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, *input), the shape of one sample."""
        return (self.channels, *self.input)
