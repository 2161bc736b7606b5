"""Patches: order of tokens and features, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridle.errors import UsageError
from bridle.geometry import Geometry
from bridle.nn.patch import ITEM_FLOOR, PatchEmbed, patchify, standardise_items, unpatchify

torch.set_num_threads(1)


def test_tokens_run_row_by_row_and_features_channel_by_channel() -> None:
    x = torch.arange(16).reshape(1, 2, 2, 4)  # channel 0 holds 0-7, channel 1 holds 8-15
    tokens = patchify(x, (1, 2))
    assert tokens.tolist() == [[[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]]


def test_a_patch_keeps_its_rows_in_order() -> None:
    x = torch.arange(8).reshape(1, 1, 2, 4)
    assert patchify(x, (2, 2)).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_unpatchify_of_one_hand_made_token_order() -> None:
    tokens = torch.tensor([[[0, 1, 4, 5], [2, 3, 6, 7]]])
    x = unpatchify(tokens, channels=1, grid=(1, 2), patch=(2, 2))
    assert x.tolist() == [[[[0, 1, 2, 3], [4, 5, 6, 7]]]]


@pytest.mark.parametrize("shape", [(1, 1, 5, 4), (1, 1, 4), (1, 1, 4, 4, 4)])
def test_an_input_the_patch_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"patches of \[2, 2\]"):
        patchify(torch.zeros(shape), (2, 2))


@pytest.mark.parametrize("shape", [(1, 3, 4), (1, 2, 5), (2, 4)])
def test_tokens_that_do_not_fill_the_grid_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"expected \(B, 2, 4\)"):
        unpatchify(torch.zeros(shape), channels=1, grid=(1, 2), patch=(2, 2))


@pytest.mark.parametrize("shape", [(2, 1, 8, 4), (2, 3, 4, 8), (1, 8, 4), (2, 3, 8, 4, 1)])
def test_a_wrong_input_shape_names_the_expected_and_the_given_one(shape: tuple[int, ...]) -> None:
    embed = PatchEmbed(geometry=Geometry(3, (8, 4), (2, 2)), width=6)
    with pytest.raises(UsageError) as caught:
        embed(torch.zeros(shape))
    assert "(B, 3, 8, 4)" in str(caught.value)
    assert str(tuple(shape)) in str(caught.value)


def test_embedding_works_on_the_meta_device() -> None:
    with torch.device("meta"):
        embed = PatchEmbed(geometry=Geometry(3, (8, 4), (2, 2)), width=6)
        assert embed(torch.empty(5, 3, 8, 4)).shape == (5, 8, 6)


def test_an_item_loses_its_mean_along_an_axis_and_its_deviation_without_its_padding() -> None:
    geometry = Geometry(2, (6, 4), (2, 2))
    x = torch.from_numpy(np.random.default_rng(0).normal(3, 2, (2, 2, 6, 4))).float()
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 4:] = False  # the second item ends after 4 of 6 rows
    found = standardise_items(patchify(x, (2, 2)), geometry, axes=[0], valid=valid)
    for i, rows in ((0, 6), (1, 4)):
        real = x[i, :, :rows].double().numpy()
        wanted = real - real.mean(1, keepdims=True)  # every channel and column by itself
        wanted /= wanted.std() + ITEM_FLOOR
        got = unpatchify(found[i : i + 1, : rows * 1], channels=2, grid=(rows // 2, 2), patch=(2, 2))[0]
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)
