"""Whitened k-means features: activations by numpy, any rank, padding, and what they are worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridle.data.embedded.sets import digits
from bridle.evaluate.classical import ClassicalFeatures, evenly_spaced, strides
from bridle.geometry import Geometry
from bridle.seeding import generator


def fitted(x: torch.Tensor, valid: torch.Tensor | None = None, *, centroids: int = 8) -> ClassicalFeatures:
    geometry = Geometry(x.shape[1], tuple(x.shape[2:]), (1,) * (x.dim() - 2))
    return ClassicalFeatures(geometry, centroids=centroids).fit([(x, valid)], generator("classical"))


@pytest.mark.parametrize("size", [(40,), (12, 17), (6, 9, 8)], ids=["1-D", "2-D", "3-D"])
def test_activations_are_those_of_numpy_on_grids_of_any_rank(size: tuple[int, ...]) -> None:
    x = torch.randn(3, 2, *size, generator=generator("x", len(size)))
    model, rank = fitted(x), len(size)
    found = model(x)
    wanted = np.zeros((2,) * rank + (8,))
    grid = [(n - 6) // 2 + 1 for n in size]
    for place in np.ndindex(*grid):
        cut = tuple(slice(2 * i, 2 * i + 6) for i in place)
        p = x[(1, slice(None), *cut)].double().numpy().ravel()
        p = (p - p.mean()) / (p.std() + 0.1)
        white = (p - model.mean.double().numpy()) @ model.whitening.double().numpy()
        z = np.linalg.norm(white - model.codes.numpy(), axis=1)
        wanted[tuple(int(i >= (n + 1) // 2) for i, n in zip(place, grid, strict=True))] += np.maximum(0, z.mean() - z)
    assert found.shape == (3, 2**rank * 8)
    np.testing.assert_allclose(found[1].numpy(), wanted.ravel() / np.prod(grid), atol=1e-4)


def test_padding_changes_nothing() -> None:
    x = torch.randn(4, 1, 24, 8, generator=generator("x"))
    real = torch.ones(4, 24, 8, dtype=torch.bool)
    real[:, 15:] = False
    other = torch.where(real[:, None], x, 50.0)
    valid = real.flatten(1)  # patches of one value
    a, b = fitted(x, valid), fitted(other, valid)
    assert torch.allclose(a(x, valid), b(other, valid))
    assert not torch.allclose(a(x), a(other))


def test_long_inputs_have_wider_strides() -> None:
    assert strides((32, 32), (6, 6)) == (2, 2)
    wide = strides((256, 64), (6, 6))
    assert (250 // wide[0] + 1) * (58 // wide[1] + 1) <= 1024
    assert strides((4,), (4,)) == (2,)


def test_images_of_a_class_lie_together() -> None:
    """Nearest neighbours among 400 digits, by classical features and by chance."""
    data = digits().train
    items = [data.load(i, None) for i in range(400)]
    x, y = torch.stack([item.x for item in items]), torch.tensor([item.label for item in items])
    z = torch.nn.functional.normalize(fitted(x, centroids=50)(x), dim=1)
    near = (z @ z.t() - 2 * torch.eye(len(z))).argmax(1)
    assert (y[near] == y).float().mean() > 0.9


def test_items_to_learn_from_are_spread_over_all() -> None:
    assert evenly_spaced(10, 4) == [0, 2, 5, 7]
    assert evenly_spaced(3, 4) == [0, 1, 2]
