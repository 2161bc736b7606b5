"""Encoder, decoder, tokenizers, estimator and losses: what each sees, ignores and keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bridle.config import Config
from bridle.models.build import build_cold_start, build_encoder, build_nets, build_vit_tokenizer
from bridle.models.losses import CodeTargets, Hidden, cosine_loss, encoder_loss, token_accuracy
from bridle.nn.masking import draw_mask
from bridle.seeding import generator

Small = Callable[..., Config]


def inputs(config: Config, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, *config.geometry.build().shape, generator=generator("inputs"))


def a_mask(config: Config, batch: int = 3):  # type: ignore[no-untyped-def]
    grid = config.geometry.build().grid
    return draw_mask("random", grid=grid, ratio=0.75, batch=batch, generator=generator("mask"), device="cpu")


@pytest.mark.parametrize("class_token", ["true", "false"])
def test_the_encoder_sees_only_visible_tokens(small: Small, class_token: str) -> None:
    config = small(f"encoder.class_token={class_token}")
    encoder, x, mask = build_encoder(config), inputs(config), a_mask(config)
    z = encoder(x, mask=mask).z
    hidden_pixels = torch.zeros_like(x)
    patch = config.geometry.patch
    for b in range(len(x)):  # change everything that is masked
        for t in mask.masked[b].nonzero().flatten().tolist():
            row, column = divmod(t, config.geometry.build().grid[1])
            hidden_pixels[b, :, row * patch[0] : (row + 1) * patch[0], column * patch[1] : (column + 1) * patch[1]] = 9
    assert hidden_pixels.abs().sum() > 0
    assert torch.equal(encoder(x + hidden_pixels, mask=mask).z, z)


def test_padding_does_not_reach_real_tokens(small: Small) -> None:
    config = small()
    nets, x = build_nets(config, later_tokenizer=True), inputs(config)
    valid = torch.ones(3, 64, dtype=torch.bool)
    valid[:, 56:] = False  # the last row of patches: the last two rows of pixels
    changed = x.clone()
    changed[:, :, 14:] = 5.0
    assert torch.allclose(
        nets.encoder(x, valid=valid).z[:, :56], nets.encoder(changed, valid=valid).z[:, :56], atol=1e-6
    )
    assert nets.estimator is not None
    q = torch.randn(3, 64, 8, generator=generator("q"))
    other = torch.where(valid[..., None], q, q + 1)
    assert torch.allclose(nets.estimator(q, valid=valid)[:, :56], nets.estimator(other, valid=valid)[:, :56], atol=1e-6)


def test_the_cold_start_sees_content_and_not_position(small: Small) -> None:
    tokenizer = build_cold_start(small())
    x = torch.zeros(1, 1, 16, 16)
    x[:, :, 0:2, 0:2] = x[:, :, 6:8, 10:12] = torch.randn(2, 2, generator=generator("patch"))
    z = tokenizer.encode(x)
    assert torch.equal(z[0, 0], z[0, 3 * 8 + 5])
    assert z[0, 1].abs().sum() == 0  # no bias either


def test_the_cold_start_of_the_released_code_also_sees_position(small: Small) -> None:
    tokenizer = build_cold_start(small("tokenizer.position=true"))
    z = tokenizer.encode(torch.zeros(1, 1, 16, 16))[0]  # (T, Dq)
    assert torch.cdist(z, z).add(torch.eye(len(z))).min() > 1e-3  # equal patches, no two latents alike
    assert "place" not in tokenizer.state_dict()


def test_per_patch_standardisation_removes_brightness_and_contrast(small: Small) -> None:
    tokenizer, x = build_cold_start(small("tokenizer.standardise=patch")), inputs(small())
    assert torch.allclose(tokenizer.encode(x), tokenizer.encode(3 * x + 2), atol=1e-4)


def test_per_item_standardisation_removes_the_level_of_an_item_and_keeps_contrasts_between_its_patches(
    small: Small,
) -> None:
    tokenizer, x = build_cold_start(small("tokenizer.standardise=item")), inputs(small())
    louder = x * torch.tensor([300.0, 2.0, 5.0, 1.0])[: len(x), None, None, None] + 7
    assert torch.allclose(tokenizer.encode(x * 300), tokenizer.encode(louder * 300), atol=1e-2)
    x[:, :, :8] += 3  # half of every picture is brighter: this stays
    assert not torch.allclose(tokenizer.encode(x), tokenizer.encode(inputs(small())), atol=0.1)


def test_codes_do_not_depend_on_autocast(small: Small) -> None:
    config = small()
    tokenizer, x = build_cold_start(config), inputs(config, 8)
    tokenizer.quantizer.start_codebooks(tokenizer.encode(x), generator=generator("start"))
    codes = tokenizer.tokenize(x)
    with torch.autocast("cpu", dtype=torch.float16):  # bf16 would need a safe CPU
        assert torch.equal(tokenizer.tokenize(x), codes)


def test_every_iteration_builds_a_new_tokenizer(small: Small) -> None:
    config = small()
    first, second = (build_vit_tokenizer(config, iteration=r).encoder.embed.proj.weight for r in (2, 3))
    again = build_vit_tokenizer(config, iteration=2).encoder.embed.proj.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_estimator_centres_only_when_told(small: Small) -> None:
    estimator = build_nets(small(), later_tokenizer=True).estimator
    assert estimator is not None
    z = torch.randn(2, 64, 16, generator=generator("z"))
    assert torch.equal(estimator.target(z), z)
    estimator.centre_on(torch.ones(16))
    assert torch.equal(estimator.target(z), z - 1)


def test_hidden_positions_are_the_masked_ones(small: Small) -> None:
    mask = a_mask(small())
    hidden = Hidden.of(mask.masked, 64 - mask.visible.shape[1])
    assert hidden.counted.all()
    for b in range(3):
        assert hidden.at[b].sort().values.tolist() == mask.masked[b].nonzero().flatten().tolist()
    assert torch.equal(hidden.take(torch.arange(64).expand(3, 64)), hidden.at)


def test_encoder_loss_by_hand() -> None:
    """Two samples, one with a single counted token; two heads. Mean per sample, then over samples."""
    logits = [torch.tensor([[[0.0, 0.0], [9.0, 9.0]], [[0.0, 0.0], [0.0, 0.0]]]), torch.zeros(2, 2, 4)]
    codes = torch.zeros(2, 2, 2, dtype=torch.int64)
    counted = torch.tensor([[True, False], [True, True]])
    expected = (torch.log(torch.tensor(2.0)) + torch.log(torch.tensor(4.0))) / 2
    assert torch.allclose(encoder_loss(logits, CodeTargets(codes), counted), expected)


def test_encoder_loss_ignores_what_is_not_counted() -> None:
    logits = [torch.randn(2, 5, 7, generator=generator("logits"), requires_grad=True)]
    codes, counted = torch.zeros(2, 5, 1, dtype=torch.int64), torch.ones(2, 5, dtype=torch.bool)
    counted[:, 3:] = False
    encoder_loss(logits, CodeTargets(codes), counted).backward()
    assert logits[0].grad is not None
    assert logits[0].grad[:, 3:].abs().sum() == 0
    assert (logits[0].grad[:, :3].abs().sum(-1) > 0).all()


def test_soft_targets_with_one_code_are_hard_targets() -> None:
    logits = [torch.randn(2, 5, 7, generator=generator("soft"))]
    codes = torch.randint(7, (2, 5, 1), generator=generator("codes"))
    counted = torch.ones(2, 5, dtype=torch.bool)
    soft = CodeTargets(codes, codes[..., None], torch.ones(2, 5, 1, 1))
    hard = encoder_loss(logits, CodeTargets(codes), counted)
    assert torch.allclose(encoder_loss(logits, soft, counted), hard)
    bce = nn.BCEWithLogitsLoss()(logits[0], nn.functional.one_hot(codes[..., 0], 7).float())
    assert torch.allclose(encoder_loss(logits, CodeTargets(codes), counted, kind="bce"), bce)


def test_token_accuracy_counts_first_choices() -> None:
    logits = [torch.tensor([[[2.0, 1.0], [0.0, 1.0], [5.0, 0.0]]])]
    codes, counted = torch.tensor([[[0], [0], [1]]]), torch.tensor([[True, True, False]])
    assert token_accuracy(logits, codes, counted).tolist() == [0.5]


def test_cosine_loss_in_both_forms_by_hand() -> None:
    z_hat, z = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    assert cosine_loss(z_hat, z).item() == pytest.approx(0.5)  # cosines 1 and 0
    assert cosine_loss(z_hat, z, kind="ratio").item() == pytest.approx(1 - 3 / 4)
    only_first = torch.tensor([[True, False]])
    assert cosine_loss(z_hat, z, valid=only_first).item() == pytest.approx(0.0)
    assert torch.isfinite(cosine_loss(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)))
