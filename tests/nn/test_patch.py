"""Patches: order of tokens and features, and refusals."""

from __future__ import annotations

import pytest
import torch

from bridle.errors import UsageError
from bridle.geometry import Geometry
from bridle.nn.patch import PatchEmbed, patchify, unpatchify

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
