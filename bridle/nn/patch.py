"""Cut an input into patches and embed them, on grids of any rank.

Shapes: x (B, C, *input), tokens (B, T, F) with F = C·prod(patch), embedded (B, T, D).

Tokens are in row-major order over the grid (the last axis runs fastest); the features of one token are in the order
(C, *patch). So a convolution whose kernel and stride are the patch is `patchify` followed by a linear map with the
kernel flattened: W_linear = W_conv.reshape(D, F).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bridle.errors import UsageError
from bridle.geometry import Geometry
from bridle.nn.masking import gather_tokens
from bridle.nn.stem import Stem
from bridle.nn.whiten import Spectrum

ITEM_FLOOR = 0.05  # added to an item's deviation, in units of the data set's: silence does not become noise


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """(B, C, *input) -> (B, T, F)."""
    rank = len(patch)
    if x.ndim != rank + 2 or any(n % p for n, p in zip(x.shape[2:], patch, strict=True)):
        raise UsageError(
            f"cannot cut an input of shape {list(x.shape)} into patches of {list(patch)}; "
            f"expected (B, C, {rank} axes), each a multiple of its patch."
        )
    B, C, *size = x.shape
    grid = [n // p for n, p in zip(size, patch, strict=True)]
    split = [part for pair in zip(grid, patch, strict=True) for part in pair]
    x = x.reshape(B, C, *split)  # (B, C, g1, p1, g2, p2, ...)
    grid_axes = range(2, 2 + 2 * rank, 2)
    patch_axes = range(3, 3 + 2 * rank, 2)
    x = x.permute(0, *grid_axes, 1, *patch_axes)  # -> (B, g1, g2, ..., C, p1, p2, ...)
    return x.reshape(B, prod(grid), C * prod(patch))


def unpatchify(tokens: Tensor, *, channels: int, grid: tuple[int, ...], patch: tuple[int, ...]) -> Tensor:
    """(B, T, F) -> (B, C, *input), the inverse of `patchify`."""
    rank = len(grid)
    expected = (prod(grid), channels * prod(patch))
    if len(patch) != rank or tokens.ndim != 3 or tuple(tokens.shape[1:]) != expected:
        raise UsageError(
            f"cannot put tokens of shape {list(tokens.shape)} together on grid {list(grid)} with patch {list(patch)} "
            f"and {channels} channels; expected (B, {expected[0]}, {expected[1]})."
        )
    B = tokens.shape[0]
    x = tokens.reshape(B, *grid, channels, *patch)  # (B, g1, g2, ..., C, p1, p2, ...)
    pairs = [axis for k in range(rank) for axis in (1 + k, 2 + rank + k)]
    x = x.permute(0, 1 + rank, *pairs)  # -> (B, C, g1, p1, g2, p2, ...)
    return x.reshape(B, channels, *(g * p for g, p in zip(grid, patch, strict=True)))


def standardise_items(patches: Tensor, geometry: Geometry, *, axes: Sequence[int], valid: Tensor | None) -> Tensor:
    """(B, T, F) -> (B, T, F): every item without its mean over the input axes `axes`, divided by its own deviation.

    The mean is taken for each channel and each place on the other axes, the deviation over the whole item; tokens that
    `valid` (B, T) calls padding count nothing. With axes [0] of (time, frequency) every band of a recording loses its
    mean over time.
    """
    B, _, F = patches.shape
    grid, rank = geometry.grid, len(geometry.grid)
    x = patches.reshape(B, *grid, geometry.channels, *geometry.patch)  # (B, g1, g2, ..., C, p1, p2, ...)
    real = torch.ones_like(patches[..., 0]) if valid is None else valid.to(patches.dtype)  # (B, T)
    weight = real.reshape(B, *grid, *(1,) * (rank + 1))
    summed = [1 + a for a in axes] + [2 + rank + a for a in axes]
    inside = prod(geometry.patch[a] for a in axes)  # numbers of one token in a mean
    count = (weight.sum([1 + a for a in axes], keepdim=True) * inside).clamp_min(1.0)
    centred = (x - (x * weight).sum(summed, keepdim=True) / count).reshape(patches.shape)
    energy = (centred.square().sum(-1) * real).sum(1) / (real.sum(1) * F).clamp_min(1.0)  # (B,)
    return centred / (energy.sqrt() + ITEM_FLOOR)[:, None, None]


class PatchEmbed(nn.Module):
    """One linear map of each patch, whitened before it if `ridge` is given: (B, C, *input) -> (B, T, D).

    With `stem` a second linear map, of that many k-means activations of the plain patch, is added.

    Buffers (only with `ridge`):
        mean (F,), whitening (F, F): of W(p − μ). Zero and the identity, so plain patches, until `whiten_by`.
    """

    mean: Tensor
    whitening: Tensor

    def __init__(self, *, geometry: Geometry, width: int, ridge: float | None = None, stem: int | None = None) -> None:
        super().__init__()
        self.geometry, self.ridge = geometry, ridge
        self.proj = nn.Linear(geometry.patch_features, width)
        self.stem = None if stem is None else Stem(geometry=geometry, centres=stem)
        self.stem_proj = None if stem is None else nn.Linear(stem, width, bias=False)
        if ridge is not None:
            self.register_buffer("mean", torch.zeros(geometry.patch_features))
            self.register_buffer("whitening", torch.eye(geometry.patch_features))

    @torch.no_grad()
    def whiten_by(self, spectrum: Spectrum) -> None:
        """Take mean and whitening from the measured components of patches."""
        assert self.ridge is not None
        self.mean.copy_(spectrum.mean)
        self.whitening.copy_(spectrum.whitening(self.ridge))

    @torch.no_grad()
    def take_measured(self, other: PatchEmbed) -> None:
        """Take whitening and stem from another embedding of the same patches; nothing where there are none."""
        if self.ridge is not None:
            self.mean.copy_(other.mean)
            self.whitening.copy_(other.whitening)
        if self.stem is not None and other.stem is not None:
            self.stem.load_state_dict(other.stem.state_dict())

    def forward(self, x: Tensor, *, only: Tensor | None = None) -> Tensor:
        """(B, C, *input) -> (B, T, D), or (B, V, D) of the tokens `only` (B, V), which is all that is computed then."""
        if tuple(x.shape[1:]) != self.geometry.shape:
            raise UsageError(
                f"the model expects inputs of shape (B, {', '.join(map(str, self.geometry.shape))}), "
                f"got {tuple(x.shape)}; resize or crop the input, or build the model for this size."
            )
        patches = patchify(x, self.geometry.patch)  # (B, C, *input) -> (B, T, F)
        if only is not None:
            patches = gather_tokens(patches, only)  # (B, T, F) -> (B, V, F)
        if self.ridge is None and self.stem is None:
            out: Tensor = self.proj(patches)  # (B, T, F) -> (B, T, D)
            return out
        # A program is called without autocast, and the meta device has none.
        if torch.compiler.is_exporting() or x.device.type == "meta":
            return self._embed_measured(patches)
        # Whitening takes differences of large numbers: 16 bits would leave little of them.
        with torch.autocast(x.device.type, enabled=False):
            return self._embed_measured(patches)

    def activations(self, x: Tensor) -> Tensor:
        """The stem's vectors (B, T, K) of (B, C, *input)."""
        assert self.stem is not None
        with torch.autocast(x.device.type, enabled=False):
            found: Tensor = self.stem(patchify(x, self.geometry.patch))
        return found.to(self.proj.weight.dtype)

    def _embed_measured(self, patches: Tensor) -> Tensor:
        """proj(W(p − μ)) + stem_proj(stem(p)); W and proj in one, because their product is small."""
        weight, bias = self.proj.weight.float(), self.proj.bias.float()
        if self.ridge is None:
            out = linear(patches.float(), weight, bias)  # (B, T, F) -> (B, T, D)
        else:
            out = linear(patches.float() - self.mean.float(), weight @ self.whitening.float(), bias)
        if self.stem is not None and self.stem_proj is not None:
            out = out + linear(self.stem(patches), self.stem_proj.weight.float())  # (B, T, K) -> (B, T, D)
        return out.to(self.proj.weight.dtype)
