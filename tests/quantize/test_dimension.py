"""Effective dimension of latents and codes."""

from __future__ import annotations

import pytest
import torch

from bridle.quantize import ResidualQuantizer
from bridle.quantize.dimension import NarrowWatch, SpreadSums, code_spreads, is_narrow


def test_the_dimension_counts_directions_that_vary_alike() -> None:
    corners = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0]])
    found = SpreadSums.of(corners + 7).spread()  # a plane, wherever it lies
    assert found == pytest.approx((2.0, 0.5))


def test_one_strong_direction_makes_the_dimension_small() -> None:
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 30  # λ = 900 beside 63 times 1
    found = SpreadSums.of(x).spread()
    assert found is not None
    assert found.dimension == pytest.approx(963**2 / (900**2 + 63), rel=0.05)
    assert found.first == pytest.approx(900 / 963, rel=0.02)


def test_a_code_that_is_not_used_does_not_count_and_one_code_has_no_directions() -> None:
    code = torch.tensor([[1.0, 0], [-1, 0], [0, 50]])
    (two, one) = code_spreads([torch.tensor([5, 5, 0]), torch.tensor([0, 3, 0])], [code, code])
    assert two == pytest.approx((1.0, 1.0))
    assert one is None


def test_sums_of_parts_are_those_of_the_whole_and_padding_is_left_out() -> None:
    rq = ResidualQuantizer(codebooks=2, codes=8, width=6)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    rq.start_codebooks(x, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(40) < 25
    padded = torch.where(valid[:, None], x, 1e6)
    a, b = rq(x[:10]).input_sums(), rq(x[10:25]).input_sums()
    for first, second, whole in zip(a, b, rq(padded, valid=valid).input_sums(), strict=True):
        torch.testing.assert_close((first + second).outer, whole.outer)


def test_three_and_a_half_of_sixty_four_directions_are_narrow() -> None:
    assert is_narrow(3.5, directions=64)
    assert not is_narrow(9.0, directions=64)
    assert not is_narrow(1.6, directions=2)


def test_a_narrow_book_is_told_once_and_again_after_it_had_recovered() -> None:
    watch = NarrowWatch(64, from_step=50)
    assert watch.look(step=10, dimensions=[3.5]) == []
    (text,) = watch.look(step=50, dimensions=[3.5, 30.0])
    assert "stage 1 is narrow: its codes fill 3.5 of 64 directions" in text
    assert watch.look(step=60, dimensions=[3.6, 30.0]) == []
    assert watch.look(step=70, dimensions=[20.0, 30.0]) == []
    assert len(watch.look(step=80, dimensions=[3.5, 30.0])) == 1
