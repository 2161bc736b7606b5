"""Masks of every kind on every grid: exact counts, a clean split, structure, padding."""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridle.nn.masking import Mask, draw_mask, gather_tokens, scatter_tokens

torch.set_num_threads(1)

Kind = Literal["random", "axes", "tube"]
grids = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
ratios = st.one_of(st.sampled_from([0.0, 0.2, 0.5, 0.75, 0.8, 0.9, 1.0]), st.floats(0.0, 1.0))
seeds = st.integers(0, 2**32)


def count(tokens: int, ratio: float) -> int:
    return max(1, round((1 - ratio) * tokens))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kind, tuple[int, ...], float | tuple[float, ...], int]:
    """A kind, a grid, a ratio, and V worked out from the definition."""
    grid: tuple[int, ...] = draw(grids)
    kind: Kind = draw(st.sampled_from(["random", "axes", "tube"] if len(grid) > 1 else ["random", "axes"]))
    if kind == "axes":
        per_axis = tuple(draw(ratios) for _ in grid)
        return kind, grid, per_axis, prod(count(n, r) for n, r in zip(grid, per_axis, strict=True))
    ratio = draw(ratios)
    return kind, grid, ratio, count(prod(grid), ratio) if kind == "random" else grid[0] * count(prod(grid[1:]), ratio)


def check_slots(mask: Mask, tokens: int) -> None:
    assert mask.visible.dtype == torch.int64
    assert mask.masked.dtype == torch.bool
    assert (mask.visible >= 0).all() and (mask.visible < tokens).all()
    assert (mask.visible.diff(dim=1) > 0).all()  # ascending, none twice


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=seeds)
def test_visible_and_masked_split_the_tokens_with_exact_counts(
    case: tuple[Kind, tuple[int, ...], float | tuple[float, ...], int], seed: int
) -> None:
    kind, grid, ratio, V = case
    generator = torch.Generator().manual_seed(seed)
    mask = draw_mask(kind, grid=grid, ratio=ratio, batch=3, generator=generator, device="cpu")
    check_slots(mask, prod(grid))
    assert mask.visible.shape == (3, V)
    assert V >= 1
    assert mask.visible_valid is None
    for b in range(3):
        hidden = set(mask.masked[b].nonzero().flatten().tolist())
        shown = set(mask.visible[b].tolist())
        assert not hidden & shown
        assert hidden | shown == set(range(prod(grid)))


@settings(max_examples=60, deadline=None)
@given(grid=st.lists(st.integers(1, 6), min_size=2, max_size=3).map(tuple), ratio=ratios, seed=seeds)
def test_a_tube_is_the_same_at_every_time(grid: tuple[int, ...], ratio: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = draw_mask("tube", grid=grid, ratio=ratio, batch=3, generator=generator, device="cpu")
    over_time = mask.masked.reshape(3, grid[0], -1)
    assert (over_time == over_time[:, :1]).all()


@settings(max_examples=60, deadline=None)
@given(grid=grids, data=st.data(), seed=seeds)
def test_an_axes_mask_shows_a_product_of_kept_positions(grid: tuple[int, ...], data: st.DataObject, seed: int) -> None:
    ratio = tuple(data.draw(ratios) for _ in grid)
    generator = torch.Generator().manual_seed(seed)
    mask = draw_mask("axes", grid=grid, ratio=ratio, batch=3, generator=generator, device="cpu")
    for b in range(3):
        shown = ~mask.masked[b].reshape(grid)
        product = torch.ones(grid, dtype=torch.bool)
        for axis, (n, r) in enumerate(zip(grid, ratio, strict=True)):
            kept = shown.movedim(axis, 0).reshape(n, -1).any(dim=1)
            assert kept.sum() == count(n, r)
            product &= kept.reshape([-1 if k == axis else 1 for k in range(len(grid))])
        assert torch.equal(shown, product)


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=seeds, share=st.floats(0.0, 1.0))
def test_padding_is_neither_shown_nor_predicted(
    case: tuple[Kind, tuple[int, ...], float | tuple[float, ...], int], seed: int, share: float
) -> None:
    kind, grid, ratio, V = case
    tokens = prod(grid)
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(4, tokens, generator=generator) < share
    valid[:, seed % tokens] = True
    mask = draw_mask(kind, grid=grid, ratio=ratio, batch=4, generator=generator, device="cpu", valid=valid)
    check_slots(mask, tokens)
    assert mask.visible.shape == (4, V)
    assert mask.visible_valid is not None
    for b in range(4):
        real = set(valid[b].nonzero().flatten().tolist())
        hidden = set(mask.masked[b].nonzero().flatten().tolist())
        shown = set(mask.visible[b][mask.visible_valid[b]].tolist())
        spare = set(mask.visible[b][~mask.visible_valid[b]].tolist())
        assert shown
        assert hidden | shown == real
        assert not hidden & shown
        assert not spare & real
        if kind == "random":
            assert isinstance(ratio, float)
            assert len(shown) == count(len(real), ratio)


@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=seeds)
def test_scatter_puts_back_what_gather_took(
    case: tuple[Kind, tuple[int, ...], float | tuple[float, ...], int], seed: int
) -> None:
    kind, grid, ratio, _ = case
    tokens = prod(grid)
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(2, tokens, generator=generator) < 0.7
    mask = draw_mask(kind, grid=grid, ratio=ratio, batch=2, generator=generator, device="cpu", valid=valid)
    x, fill = torch.randn(2, tokens, 3, generator=generator), torch.randn(3, generator=generator)
    taken = gather_tokens(x, mask.visible)
    out = scatter_tokens(taken, mask.visible, fill, tokens=tokens, slot_valid=mask.visible_valid)
    assert mask.visible_valid is not None
    for b in range(2):
        shown = set(mask.visible[b][mask.visible_valid[b]].tolist())
        for t in range(tokens):
            assert torch.equal(out[b, t], x[b, t] if t in shown else fill)
