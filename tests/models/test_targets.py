"""Patches as targets, worked by hand; decoders asked for some tokens; and which configs are refused."""

from __future__ import annotations

from math import log, sqrt

import numpy as np
import pytest
import torch

from bridle.config import load_config
from bridle.errors import ConfigError, UsageError
from bridle.models.build import build_nets
from bridle.models.decoder import PatchHead
from bridle.models.losses import CodeTargets, Hidden, encoder_loss, patch_loss, patch_target
from bridle.nn.masking import draw_mask


def test_the_patch_loss_is_the_mean_over_numbers_then_tokens_then_samples() -> None:
    target = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 0.0], [9.0, 9.0]]])  # (B 2, H 2, F 2)
    guess = torch.tensor([[[1.0, 3.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    counted = torch.tensor([[True, True], [True, False]])  # the last token is padding
    # Sample 1: ((1 + 9)/2 + 0)/2 = 2.5; sample 2: (4 + 0)/2 = 2.
    assert patch_loss(guess, target, counted).item() == pytest.approx((2.5 + 2.0) / 2)


def test_a_standardised_patch_has_mean_nought_and_variance_one() -> None:
    assert patch_target(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1.0, 1.0], abs=1e-5)
    patches = np.random.default_rng(0).normal(3.0, 5.0, (4, 7, 48)).astype(np.float32)
    expected = (patches - patches.mean(-1, keepdims=True)) / np.sqrt(patches.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(patch_target(torch.from_numpy(patches)).numpy(), expected, atol=1e-5)


def test_an_even_patch_stays_finite_and_is_not_blown_up() -> None:
    assert patch_target(torch.full((3,), 0.7)).abs().max() < 1e-3
    barely = patch_target(torch.tensor([0.0, 2e-5]))  # spread 1e-5 against √(1e-10 + 1e-6)
    assert barely.tolist() == pytest.approx([-1e-5 / sqrt(1.0001e-6), 1e-5 / sqrt(1.0001e-6)], rel=1e-3)


def two_stages() -> tuple[list[torch.Tensor], CodeTargets, torch.Tensor]:
    """Stage 1 is certain of nothing (ln 2), stage 2 gives its code 3/4 (ln 4/3)."""
    logits = [torch.zeros(1, 1, 2), torch.tensor([[[log(3.0), 0.0]]])]
    return logits, CodeTargets(torch.zeros(1, 1, 2, dtype=torch.int64)), torch.ones(1, 1, dtype=torch.bool)


def test_every_stage_weighs_the_same() -> None:
    assert encoder_loss(*two_stages()).item() == pytest.approx((log(2) + log(4 / 3)) / 2)


@pytest.mark.parametrize("kind", ["window", "plain", "cross"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_asked_for_some_tokens_gives_what_it_gives_for_all(kind: str, padded: bool) -> None:
    config = load_config("digits-tiny", [f"decoder.kind={kind}", "decoder.depth=2", "geometry.patch=[2, 2]"])
    decoder, random = build_nets(config).decoder, torch.Generator().manual_seed(0)
    valid = None
    if padded:
        valid = torch.ones(3, 64, dtype=torch.bool)
        valid[1, 40:] = False
    mask = draw_mask("random", grid=(8, 8), ratio=0.5, batch=3, generator=random, device="cpu", valid=valid)
    hidden = Hidden.of(mask.masked, 32)
    z = torch.randn(3, mask.visible.shape[1], config.encoder.width, generator=random, requires_grad=True)
    every = hidden.take(decoder(z, mask=mask, valid=valid))
    some = decoder(z, mask=mask, valid=valid, only=hidden.at)
    torch.testing.assert_close(some, every)
    weight = torch.randn(some.shape, generator=random)
    slopes = [torch.autograd.grad((weight * out).sum(), z)[0] for out in (every, some)]
    torch.testing.assert_close(slopes[1], slopes[0])


@pytest.mark.parametrize("kind", ["window", "plain", "cross"])
def test_what_spare_slots_hold_does_not_reach_the_decoders_guesses(kind: str) -> None:
    config = load_config("digits-tiny", [f"decoder.kind={kind}", "geometry.patch=[2, 2]"])
    decoder, random = build_nets(config).decoder, torch.Generator().manual_seed(0)
    valid = torch.arange(64) < torch.tensor([[64], [40], [9]])
    mask = draw_mask("random", grid=(8, 8), ratio=0.5, batch=3, generator=random, device="cpu", valid=valid)
    assert mask.visible_valid is not None
    z = torch.randn(3, 32, config.encoder.width, generator=random)
    spoilt = torch.where(mask.visible_valid[..., None], z, 50.0)
    found, other = (decoder(shown, mask=mask, valid=valid)[mask.masked] for shown in (z, spoilt))
    torch.testing.assert_close(other, found)


def test_targets_of_hidden_positions_are_those_positions() -> None:
    codes = torch.arange(10).reshape(1, 5, 2)
    hidden = Hidden(torch.tensor([[4, 1]]), torch.ones(1, 2, dtype=torch.bool))
    taken = CodeTargets(codes, codes[..., None], None).at(hidden)
    assert taken.codes.tolist() == [[[8, 9], [2, 3]]]
    assert taken.soft_codes is not None
    assert taken.soft_codes.shape == (1, 2, 2, 1)
    assert taken.soft_weights is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.stage_weights=[1, 0.5]"], "was removed because other weights"),
        (["loss.target=patches", "schedule.mode=joint"], "no tokenizer to train"),
        (["schedule.tokenizer=keep", "schedule.mode=joint"], "interleaved"),
        (["encoder_phase.masks=2", "schedule.mode=joint"], "cannot be reused"),
        (["tokenizer_phase.masks=2"], "unknown key"),
        (["loss.teacher_block=9"], "give 1 to"),
        (["loss.teacher_block=0"], "teacher_block"),
        (["data.trim=true"], r"data\.trim: only recordings"),
        (["probe.layer=9"], r"probe\.layer: 9 of an encoder with"),
        (["loss.target=pixels"], "codes"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("digits-tiny", overrides)


def test_networks_for_patches_have_one_linear_head_and_no_tokenizer() -> None:
    config = load_config("digits-tiny", ["loss.target=patches"])
    nets = build_nets(config)
    assert isinstance(nets.heads, PatchHead)
    assert nets.heads.linear.weight.shape == (16, 96)  # 4 x 4 pixels, the decoder's width
    assert list(nets.modules()) == ["encoder", "decoder", "heads"]
    with pytest.raises(UsageError, match=r"loss\.target=patches"):
        _ = nets.tokenizer
