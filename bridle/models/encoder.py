"""Main encoder E: patches -> transformer -> features; also the body of the tokenizer's encoder E_T.

Shapes: x (B, C, *input); z (B, T, D), or (B, V, D) when only V visible tokens go in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from bridle.errors import UsageError
from bridle.geometry import Geometry
from bridle.nn.masking import Mask
from bridle.nn.patch import PatchEmbed
from bridle.nn.position import resized_position, sincos_position
from bridle.nn.transformer import NORM_EPS, Transformer

STEM, EMBEDDING = -1, 0  # what `Encoder.layers` calls the activations of the stem, and the tokens of the first block


class Encoded(NamedTuple):
    """The encoder's features of a batch."""

    z: Tensor  # (B, T, D) or (B, V, D), after the final norm
    class_token: Tensor | None  # (B, D) when the encoder has one


class Encoder(nn.Module):
    """Pre-norm ViT on a grid of any rank, with fixed positions; patches may be whitened first (ridge `whiten`).

    Buffers:
        position (T, D): sin-cos table, derived from the geometry and not saved; with `saved_position` it may be
            replaced by that of another model, does not learn, and is saved with the weights.
    """

    position: Tensor

    def __init__(
        self,
        *,
        geometry: Geometry,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        class_token: bool = False,
        checkpoint_activations: bool = False,
        saved_position: bool = False,
        whiten: float | None = None,
        stem: int | None = None,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.width = width
        self.depth = depth
        self.heads = heads
        self.embed = PatchEmbed(geometry=geometry, width=width, ridge=whiten, stem=stem)
        self.trunk = Transformer(
            width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, checkpoint_activations=checkpoint_activations
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.class_token = nn.Parameter(torch.zeros(width)) if class_token else None
        self.register_buffer("position", sincos_position(geometry.grid, width), persistent=saved_position)

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, valid: Tensor | None = None, drop: Tensor | None = None
    ) -> Encoded:
        """Features of the visible tokens (with `mask`) or of all; `valid` (B, T) marks padding, `drop` is drop-path."""
        z, key_valid = self._begin(x, mask, valid)
        return self._split_class_token(self.norm(self.trunk(z, key_valid=key_valid, drop=drop)))

    def change_grid(self, geometry: Geometry) -> None:
        """Take inputs of another size from now on: the same channels and patch, positions interpolated."""
        own = self.geometry
        if (geometry.channels, geometry.patch) != (own.channels, own.patch):
            raise UsageError(
                f"an encoder of {own.channels} channel(s) and patch {list(own.patch)} cannot take inputs of "
                f"{geometry.channels} and {list(geometry.patch)}."
            )
        self.position = resized_position(self.position, own.grid, geometry.grid)
        self.geometry = self.embed.geometry = geometry

    def layers(self, x: Tensor, *, wanted: Sequence[int], valid: Tensor | None = None) -> list[Encoded]:
        """What the blocks numbered `wanted` (1 to depth) put out; the final norm belongs to the last block's alone.

        EMBEDDING stands for the tokens that enter the first block, STEM for the activations (B, T, K) of the stem.
        """
        first = EMBEDDING if self.embed.stem is None else STEM
        if any(not first <= n <= self.depth for n in wanted):
            raise UsageError(f"layers {list(wanted)} asked of an encoder whose blocks are numbered 1 to {self.depth}.")
        found: dict[int, Encoded] = {}
        if STEM in wanted:
            found[STEM] = Encoded(self.embed.activations(x), None)
            if set(wanted) == {STEM}:
                return [found[STEM] for _ in wanted]
        z, key_valid = self._begin(x, None, valid)
        found[EMBEDDING] = self._split_class_token(z)
        for n, out in enumerate(self.trunk.outputs(z, key_valid=key_valid), start=1):
            if n in wanted:
                found[n] = self._split_class_token(self.norm(out) if n == self.depth else out)
            if n == max(wanted, default=0):
                break
        return [found[n] for n in wanted]

    def blocks(self, layer: int | Literal["all", "stem"] | None) -> list[int]:
        """The numbers that `layers` takes: None names the last block, "all" a stem, the embedding and every block."""
        if layer == "stem":
            return [STEM]
        if layer != "all":
            return [self.depth if layer is None else layer]
        stem = [] if self.embed.stem is None or not self.embed.stem.is_measured else [STEM]
        return [*stem, *range(EMBEDDING, self.depth + 1)]

    def layer_width(self, number: int) -> int:
        """Numbers per token of what `layers` gives."""
        return self.width if number != STEM or self.embed.stem is None else len(self.embed.stem.centres)

    def features_of(self, x: Tensor, *, block: int | None = None, valid: Tensor | None = None) -> Tensor:
        """Patch tokens (B, T, D) after the final norm, or of an earlier block, normalised without weights.

        The final norm was learned for the last block alone.
        """
        if block is None or block == self.depth:
            last: Tensor = self(x, valid=valid).z
            return last
        (found,) = self.layers(x, wanted=[block], valid=valid)
        return layer_norm(found.z.float(), found.z.shape[-1:])

    def _begin(self, x: Tensor, mask: Mask | None, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tokens that enter the first block, class token first, and which of them may be attended to."""
        if mask is None:
            z, key_valid = self.embed(x) + self.position, valid  # (B, C, *input) -> (B, T, D)
        else:
            z = self.embed(x, only=mask.visible) + self.position[mask.visible]  # (B, C, *input) -> (B, V, D)
            key_valid = mask.visible_valid
        if self.class_token is not None:
            z = torch.cat([self.class_token.expand(z.shape[0], 1, -1), z], dim=1)
            if key_valid is not None:
                key_valid = nn.functional.pad(key_valid, (1, 0), value=True)
        return z, key_valid

    def _split_class_token(self, z: Tensor) -> Encoded:
        """Patch tokens and class token of what a block put out."""
        if self.class_token is None:
            return Encoded(z, None)
        return Encoded(z[:, 1:], z[:, 0])
