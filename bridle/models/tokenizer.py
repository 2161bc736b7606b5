"""Tokenizers: x -> z̃ -> codes, the base class they share, and the registry of their kinds.

The first iteration's is a fixed random projection of patches, later ones have an encoder of their own. Other kinds are
registered with `register_tokenizer` and chosen by `tokenizer.first` or `tokenizer.later`.
Shapes: x (B, C, *input), z_tilde (B, T, Dq), codes (B, T, M).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from bridle.errors import ConfigError, UsageError
from bridle.geometry import Geometry
from bridle.models.encoder import Encoder
from bridle.nn.patch import patchify, standardise_items
from bridle.nn.position import sincos_position
from bridle.nn.whiten import PatchMoments, whitened_projection
from bridle.quantize import ResidualQuantizer
from bridle.quantize.nearest import full_precision

Batches = Iterable[tuple[Tensor, Tensor | None]]  # inputs x, and which tokens are real: (B, T) or None


class Tokenizer(nn.Module):
    """Base class of tokenizers; a subclass implements `encode`.

    geometry: the inputs it takes. quantizer: turns z̃ into codes. is_trained: whether a tokenizer phase trains it; one
    that is not trained only has its codebooks started. sees_padding: whether `encode` looks at `valid`. measures:
    whether `measure` must see samples before the codebooks are started.
    """

    is_trained = False
    sees_padding = False
    measures = False

    def __init__(self, *, geometry: Geometry, quantizer: ResidualQuantizer) -> None:
        super().__init__()
        self.geometry = geometry
        self.quantizer = quantizer

    @property
    def directions(self) -> int:
        """In how many directions z̃ can vary."""
        return self.quantizer.width

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq), float32."""
        raise UsageError(f"{type(self).__name__} is a tokenizer without `encode`; implement it.")

    def tokenize(self, x: Tensor, *, valid: Tensor | None = None, stages: int | None = None) -> Tensor:
        """(B, C, *input) -> codes (B, T, M), or of the first `stages` only."""
        return self.quantizer.assign(self.encode(x, valid=valid), stages=stages)

    def take_from(self, encoder: Encoder) -> None:
        """Take over what is needed of the main encoder as it stands; called once, when an iteration begins."""

    def measure(self, batches: Batches, generator: torch.Generator) -> None:
        """Adapt to un-augmented samples (collective); called once, before the codebooks are started."""

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """Use `dtype` where that does not change codes much; returns the dtype that inputs must have."""
        return torch.float32


