"""Patches on every rank: nothing lost, nothing moved."""

from __future__ import annotations

import itertools
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.nn.patch import patchify, unpatchify

torch.set_num_threads(1)

axes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(axes=axes, batch=st.integers(1, 3), channels=st.integers(1, 3))
def test_unpatchify_undoes_patchify(axes: list[tuple[int, int]], batch: int, channels: int) -> None:
    grid, patch = tuple(g for g, _ in axes), tuple(p for _, p in axes)
    shape = (batch, channels, *(g * p for g, p in axes))
    x = torch.arange(prod(shape)).reshape(shape)
    tokens = patchify(x, patch)
    assert tokens.shape == (batch, prod(grid), channels * prod(patch))
    assert torch.equal(unpatchify(tokens, channels=channels, grid=grid, patch=patch), x)


@settings(max_examples=40, deadline=None)
@given(axes=axes, channels=st.integers(1, 3))
def test_each_token_is_the_slice_of_the_input_at_its_place(axes: list[tuple[int, int]], channels: int) -> None:
    shape = (2, channels, *(g * p for g, p in axes))
    x = torch.arange(prod(shape)).reshape(shape)
    tokens = patchify(x, tuple(p for _, p in axes))
    for t, place in enumerate(itertools.product(*(range(g) for g, _ in axes))):
        cut = tuple(slice(i * p, (i + 1) * p) for i, (_, p) in zip(place, axes, strict=True))
        assert torch.equal(tokens[:, t], x[(slice(None), slice(None), *cut)].reshape(2, -1))
