"""The head that is learned in batches: what it learns, what it is chosen by, and what it normalises with."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from probing import score_split

from bridle.config.training_schema import ProbeConfig
from bridle.errors import ConfigError
from bridle.evaluate.features import Features
from bridle.evaluate.heads import sgd as heads_sgd
from bridle.evaluate.heads.sgd import fit_head, sum_of_losses
from bridle.evaluate.metrics import mean_average_precision


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_sgd, "FEWEST_STEPS", 150)


def clouds(items: int, *, spread: float = 0.6, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)
    y = np.arange(items) % 4
    centres = np.random.default_rng(7).normal(size=(4, 6))
    return Features((5 + centres[y] + spread * random.normal(size=(items, 6))).astype(np.float32), y)


def fit(train: Features, **changes: Any) -> heads_sgd.LinearClassifier:
    held = np.arange(len(train.y)) % 5 == 0
    seed = changes.pop("seed", 0)
    return fit_head(train, held, settings=ProbeConfig(**{"head": "sgd", "epochs": 3, **changes}), seed=seed)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_it_tells_classes_apart(optimizer: Literal["sgd", "adamw"], loss: Literal["ce", "bce"]) -> None:
    train, test = clouds(200), clouds(200, seed=1)

    def method(items: Features, held: np.ndarray) -> heads_sgd.LinearClassifier:
        return fit_head(items, held, settings=ProbeConfig(head=optimizer, loss=loss, epochs=3), seed=0)

    assert score_split(method, train, test, seed=0).accuracy > 0.8


def test_the_same_seed_gives_the_same_head() -> None:
    train = clouds(60)
    a, b, other = fit(train), fit(train), fit(train, seed=1)
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, other.weight)


def test_the_learning_rate_is_chosen_on_validation_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads_sgd.LEARNING_RATES, "sgd", (0.01, 1e30))
    assert fit(clouds(100)).setting == {"learning_rate": 0.01}  # not one that diverges


def test_of_equal_learning_rates_the_lower_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads_sgd.LEARNING_RATES, "sgd", (0.01, 0.0100001))
    assert fit(clouds(100, spread=0.01)).setting == {"learning_rate": 0.01}


def test_features_are_normalised_by_running_statistics_without_weights() -> None:
    train = clouds(300)
    found = fit(train)
    np.testing.assert_allclose(found.mean.numpy(), train.x.mean(axis=0), atol=0.1)
    np.testing.assert_allclose(found.scale.numpy(), train.x.std(axis=0), rtol=0.1)
    plain = fit(train, batch_norm=False)
    assert float(plain.mean.abs().max()) == 0.0 and float(plain.scale.min()) == 1.0
    x = (torch.from_numpy(train.x) - found.mean) / found.scale
    expected = torch.log_softmax(x @ found.weight + found.bias, dim=1)
    np.testing.assert_allclose(found.scores(train), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("items", [9, 257])  # a leftover of one item would have no spread
def test_any_number_of_items_can_be_learned_from(items: int) -> None:
    assert np.isfinite(fit(clouds(items)).scores(clouds(20))).all()


def test_several_labels_are_learned_with_bce_and_ranked() -> None:
    random = np.random.default_rng(0)
    y = random.random((300, 3)) < 0.3
    x = (y @ random.normal(size=(3, 8)) + 0.2 * random.normal(size=(300, 8))).astype(np.float32)
    found = fit(Features(x, y), head="adamw")
    assert mean_average_precision(found.scores(Features(x, y)), y) > 0.9
    with pytest.raises(ConfigError, match=r"probe\.loss: 'ce' needs one label per item"):
        fit(Features(x, y), loss="ce")


def test_losses_are_means_over_items_and_sums_over_settings() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])  # (S, B, K)
    y = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    ce = (np.log(1 + np.exp(-2)) + np.log(1 + np.exp(-1))) / 2 + np.log(2)
    bce = (np.log(1 + np.exp(-2)) + np.log(2) + np.log(2) + np.log(1 + np.exp(-1))) / 2 + 2 * np.log(2)
    assert float(sum_of_losses(logits, y, "ce")) == pytest.approx(ce)
    assert float(sum_of_losses(logits, y, "bce")) == pytest.approx(bce)


def test_a_given_learning_rate_is_taken_without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads_sgd.LEARNING_RATES, "adamw", ())
    head = fit(clouds(60), head="adamw", learning_rate=4e-3, epochs=1, batch=20)
    assert head.setting == {"learning_rate": 4e-3}
    assert 0 < head.weight.abs().max() <= 3 * 4e-3  # three steps of AdamW, and not FEWEST_STEPS of them


def test_epochs_batch_and_warm_up_decide_rates_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    fit(clouds(40), head="adamw", learning_rate=0.4, epochs=4, batch=20, warmup_epochs=1)
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.3732, 0.3, 0.2, 0.1, 0.0268], abs=1e-4)


def test_betas_decay_and_draws_of_an_epoch_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def watched(self: torch.optim.AdamW) -> None:
        weight, bias = self.param_groups
        seen.append((weight["betas"], bias["betas"], weight["weight_decay"], bias["weight_decay"]))

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    optimizer = {"head": "adamw", "learning_rate": 0.4, "betas": (0.8, 0.9), "weight_decay": 0.3}
    fit(clouds(40), **optimizer, epochs=4, batch=20, epoch_items=60)
    assert seen == [((0.8, 0.9), (0.8, 0.9), 0.3, 0.0)] * 12  # four epochs of three steps


def test_balanced_sampling_draws_rare_classes_as_often_as_common_ones() -> None:
    y = torch.eye(2)[torch.tensor([0] * 90 + [1] * 10)]
    settings = ProbeConfig(head="adamw", sampling="balanced", epoch_items=1000, batch=100)
    drawn = np.concatenate(list(heads_sgd._batches(y, 40, 10, settings, seed=0)))
    assert len(drawn) == 4000
    assert abs((drawn >= 90).mean() - 0.5) < 0.03
