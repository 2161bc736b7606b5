"""Which features of an input are meant: block, pooling, and how the run's own probe chose them.

Shapes: z (B, T, D); P grid positions that pooling keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.config import Config
from bridle.errors import UsageError
from bridle.models.encoder import Encoded, Encoder
from bridle.nn.pooling import pool_tokens

Layer = int | Literal["all", "stem"]
Pool = Literal["mean", "axis", "class"]
Pooling = Literal["probe", "mean", "axis", "class"]


class PoolOptions(TypedDict, total=False):
    """Arguments that choose a pooling; see `Model.encode`."""

    pool: Pooling | None
    axis: int | None
    deviation: bool


class FeatureOptions(PoolOptions, total=False):
    """Arguments that choose features; see `Model.encode`."""

    layer: Layer | None


class Pooled(NamedTuple):
    """How a pooled vector of a window is laid out, so that windows can be averaged by their real tokens."""

    axis: int | None  # the grid axis that is kept
    places: NDArray[np.intp]  # of every number of the vector, its place on that axis; 0 without one


class FeatureSpec(NamedTuple):
    """Features of one block, pooled or not, or pooled of every block."""

    layer: Layer | None = None  # output of this block, from 1; None: the last one, after its norm; "all" or "stem"
    pool: Pool | None = None  # None keeps every token
    axis: int | None = None  # grid axis that pool "axis" keeps
    deviation: bool = False  # with pool "mean" or "axis", the tokens' standard deviations behind their means

    def describe(self) -> str:
        """In words, for messages."""
        axis = f"means along grid axis {self.axis}"
        what = {"mean": "the mean over tokens", "axis": axis, "class": "the class token"}
        pooled = "every token" if self.pool is None else what[self.pool]
        deviation = " and standard deviations" if self.deviation else ""
        named: dict[Layer | None, str] = {
            None: "the last block",
            "all": "the embedding and every block",
            "stem": "the stem",
        }
        return f"{pooled}{deviation} of {named.get(self.layer, f'block {self.layer}')}"

    def width(self, encoder: Encoder) -> int:
        """Numbers in a row of these features."""
        places = 1 if self.axis is None else encoder.geometry.grid[self.axis]
        width = sum(encoder.layer_width(number) for number in encoder.blocks(self.layer))
        return width * places * (2 if self.deviation else 1)

    def layout(self, encoder: Encoder) -> Pooled | None:
        """Where the numbers of a pooled vector come from; None if every token is kept."""
        if self.pool is None:
            return None
        count = 1 if self.axis is None else encoder.geometry.grid[self.axis]
        widths = [encoder.layer_width(number) for number in encoder.blocks(self.layer)]
        means = [np.repeat(np.arange(count), width) for width in widths]
        return Pooled(self.axis, np.concatenate([np.tile(one, 2 if self.deviation else 1) for one in means]))

    def pooled(self, blocks: Sequence[Encoded], grid: Sequence[int], valid: Tensor | None) -> Tensor:
        """(B, T, D), or pooled (B, P · D), with deviations (B, 2 · P · D); blocks side by side."""
        return torch.cat([self._pooled(encoded, grid, valid) for encoded in blocks], dim=-1)

    def _pooled(self, encoded: Encoded, grid: Sequence[int], valid: Tensor | None) -> Tensor:
        if self.pool is None:
            return encoded.z
        if self.pool == "class" and encoded.class_token is not None:  # a stem has none
            return encoded.class_token
        return pool_tokens(encoded.z, grid, self.axis, valid, deviation=self.deviation)


def probe_features(config: Config) -> FeatureSpec:
    """The features that a run's probe used; attentive pooling, which learns its own weights, counts as mean."""
    probe = config.probe
    pool: Pool = "mean" if probe.pool == "attentive" else probe.pool
    axis = probe.axis if pool == "axis" else None
    return FeatureSpec(probe.layer, pool, axis, probe.deviation and pool != "class")


def choose_features(
    config: Config,
    encoder: Encoder,
    *,
    layer: Layer | None = None,
    pool: Pooling | None = None,
    axis: int | None = None,
    deviation: bool = False,
) -> FeatureSpec:
    """The features that arguments ask for, checked against the model; "probe" fills in what the run's probe used."""
    if layer not in (None, "all", "stem", *range(1, encoder.depth + 1)):
        raise UsageError(
            f"layer is {layer!r}; expected a block from 1 to {encoder.depth}, 'all' for every block, or 'stem'."
        )
    if layer == "stem" and encoder.embed.stem is None:
        raise UsageError("layer 'stem' needs a model with a stem; this one was trained without encoder.stem.")
    if layer == "all" and pool is None:
        raise UsageError("layer 'all' needs pooled features: give a pool such as 'probe'.")
    if pool == "probe":
        if axis is not None or deviation:
            raise UsageError("pool 'probe' is what the run's probe used; give pool='axis' to choose an axis.")
        spec = probe_features(config)
        return spec if layer is None else spec._replace(layer=layer)
    if pool not in (None, "mean", "axis", "class"):
        raise UsageError(
            f"pool is {pool!r}; expected 'probe', 'mean', 'axis' or 'class', or nothing to keep every token."
        )
    if pool == "class" and encoder.class_token is None:
        raise UsageError("pool 'class' needs a model with encoder.class_token; use 'mean'.")
    if pool != "axis" and axis is not None:
        raise UsageError(f"axis {axis} is given, but only pool 'axis' keeps one.")
    if deviation and pool not in ("mean", "axis"):
        raise UsageError("deviation is given, but only pools 'mean' and 'axis' have one.")
    grid = config.geometry.build().grid
    if pool == "axis" and axis is None:  # as the run itself was judged, else the bands of a (time, frequency) grid
        axis = config.probe.axis if config.probe.pool == "axis" else len(grid) - 1
    if axis is not None and not 0 <= axis < len(grid):
        raise UsageError(f"axis {axis} is not an axis of the grid {list(grid)}; count from 0.")
    return FeatureSpec(layer, pool, axis, deviation)
