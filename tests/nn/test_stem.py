"""The stem against plain loops; what it sees; how it is fitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bridle.geometry import Geometry
from bridle.models.measure import fit_stem, measure_inputs
from bridle.nn.patch import PatchEmbed, patchify
from bridle.nn.stem import Stem, triangle
from bridle.seeding import generator

GRIDS = [
    pytest.param(Geometry(2, (24,), (6,)), id="1-D"),
    pytest.param(Geometry(3, (16, 8), (8, 4)), id="2-D"),
    pytest.param(Geometry(1, (4, 8, 8), (2, 4, 4)), id="3-D"),
]


def samples(geometry: Geometry, count: int = 40) -> Tensor:
    return torch.randn(count, *geometry.shape, generator=generator("stem", *geometry.shape))


def fitted(geometry: Geometry, centres: int = 12) -> PatchEmbed:
    embed = PatchEmbed(geometry=geometry, width=8, stem=centres)
    measure_inputs(embed, [(samples(geometry), None)], generator(0, "fit"))
    return embed


@pytest.mark.parametrize("geometry", GRIDS)
def test_activations_are_those_of_loops_over_windows(geometry: Geometry) -> None:
    stem = fitted(geometry).stem
    assert stem is not None
    patches = patchify(samples(geometry, 2), geometry.patch)
    found = stem(patches)  # (B, T, K)
    one = patches[1, 2].reshape(geometry.channels, *geometry.patch).double().numpy()
    window = [min(p, max(3, (p + 1) // 2)) for p in geometry.patch]
    steps = [max(1, (p - w) // (3 if geometry.rank < 3 else 2)) for p, w in zip(geometry.patch, window, strict=True)]
    total, count = np.zeros(len(stem.centres)), 0
    for corner in np.ndindex(*geometry.patch):
        if any(c % s or c + w > p for c, s, w, p in zip(corner, steps, window, geometry.patch, strict=True)):
            continue
        cut = one[(slice(None), *(slice(c, c + w) for c, w in zip(corner, window, strict=True)))].ravel()
        white = (cut - stem.mean.double().numpy()) @ stem.whitening.double().numpy()
        far = np.sqrt(((white - stem.centres.double().numpy()) ** 2).sum(1))
        total += np.maximum(0, far.mean() - far)
        count += 1
    expected = (total / count - stem.offset.double().numpy()) * stem.scale.double().numpy()
    assert count == len(stem.index)
    np.testing.assert_allclose(found[1, 2].numpy(), expected, atol=2e-4)


@pytest.mark.parametrize("geometry", GRIDS)
def test_a_fitted_stem_is_standardised_and_its_centres_are_windows(geometry: Geometry) -> None:
    embed = fitted(geometry)
    assert embed.stem is not None and embed.stem.is_measured
    found = embed.stem(patchify(samples(geometry), geometry.patch)).flatten(0, 1)
    assert found.mean(0).abs().max() < 0.1
    assert (found.std(0) - 1).abs().max() < 0.1
    assert len(embed.stem.centres.unique(dim=0)) == len(embed.stem.centres)


def test_a_token_depends_on_its_own_patch_alone() -> None:
    geometry = Geometry(3, (16, 8), (8, 4))
    embed = fitted(geometry)
    x = samples(geometry, 1)
    changed = x.clone()
    changed[..., 8:, :] = 7.0  # the second row of patches
    before, after = embed.activations(x), embed.activations(changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])
    shown = torch.tensor([[1, 3]])
    assert torch.allclose(embed(x, only=shown), embed(x)[:, [1, 3]], atol=1e-6)


def test_an_unfitted_stem_adds_nothing() -> None:
    geometry = Geometry(1, (8, 8), (4, 4))
    embed = PatchEmbed(geometry=geometry, width=8, stem=5)
    x = samples(geometry, 2)
    assert embed.stem is not None and not embed.stem.is_measured
    assert torch.equal(embed(x), embed.proj(patchify(x, geometry.patch)))


def test_padding_is_not_fitted() -> None:
    geometry = Geometry(1, (16,), (4,))
    x, valid = samples(geometry), torch.ones(40, 4, dtype=torch.bool)
    valid[:, 3] = False
    wild = x.clone()
    wild[..., 12:] = 1e6
    plain, padded = (PatchEmbed(geometry=geometry, width=8, stem=6) for _ in range(2))
    for embed, given in ((plain, x), (padded, wild)):
        measure_inputs(embed, [(given, valid)], generator(0, "fit"))
    assert plain.stem is not None and padded.stem is not None
    assert torch.equal(plain.stem.centres, padded.stem.centres)


def test_a_stem_that_weights_brought_is_kept() -> None:
    geometry = Geometry(1, (16,), (4,))
    embed = fitted(geometry)
    assert embed.stem is not None
    before = embed.stem.centres.clone()
    measure_inputs(embed, [(3 * samples(geometry), None)], generator(1, "fit"))
    assert torch.equal(embed.stem.centres, before)


def test_constant_patches_give_zeros() -> None:
    stem = Stem(geometry=Geometry(1, (8,), (4,)), centres=3)
    with pytest.warns(UserWarning, match="distinct"):
        fit_stem(stem, torch.ones(100, 4), generator(0, "fit"))
    assert torch.equal(stem(torch.ones(1, 2, 4)), torch.zeros(1, 2, 3))


def test_the_triangle_is_zero_beyond_the_mean_distance() -> None:
    centres = torch.tensor([[0.0], [1.0], [5.0]])
    found = triangle(torch.tensor([[0.0]]), centres)
    assert torch.allclose(found, torch.tensor([[2.0, 1.0, 0.0]]))
