"""Masks: refusals, padding, and moving tokens in and out of visible slots."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from bridle.errors import ConfigError, UsageError
from bridle.nn.masking import Mask, draw_mask, gather_tokens, scatter_tokens, visible_count

torch.set_num_threads(1)

Kind = Literal["random", "axes", "tube"]
KINDS: list[Kind] = ["random", "axes", "tube"]


def draw(
    kind: Kind,
    *,
    grid: tuple[int, ...] = (4, 6),
    ratio: float | tuple[float, ...] = 0.5,
    batch: int = 8,
    seed: int = 0,
    valid: Tensor | None = None,
) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    return draw_mask(kind, grid=grid, ratio=ratio, batch=batch, generator=generator, device="cpu", valid=valid)


@pytest.mark.parametrize(
    ("tokens", "ratio", "count"),
    [
        (512, 0.8, 102),
        (196, 0.8, 39),
        (196, 0.9, 20),
        (10, 0.75, 2),
        (14, 0.75, 4),
        (3, 0.9, 1),
        (5, 1.0, 1),
        (7, 0.0, 7),
    ],
)
def test_the_visible_count_rounds_ties_to_even_and_is_never_zero(tokens: int, ratio: float, count: int) -> None:
    assert visible_count(tokens, ratio) == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_mask_and_another_seed_another(kind: Kind) -> None:
    one, same, other = draw(kind), draw(kind), draw(kind, seed=1)
    assert torch.equal(one.visible, same.visible) and torch.equal(one.masked, same.masked)
    assert not torch.equal(one.masked, other.masked)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_batch_differ(kind: Kind) -> None:
    assert torch.unique(draw(kind).masked, dim=0).shape[0] > 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_shown_equally_often(kind: Kind) -> None:
    mask = draw(kind, batch=4000)
    shown = (~mask.masked).float().mean(dim=0)
    share = mask.visible.shape[1] / 24
    assert (shown - share).abs().max() < 0.04  # five standard errors of a share of .5


def test_a_ratio_of_zero_leaves_an_axis_alone() -> None:
    shown = ~draw("axes", ratio=(0.0, 0.5)).masked.reshape(8, 4, 6)
    assert torch.equal(shown, shown[:, :1].expand(-1, 4, -1))
    assert shown.sum(dim=(1, 2)).tolist() == [12] * 8


def test_rows_take_the_samples_of_a_micro_batch() -> None:
    valid = torch.ones(8, 24, dtype=torch.bool)
    valid[3, 10:] = False
    for mask in (draw("random"), draw("random", valid=valid)):
        part = mask.rows(2, 5)
        assert torch.equal(part.visible, mask.visible[2:5])
        assert torch.equal(part.masked, mask.masked[2:5])
        assert (part.visible_valid is None) == (mask.visible_valid is None)
        if part.visible_valid is not None and mask.visible_valid is not None:
            assert torch.equal(part.visible_valid, mask.visible_valid[2:5])


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_padding_the_mask_is_the_one_without(kind: Kind) -> None:
    plain, padded = draw(kind), draw(kind, valid=torch.ones(8, 24, dtype=torch.bool))
    assert torch.equal(plain.visible, padded.visible) and torch.equal(plain.masked, padded.masked)
    assert padded.visible_valid is not None and padded.visible_valid.all()
    assert plain.visible_valid is None


def test_a_short_sample_shows_its_own_share_and_flags_the_spare_slots() -> None:
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, 10:] = False
    mask = draw("random", grid=(20,), ratio=0.8, batch=2, valid=valid)
    assert mask.visible_valid is not None
    assert mask.visible_valid.sum(dim=1).tolist() == [4, 2]
    assert mask.masked.sum(dim=1).tolist() == [16, 8]
    assert (mask.visible[1][mask.visible_valid[1]] < 10).all()
    assert (mask.visible[1][~mask.visible_valid[1]] >= 10).all()  # spare slots hold padding, never a hidden token


@pytest.mark.parametrize("kind", KINDS)
def test_one_valid_token_among_padding_is_shown(kind: Kind) -> None:
    """Axes and tubes often miss a lone token; it is then shown all the same."""
    valid = torch.zeros(50, 24, dtype=torch.bool)
    valid[:, 17] = True
    mask = draw(kind, ratio=0.8, batch=50, valid=valid)
    assert mask.visible_valid is not None
    assert mask.visible_valid.sum(dim=1).tolist() == [1] * 50
    assert mask.visible[mask.visible_valid].tolist() == [17] * 50
    assert not mask.masked.any()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_one_sample_does_not_change_another(kind: Kind) -> None:
    valid = torch.ones(8, 24, dtype=torch.bool)
    valid[3] = False
    kept = [i for i in range(8) if i != 3]
    assert torch.equal(draw(kind).masked[kept], draw(kind, valid=valid).masked[kept])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_nothing_but_padding_shows_one_token_and_predicts_none(kind: Kind) -> None:
    mask = draw(kind, valid=torch.zeros(8, 24, dtype=torch.bool))
    assert mask.visible_valid is not None
    assert mask.visible_valid.sum(dim=1).tolist() == [1] * 8
    assert not mask.masked.any()


@pytest.mark.parametrize(
    ("kind", "grid", "ratio", "message"),
    [
        ("random", (4, 6), (0.5, 0.5), "takes one ratio"),
        ("tube", (4, 6), (0.5, 0.5), "takes one ratio"),
        ("axes", (4, 6), (0.5,), "one per axis"),
        ("tube", (24,), 0.5, "at least two axes"),
        ("random", (4, 6), 1.1, "from 0 to 1"),
        ("axes", (4, 6), (0.5, -0.1), "from 0 to 1"),
        ("random", (4, 6), float("nan"), "from 0 to 1"),
        ("block", (4, 6), 0.5, "expected 'random', 'axes' or 'tube'"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(
    kind: Kind, grid: tuple[int, ...], ratio: float | tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(kind, grid=grid, ratio=ratio)


def test_valid_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"expected \(8, 24\)"):
        draw("random", valid=torch.ones(8, 23, dtype=torch.bool))


def test_gather_takes_the_named_tokens() -> None:
    x = torch.arange(12).reshape(2, 3, 2)
    index = torch.tensor([[0, 2], [1, 1]])
    assert gather_tokens(x, index).tolist() == [[[0, 1], [4, 5]], [[8, 9], [8, 9]]]


def test_scatter_undoes_gather_and_fills_the_rest() -> None:
    mask = draw("random")
    x = torch.randn(8, 24, 5, generator=torch.Generator().manual_seed(3))
    fill = torch.arange(5.0)
    out = scatter_tokens(gather_tokens(x, mask.visible), mask.visible, fill, tokens=24)
    assert torch.equal(out, torch.where(mask.masked[..., None], fill, x))


def test_spare_slots_overwrite_nothing() -> None:
    """Even where a spare slot names a token that another slot shows, before or after it."""
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    index = torch.tensor([[0, 0, 2, 2]])
    flags = torch.tensor([[False, True, True, False]])
    out = scatter_tokens(x, index, torch.tensor([9.0]), tokens=3, slot_valid=flags)
    assert out.tolist() == [[[2.0], [9.0], [3.0]]]


def test_gradients_reach_shown_tokens_and_the_fill_but_not_spare_slots() -> None:
    x = torch.ones(1, 3, 1, requires_grad=True)
    fill = torch.zeros(1, requires_grad=True)
    flags = torch.tensor([[True, False, True]])
    out = scatter_tokens(x, torch.tensor([[0, 1, 3]]), fill, tokens=5, slot_valid=flags)
    (out * torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])[:, None]).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [1.0, 0.0, 1000.0]
    assert fill.grad is not None and fill.grad.tolist() == [10110.0]


def test_the_fill_takes_the_precision_of_the_tokens() -> None:
    x = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    assert scatter_tokens(x, torch.tensor([[1]]), torch.zeros(2), tokens=2).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_drawing_never_looks_at_values(kind: Kind) -> None:
    """The meta device has no values: what works there has shapes that no data decide and never waits for a device."""
    valid = torch.empty(8, 24, dtype=torch.bool, device="meta")
    generator = torch.Generator()
    for given in (None, valid):
        mask = draw_mask(kind, grid=(4, 6), ratio=0.5, batch=8, generator=generator, device="meta", valid=given)
        x = torch.empty(8, 24, 3, device="meta")
        shown = gather_tokens(x, mask.visible)
        fill = torch.empty(3, device="meta")
        back = scatter_tokens(shown, mask.visible, fill, tokens=24, slot_valid=mask.visible_valid)
        assert back.shape == x.shape
        assert mask.masked.shape == (8, 24)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for kind in KINDS:
        draw(kind, valid=torch.ones(8, 24, dtype=torch.bool))
    assert torch.equal(torch.get_rng_state(), before)
