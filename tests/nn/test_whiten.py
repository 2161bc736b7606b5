"""Whitening of patches, by numpy: before the encoder, and in the cold start's projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridle.geometry import Geometry
from bridle.models.tokenizer import ColdStartTokenizer
from bridle.nn.patch import PatchEmbed, patchify
from bridle.nn.whiten import PatchMoments, Spectrum, random_orthonormal
from bridle.quantize import ResidualQuantizer
from bridle.seeding import generator

GRIDS = [Geometry(2, (24,), (3,)), Geometry(1, (8, 8), (2, 4)), Geometry(1, (4, 4, 4), (2, 2, 2))]


def uneven(geometry: Geometry, batch: int = 40) -> torch.Tensor:
    """Inputs whose patches share most of their variance: a common level and a little noise."""
    random = generator("uneven", geometry.rank)
    level = torch.randn(batch, 1, *(1,) * geometry.rank, generator=random)
    return 3 * level + 1 + 0.5 * torch.randn(batch, *geometry.shape, generator=random)


def spectrum_of(p: torch.Tensor, valid: torch.Tensor | None = None) -> Spectrum:
    moments = PatchMoments(p.shape[-1], p.device)
    for half in (slice(None, len(p) // 3), slice(len(p) // 3, None)):  # two batches of unlike size
        moments.add(p[half], None if valid is None else valid[half])
    return moments.spectrum()


@pytest.mark.parametrize("geometry", GRIDS, ids=["1-D", "2-D", "3-D"])
def test_the_embedding_of_whitened_patches_is_that_of_numpy(geometry: Geometry) -> None:
    x, embed = uneven(geometry), PatchEmbed(geometry=geometry, width=5, ridge=0.1)
    p = patchify(x, geometry.patch)
    embed.whiten_by(spectrum_of(p))
    flat = p.flatten(0, 1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(flat, rowvar=False, bias=True))
    whitening = vectors @ np.diag((values + 0.1 * values.mean()) ** -0.5) @ vectors.T
    wanted = (flat - flat.mean(0)) @ whitening.T @ embed.proj.weight.detach().double().numpy().T
    wanted += embed.proj.bias.detach().double().numpy()
    np.testing.assert_allclose(embed(x).detach().flatten(0, 1).numpy(), wanted, atol=1e-5)


def test_whitened_patches_have_no_favourite_direction() -> None:
    p = patchify(uneven(GRIDS[1]), GRIDS[1].patch).flatten(0, 1).double()
    spectrum = spectrum_of(p[None])
    after = torch.linalg.eigvalsh(((p - spectrum.mean) @ spectrum.whitening(1e-6)).t().cov(correction=0))
    assert torch.allclose(after, torch.ones_like(after), atol=1e-3)
    assert spectrum.values[0] > 30 * spectrum.values[1]  # before, there was one


def test_without_a_measurement_patches_are_plain() -> None:
    plain, ridged = (PatchEmbed(geometry=GRIDS[1], width=5, ridge=ridge) for ridge in (None, 0.1))
    ridged.load_state_dict(plain.state_dict(), strict=False)
    x = uneven(GRIDS[1])
    assert torch.allclose(ridged(x), plain(x), atol=1e-6)
    assert set(plain.state_dict()) == {"proj.weight", "proj.bias"}


def test_padding_is_not_measured() -> None:
    p = torch.randn(6, 5, 4, generator=generator("p"))
    valid = torch.rand(6, 5, generator=generator("valid")) > 0.4
    other = torch.where(valid[..., None], p, torch.full_like(p, 100.0))
    for a, b in zip(spectrum_of(p, valid), spectrum_of(other, valid), strict=True):
        assert torch.equal(a, b)
    assert torch.allclose(spectrum_of(p, valid).mean, p[valid].double().mean(0))


@pytest.mark.parametrize("kind", ["constant", "one direction"])
def test_patches_without_variance_are_not_blown_up(kind: str) -> None:
    p = torch.full((8, 4, 6), 7.3)
    if kind == "one direction":
        p = p + torch.randn(8, 4, 1, generator=generator("level"))
    spectrum = spectrum_of(p)
    for matrix in (spectrum.whitening(0.1), spectrum.partial_whitening(share=0.5, components=4)):
        assert matrix.isfinite().all()
        assert ((p.double() - spectrum.mean) @ matrix).abs().max() < 10
    if kind == "constant":
        assert torch.equal(spectrum.whitening(0.1), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize(("share", "components"), [(0.5, 4), (1.0, 8), (0.0, 3)])
def test_the_whitened_cold_start_keeps_the_distances_that_numpy_gives(share: float, components: int) -> None:
    geometry = GRIDS[1]
    quantizer = ResidualQuantizer(codebooks=1, codes=4, width=9)
    cold = ColdStartTokenizer(geometry=geometry, quantizer=quantizer, whiten=share, components=components)
    x = uneven(geometry)
    cold.measure([(x, None)], generator("rotation"))
    flat = patchify(x, geometry.patch).flatten(0, 1).double().numpy()
    values, vectors = np.linalg.eigh(np.cov(flat, rowvar=False, bias=True))
    order = np.argsort(values)[::-1][:components]
    wanted = (flat - flat.mean(0)) @ vectors[:, order] / values[order] ** (share / 2)
    z = cold.encode(x).flatten(0, 1).double().numpy()
    assert z.shape[1] == 9  # wider than the components: rotated, not stretched
    apart = [np.linalg.norm(a[:50, None] - a[None, :50], axis=-1) for a in (z, wanted)]
    np.testing.assert_allclose(*apart, atol=1e-3)


def test_a_narrow_code_width_takes_a_random_subspace_of_the_components() -> None:
    rotation = random_orthonormal(8, 3, generator("narrow"))
    assert rotation.shape == (8, 3)
    assert torch.allclose(rotation.t() @ rotation, torch.eye(3, dtype=torch.float64), atol=1e-12)
    assert not torch.equal(rotation, random_orthonormal(8, 3, generator("other")))


def test_the_cold_start_measures_the_patches_that_it_projects() -> None:
    quantizer = ResidualQuantizer(codebooks=1, codes=4, width=8)
    cold = ColdStartTokenizer(geometry=GRIDS[1], quantizer=quantizer, standardise="patch", whiten=0.5)
    x = uneven(GRIDS[1])
    cold.measure([(x, None)], generator("rotation"))
    assert torch.allclose(cold.encode(x), cold.encode(4 * x - 1), atol=1e-3)
    assert cold.encode(x).flatten(0, 1).mean(0).abs().max() < 1e-4
