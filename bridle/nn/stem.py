"""A fixed stem: k-means activations of small windows inside each patch, averaged over the patch.

Windows of about half a patch along every axis are cut at a few places of a patch alone, so a hidden patch shows in no
other token's stem. They are whitened, x = W(p − μ); with distances z_k = ‖x − c_k‖ to K k-means centres the activation
of a window is max(0, mean(z) − z_k) (Coates and Ng, 2011). A token's vector is the mean over its windows, standardised.

Shapes: patches (B, T, F); N windows of S = C·prod(window) values each; activations (B, T, K).
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from bridle.geometry import Geometry

SMALLEST = 3  # values of a window along an axis, where a patch has as many
PLACES, PLACES_3D = 4, 3  # of a window along an axis, about; fewer on grids of three axes
CHUNK = 65_536  # windows at a time, which bounds the memory for their distances to all centres


class Stem(nn.Module):
    """Activations (B, T, K) of patches (B, T, F); zeros until `models/measure.py: fit_stem`, and never trained.

    Buffers:
        mean (S,), whitening (S, S): of windows.
        centres (K, S): of k-means.
        offset (K,), scale (K,): of activations, to mean 0 and deviation 1.
    """

    mean: Tensor
    whitening: Tensor
    centres: Tensor
    offset: Tensor
    scale: Tensor
    index: Tensor

    def __init__(self, *, geometry: Geometry, centres: int) -> None:
        super().__init__()
        self.window = tuple(min(p, max(SMALLEST, -(-p // 2))) for p in geometry.patch)
        self.register_buffer("index", window_index(geometry, self.window), persistent=False)
        size = self.index.shape[1]
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("whitening", torch.eye(size))
        self.register_buffer("centres", torch.zeros(centres, size))
        self.register_buffer("offset", torch.zeros(centres))
        self.register_buffer("scale", torch.zeros(centres))

    @property
    def is_measured(self) -> bool:
        """Has it been fitted to patches?"""
        return bool(self.scale.any())

    def activations(self, patches: Tensor) -> Tensor:
        """(B, T, F) -> (B, T, K), not standardised."""
        tokens = patches.flatten(0, 1).float()
        if torch.compiler.is_exporting():  # a graph takes any number of rows, so it cannot loop over them
            found = self._activations(tokens)
        else:
            found = torch.cat([self._activations(part) for part in tokens.split(max(1, CHUNK // len(self.index)))])
        return found.reshape(*patches.shape[:2], len(self.centres))

    def _activations(self, tokens: Tensor) -> Tensor:
        """(R, F) -> (R, K): of windows (R, N, S), also of a model in half precision."""
        white = (tokens[:, self.index] - self.mean.float()) @ self.whitening.float()
        return triangle(white, self.centres.float()).mean(1)

    def forward(self, patches: Tensor) -> Tensor:
        """(B, T, F) -> (B, T, K)."""
        return (self.activations(patches) - self.offset.float()) * self.scale.float()


def triangle(points: Tensor, centres: Tensor) -> Tensor:
    """(…, S), (K, S) -> (…, K): how much nearer than the mean centre each centre is, 0 where it is farther."""
    squared = points.square().sum(-1, keepdim=True) - 2 * points @ centres.t() + centres.square().sum(-1)
    distance = squared.clamp_min(0.0).sqrt()
    return (distance.mean(-1, keepdim=True) - distance).clamp_min(0.0)


def window_index(geometry: Geometry, window: tuple[int, ...]) -> Tensor:
    """(N, S) which numbers of a patch (C, *patch) each window (C, *window) holds."""
    numbers = torch.arange(geometry.patch_features).reshape(geometry.channels, *geometry.patch)
    places, starts = PLACES_3D if geometry.rank > 2 else PLACES, []
    for p, w in zip(geometry.patch, window, strict=True):
        step = max(1, (p - w) // (places - 1))
        starts.append(range(0, p - w + 1, step))
    found = []
    for corner in product(*starts):
        cut = tuple(slice(begin, begin + w) for begin, w in zip(corner, window, strict=True))
        found.append(numbers[(slice(None), *cut)].flatten())
    return torch.stack(found)