class ColdStartTokenizer(Tokenizer):
    """Patch content through a fixed random linear map (paper §4.1): no bias, no training, no position unless asked for.

    With `standardise` "item" every item first loses its own mean over `item_axes` and its own deviation, so that level,
    background and lighting, which all its patches share, are not what must be predicted.
    With `whiten` w the map is (p − μ) A R: A the partial whitening of the n leading components of patches
    (`bridle.nn.whiten`), R random with orthonormal rows if n ≤ Dq (distances stay as A makes them), else columns.

    Buffers:
        projection (F, Dq): random map, drawn once with unit-variance output for standardised patches; with `whiten`
            A R, once the patches are measured.
        mean (F,): μ. Only with `whiten`.
        position (T, F): sin-cos positions added to the patches, or absent; derived, not saved.
    """

    projection: Tensor
    mean: Tensor
    position: Tensor | None

    def __init__(
        self,
        *,
        geometry: Geometry,
        quantizer: ResidualQuantizer,
        standardise: Literal["dataset", "item", "patch"] = "dataset",
        item_axes: Sequence[int] | None = None,
        position: bool = False,
        whiten: float | None = None,
        components: int | None = None,
    ) -> None:
        super().__init__(geometry=geometry, quantizer=quantizer)
        self.standardise = standardise
        self.item_axes = tuple(range(len(geometry.grid)) if item_axes is None else item_axes)
        self.sees_padding = standardise == "item"
        self.whiten = whiten
        self.components = components or min(geometry.patch_features, quantizer.width)
        self.register_buffer("projection", torch.zeros(geometry.patch_features, quantizer.width))
        table = sincos_position(geometry.grid, geometry.patch_features) if position else None
        self.register_buffer("position", table, persistent=False)
        if whiten is not None:
            self.register_buffer("mean", torch.zeros(geometry.patch_features))

    def draw_projection(self, generator: torch.Generator) -> None:
        """Draw the random map; called once by the builder."""
        drawn = torch.randn(self.projection.shape, generator=generator) / self.projection.shape[0] ** 0.5
        self.projection.copy_(drawn)

    @property
    def measures(self) -> bool:  # type: ignore[override]
        """Does the map depend on the data?"""
        return self.whiten is not None

    @torch.no_grad()
    def measure(self, batches: Batches, generator: torch.Generator) -> None:
        """Make the map A R from the principal components of `patches`."""
        assert self.whiten is not None
        moments = PatchMoments(self.geometry.patch_features, self.projection.device)
        for x, valid in batches:
            moments.add(self.patches(x, valid), valid)
        spectrum = moments.spectrum()
        self.mean.copy_(spectrum.mean)
        self.projection.copy_(whitened_projection(spectrum, self.whiten, self.components, generator, self.projection))

    def patches(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> what is projected, (B, T, F). Inputs arrive standardised over the data set."""
        patches = patchify(x, self.geometry.patch).float()
        if self.standardise == "item":
            patches = standardise_items(patches, self.geometry, axes=self.item_axes, valid=valid)
        if self.standardise == "patch":
            patches = patches - patches.mean(-1, keepdim=True)
            patches = patches / patches.std(-1, keepdim=True, correction=0).clamp_min(1e-6)
        if self.position is not None:
            patches = patches + self.position
        return patches

    @property
    def directions(self) -> int:
        """A linear map of F numbers fills F directions at most."""
        return min(self.quantizer.width, self.geometry.patch_features)

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq)."""
        patches = self.patches(x, valid)  # (B, C, *input) -> (B, T, F)
        if self.whiten is not None:
            patches = patches - self.mean
        # Targets must not depend on autocast: the same input always gets the same codes.
        with full_precision(x.device):
            return patches @ self.projection


class VitTokenizer(Tokenizer):
    """E_T, an encoder of the same architecture as E, projected to the code width (paper §3, App. E)."""

    is_trained = True
    sees_padding = True

    def __init__(self, *, encoder: Encoder, quantizer: ResidualQuantizer) -> None:
        super().__init__(geometry=encoder.geometry, quantizer=quantizer)
        self.encoder = encoder
        self.projection = nn.Linear(encoder.width, quantizer.width)

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq), always float32."""
        z_tilde: Tensor = self.projection(self.encoder(x, valid=valid).z)
        return z_tilde.float()

    def take_from(self, encoder: Encoder) -> None:
        """The same whitening of patches."""
        self.encoder.embed.take_measured(encoder.embed)

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """Convert encoder and projection; the quantizer stays float32."""
        self.encoder.to(dtype)
        self.projection.to(dtype)
        return dtype


class FeatureTokenizer(Tokenizer):
    """The main encoder as it was when the iteration began, one block's features quantized as they are: no training.

    z̃ = (z − μ_t) A R: z the block's features, normalised without weights (the last block's have the final norm), μ_t
    their mean at position t, A and R as in `ColdStartTokenizer`.

    Buffers:
        mean (T, D): μ.
        projection (D, Dq): A R.
    """

    sees_padding = True
    measures = True
    mean: Tensor
    projection: Tensor

    def __init__(
        self, *, encoder: Encoder, quantizer: ResidualQuantizer, block: int | None = None, whiten: float = 0.0
    ) -> None:
        super().__init__(geometry=encoder.geometry, quantizer=quantizer)
        self.encoder, self.block, self.whiten = encoder, block, whiten
        self.components = min(quantizer.width, encoder.width)
        self.register_buffer("mean", torch.zeros(encoder.geometry.tokens, encoder.width))
        self.register_buffer("projection", torch.zeros(encoder.width, quantizer.width))

    def take_from(self, encoder: Encoder) -> None:
        """A copy of all weights."""
        self.encoder.load_state_dict(encoder.state_dict())

    @torch.no_grad()
    def measure(self, batches: Batches, generator: torch.Generator) -> None:
        """Means per position, and the map A R from the principal components of what is left."""
        moments = PatchMoments(self.encoder.width, self.mean.device, positions=self.geometry.tokens)
        for x, valid in batches:
            moments.add(self.encoder.features_of(x, block=self.block, valid=valid), valid)
        spectrum = moments.spectrum()
        self.mean.copy_(spectrum.mean)
        self.projection.copy_(whitened_projection(spectrum, self.whiten, self.components, generator, self.projection))

    def encode(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> z̃ (B, T, Dq), always float32."""
        z = self.encoder.features_of(x, block=self.block, valid=valid).float()
        with full_precision(x.device):
            return (z - self.mean.float()) @ self.projection.float()

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """Convert the encoder; what follows it stays float32."""
        self.encoder.to(dtype)
        return dtype


class TokenizerKind(NamedTuple):
    """A registered kind: `build(config, iteration=r)` returns a new tokenizer of it."""

    build: Callable[..., Tokenizer]
    is_trained: bool


KINDS: dict[str, TokenizerKind] = {}


def register_tokenizer(name: str, build: Callable[..., Tokenizer], *, is_trained: bool = False) -> None:
    """Make `name` a choice for `tokenizer.first` (is_trained False) or `tokenizer.later`.

    `build(config, iteration=r)` returns a `Tokenizer`; weights are drawn from
    `bridle.seeding.generator(config.seed, r, "…")`, so that a run can be repeated.
    """
    KINDS[name] = TokenizerKind(build, is_trained)


def tokenizer_kind(name: str, *, key: str) -> TokenizerKind:
    """The registered kind `name`, or ConfigError that names `key` and the known kinds."""
    if name in KINDS:
        return KINDS[name]
    near = get_close_matches(name, KINDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(KINDS))}"
    raise ConfigError(f"{key}: unknown tokenizer {name!r}; {hint} Files that register others are named by --plugin.")
