from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from probing import score_split

from bridle.evaluate.features import Features
from bridle.evaluate.heads import attentive
from bridle.evaluate.heads.attentive import fit_attentive
from bridle.evaluate.heads.logistic import fit_logistic

METHOD = partial(fit_attentive, seed=0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentive, "FEWEST_STEPS", 300)
    monkeypatch.setattr(attentive, "EPOCHS", 1)


def needles(items: int, seed: int, *, several: bool = False) -> Features:
    """Twelve tokens of loud noise; one of them, told by its last feature, carries the class in the others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(items, 12, 9)).astype(np.float32)
    x[:, :, 8] = 0
    y = np.arange(items) % 4
    place = rng.integers(0, 12, items)
    x[np.arange(items), place, :8] = 2 * np.random.default_rng(97).normal(size=(4, 8))[y]
    x[np.arange(items), place, 8] = 1
    return Features(x, np.eye(4, dtype=bool)[y] if several else y)


def test_attention_finds_the_one_token_that_the_mean_drowns() -> None:
    train, test = needles(200, 0), needles(100, 1)
    attended = score_split(METHOD, train, test, seed=0)
    averaged = score_split(
        fit_logistic, train._replace(x=train.x.mean(axis=1)), test._replace(x=test.x.mean(axis=1)), seed=0
    )
    assert attended.accuracy > 0.95
    assert averaged.accuracy < 0.8
    assert attended.setting["weight_decay"] in attentive.WEIGHT_DECAYS


def test_several_labels_are_learned_too() -> None:
    result = score_split(METHOD, needles(200, 0, several=True), needles(100, 1, several=True), seed=0)
    assert result.mean_average_precision > 0.95


def test_padding_is_never_looked_at() -> None:
    train, test = needles(60, 0), needles(30, 1)
    valid = np.ones((60, 12), dtype=bool)
    held = np.arange(60) % 5 == 0
    padded = Features(np.concatenate([train.x, 1e3 * train.x[:, :3]], axis=1), train.y, np.pad(valid, ((0, 0), (0, 3))))
    asked = Features(
        np.concatenate([test.x, 1e3 * test.x[:, :3]], axis=1), test.y, np.pad(valid[:30], ((0, 0), (0, 3)))
    )
    plain = METHOD(train, held).scores(test)
    np.testing.assert_allclose(METHOD(padded, held).scores(asked), plain, atol=1e-3)


def test_an_item_of_padding_only_gets_finite_scores() -> None:
    train = needles(40, 0)
    nothing = Features(np.zeros((1, 12, 9), np.float32), np.array([0]), np.zeros((1, 12), dtype=bool))
    assert np.isfinite(METHOD(train, np.zeros(40, dtype=bool)).scores(nothing)).all()


def test_the_same_seed_gives_the_same_scores_and_another_seed_others() -> None:
    train, test, held = needles(60, 0), needles(30, 1), np.arange(60) % 5 == 0
    first = METHOD(train, held).scores(test)
    assert np.array_equal(first, METHOD(train, held).scores(test))
    assert not np.array_equal(first, fit_attentive(train, held, seed=1).scores(test))


def test_settings_that_learn_side_by_side_learn_as_if_alone() -> None:
    train = needles(60, 0)
    _, targets = attentive.one_column_each(train)
    mean, scale = attentive._moments(train)
    together = attentive._learn(train, targets.float(), mean, scale, (0.01, 1.0), 0)
    alone = attentive._learn(train, targets.float(), mean, scale, (1.0,), 0)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a[1].numpy(), b[0].numpy(), atol=1e-4)
