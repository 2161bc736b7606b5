"""The classifier: pooling over what is real and visible, the losses, and the running mean of weights."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import nn

from bridle.config import load_config
from bridle.geometry import Geometry
from bridle.models.build import build_classifier, build_encoder
from bridle.models.classifier import Classifier, classification_loss
from bridle.models.encoder import Encoded, Encoder
from bridle.nn.masking import Mask, draw_mask
from bridle.nn.transformer import initialise

GRID = Geometry(channels=1, input=(4, 6), patch=(2, 2))  # 2 x 3 tokens


def classifier(pool: Literal["mean", "axis", "class"] = "mean", axis: int = 0) -> Classifier:
    encoder = Encoder(geometry=GRID, width=8, depth=2, heads=2, class_token=pool == "class")
    model = Classifier(encoder=encoder, classes=3, pool=pool, axis=axis)
    random = torch.Generator().manual_seed(0)
    initialise(model, generator=random)
    return model.eval()


def inputs(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 1, 4, 6, generator=torch.Generator().manual_seed(1))


def a_mask(batch: int, valid: torch.Tensor | None = None, ratio: float = 0.5) -> Mask:
    random = torch.Generator().manual_seed(2)
    return draw_mask("random", grid=GRID.grid, ratio=ratio, batch=batch, generator=random, device="cpu", valid=valid)


def test_each_pooling_by_hand() -> None:
    z = torch.arange(2 * 6 * 8.0).reshape(2, 6, 8)
    valid = torch.tensor([[True] * 6, [True, True, False, True, False, False]])
    mean = classifier().pooled(Encoded(z, None), valid, None)
    assert torch.equal(mean[:, 0], torch.stack([z[0].mean(0), z[1, [0, 1, 3]].mean(0)]))
    columns = classifier("axis", 1).pooled(Encoded(z, None), valid, None)  # one mean for each of three columns
    assert torch.equal(columns[0], torch.stack([z[0, [0, 3]].mean(0), z[0, [1, 4]].mean(0), z[0, [2, 5]].mean(0)]))
    assert torch.equal(columns[1], torch.stack([z[1, [0, 3]].mean(0), z[1, 1], torch.zeros(8)]))
    token = torch.ones(2, 8)
    assert torch.equal(classifier("class").pooled(Encoded(z, token), valid, None)[:, 0], token)


def test_deviations_stand_behind_the_means_and_have_a_gradient_where_there_is_no_spread() -> None:
    z = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    valid = torch.tensor([[True] * 6, [True, True, False, True, False, False]])
    encoder = Encoder(geometry=GRID, width=8, depth=1, heads=2)
    model = Classifier(encoder=encoder, classes=3, pool="axis", axis=1, deviation=True)
    found = model.pooled(Encoded(z, None), valid, None)  # (2, 3 means and 3 deviations, 8)
    torch.testing.assert_close(found[:, :3], classifier("axis", 1).pooled(Encoded(z, None), valid, None))
    torch.testing.assert_close(found[0, 4], z[0, [1, 4]].std(0, correction=0))
    assert not found[1, 4:].any()  # one real token, and none
    found.sum().backward()
    assert z.grad is not None and bool(z.grad.isfinite().all())
    assert model.head.in_features == 6 * 8
    plain = Classifier(encoder=encoder, classes=3, deviation=True)
    torch.testing.assert_close(
        plain.pooled(Encoded(z, None), None, None)[:, 1], z.detach().std(1, correction=0), check_stride=False
    )


def test_the_setting_reaches_the_head() -> None:
    config = load_config("digits-tiny", ["finetune.deviation=true"])
    head = build_classifier(config, build_encoder(config), classes=10, iteration=1).head
    assert head.in_features == 2 * config.encoder.width


@pytest.mark.parametrize("padded", [False, True])
def test_pooling_under_a_mask_sees_the_visible_real_tokens_only(padded: bool) -> None:
    valid = torch.tensor([[True] * 6, [True, True, True, True, False, False]]) if padded else None
    mask = a_mask(2, valid)
    z = torch.randn(2, mask.visible.shape[1], 8, generator=torch.Generator().manual_seed(3))
    mean = classifier().pooled(Encoded(z, None), valid, mask)[:, 0]
    rows = classifier("axis", 0).pooled(Encoded(z, None), valid, mask)  # (2, 2 rows, 8)
    for b in range(2):
        flags = [True] * z.shape[1] if mask.visible_valid is None else mask.visible_valid[b].tolist()
        seen = {int(t): z[b, v] for v, t in enumerate(mask.visible[b]) if flags[v]}
        torch.testing.assert_close(mean[b], torch.stack(list(seen.values())).mean(0))
        for row in range(2):
            inside = [vector for t, vector in seen.items() if t // 3 == row]
            torch.testing.assert_close(rows[b, row], torch.stack(inside).mean(0) if inside else torch.zeros(8))


@pytest.mark.parametrize("pool", ["mean", "axis", "class"])
def test_a_mask_reduces_the_tokens_that_are_computed(pool: Literal["mean", "axis", "class"]) -> None:
    model, seen = classifier(pool), []
    block = model.encoder.trunk.blocks[0]
    block.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    extra = int(pool == "class")
    assert model(inputs()).shape == (2, 3)
    assert model(inputs(), mask=a_mask(2)).shape == (2, 3)
    assert seen == [6 + extra, 3 + extra]


def test_hidden_tokens_and_padding_do_not_change_the_answer() -> None:
    model, x, mask = classifier(), inputs(1), a_mask(1)
    hidden = int(torch.nonzero(mask.masked[0])[0])
    row, column = divmod(hidden, 3)
    other = x.clone()
    other[..., 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 9.0
    assert torch.equal(model(x, mask=mask), model(other, mask=mask))
    assert not torch.equal(model(x), model(other))
    valid = torch.ones(1, 6, dtype=torch.bool)
    valid[0, hidden] = False
    torch.testing.assert_close(model(x, valid=valid), model(other, valid=valid))


def test_the_head_starts_near_zero_and_the_same_for_the_same_generator() -> None:
    one, two = classifier(), classifier()
    for model in (one, two):
        model.start_head(torch.Generator().manual_seed(4))
    assert torch.equal(one.head.weight, two.head.weight)
    assert 0 < one.head.weight.abs().max() < 1e-4
    assert classification_loss(one(inputs()), torch.tensor([0, 2]), kind="ce").item() == pytest.approx(
        math.log(3), 1e-3
    )


def test_losses_equal_torchs_and_the_formula() -> None:
    random = torch.Generator().manual_seed(5)
    logits, target = torch.randn(4, 5, generator=random), torch.tensor([0, 4, 2, 2])
    smooth = classification_loss(logits, target, kind="ce", label_smoothing=0.1)
    torch.testing.assert_close(smooth, nn.functional.cross_entropy(logits, target, label_smoothing=0.1))
    shares = torch.tensor([[0.3, 0.7, 0, 0, 0], [1.0, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1.0]])
    torch.testing.assert_close(
        classification_loss(logits, shares, kind="ce"), nn.functional.cross_entropy(logits, shares)
    )
    hot = nn.functional.one_hot(target, 5).float()
    bce = nn.BCEWithLogitsLoss()
    torch.testing.assert_close(classification_loss(logits, target, kind="bce"), bce(logits, hot))
    several = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 1]])
    torch.testing.assert_close(
        classification_loss(logits, several, kind="bce", label_smoothing=0.2), bce(logits, 0.8 * several + 0.04)
    )


def test_losses_are_computed_in_float32() -> None:
    logits = torch.tensor([[3.0, -2.0]], dtype=torch.bfloat16)
    assert classification_loss(logits, torch.tensor([0]), kind="ce").dtype == torch.float32


def test_pooled_features_are_standardised_by_the_inputs_before_training() -> None:
    geometry = Geometry(channels=1, input=(8, 8), patch=(4, 4))
    encoder = Encoder(geometry=geometry, width=16, depth=1, heads=2)
    model = Classifier(encoder=encoder, classes=3)
    x = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(x)
    assert seen[-1].mean(0).abs().max() > 0.1  # a large part is common to all
    model.standardise([(x[:25], None), (x[25:], None)])
    model(x)
    torch.testing.assert_close(seen[-1].mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen[-1].std(0, correction=0), torch.ones(16), atol=1e-3, rtol=0)
