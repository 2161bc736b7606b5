"""Cross-validation and items with several labels: what may be seen when, and what is reported."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from probing import score_folds, score_split

from bridle.errors import DataError
from bridle.evaluate.features import Features, split_features
from bridle.evaluate.heads.logistic import fit_logistic
from bridle.evaluate.scorers.knn import fit_neighbours
from bridle.runs.results import Scores


def blobs(items: int, classes: int, width: int, *, apart: float = 1.0, seed: int = 0) -> Features:
    rng = np.random.default_rng(seed)
    centres = apart * np.random.default_rng(99).normal(size=(classes, width))
    y = np.arange(items) % classes
    return Features((centres[y] + rng.normal(size=(items, width))).astype(np.float32), y.astype(np.int64))


# folds


def one_hot_items(items: int, classes: int) -> Features:
    """Feature n is the item's own number: whoever has seen an item knows its class, nobody else can."""
    y = np.random.default_rng(5).permutation(np.arange(items) % classes)
    return Features(np.eye(items, dtype=np.float32), y)


@pytest.mark.parametrize("method", [fit_logistic, fit_neighbours])
def test_no_item_takes_part_in_fitting_the_classifier_that_scores_it(method: Any) -> None:
    items = one_hot_items(200, 2)
    everything = np.zeros(200, dtype=bool)
    seen = method(items, everything).scores(items).argmax(axis=1)
    assert (seen == items.y).mean() == 1.0  # with a leak the score would be perfect
    result = score_folds(method, items, np.arange(200) % 5, seed=0)
    assert result.accuracy < 0.65


def test_settings_are_chosen_on_whole_folds_of_the_training_folds() -> None:
    items, folds = blobs(1250, 4, 6), np.repeat([1, 2, 3, 4, 5], 250)
    asked: list[tuple[list[int], list[int]]] = []
    own = Features(np.concatenate([items.x, folds[:, None].astype(np.float32)], axis=1), items.y)

    def method(train: Features, held: Any) -> Any:
        number, (part,) = train.x[:, -1], held
        asked.append((sorted(set(number[~part].astype(int))), sorted(set(number[part].astype(int)))))
        return fit_logistic(train, held)

    score_folds(method, own, folds.tolist(), seed=0)
    assert asked == [
        ([3, 4, 5], [2]), ([1, 4, 5], [3]), ([1, 2, 5], [4]), ([1, 2, 3], [5]), ([2, 3, 4], [1])
    ]  # fmt: skip


def test_the_score_of_folds_is_their_mean_with_their_spread_and_each_is_told() -> None:
    items, folds = blobs(120, 4, 6, apart=0.6), np.repeat([1, 2, 3], [60, 40, 20])
    result = score_folds(fit_logistic, items, folds.tolist(), seed=0)
    assert result.name == "accuracy"
    each = [fold.accuracy for fold in result.folds]
    for number, accuracy in zip((1, 2, 3), each, strict=True):
        train, test = items.part(folds != number), items.part(folds == number)
        held = np.isin(folds[folds != number], number % 3 + 1)
        found = fit_logistic(train, held).scores(test)
        assert accuracy == pytest.approx((found.argmax(axis=1) == test.y).mean())
    assert result.accuracy == pytest.approx(np.mean(each))
    assert result.sd == pytest.approx(np.std(each, ddof=1))
    assert result.interval.low < result.accuracy < result.interval.high
    assert [(fold.fold, fold.test_items) for fold in result.folds] == [(1, 60), (2, 40), (3, 20)]
    assert (result.train_items, result.test_items) == (60, 120)
    assert json.loads(result.model_dump_json())["folds"][0]["setting"]["strength"] > 0


@pytest.mark.parametrize(("folds", "message"), [([1] * 20, "1 different"), ([1, 2], "got 2 fold numbers")])
def test_folds_that_do_not_fit_are_refused(folds: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_folds(fit_logistic, blobs(20, 2, 3), folds, seed=0)


def test_a_fold_without_which_one_class_is_left_is_named() -> None:
    items = Features(np.zeros((6, 2), np.float32), np.array([0, 0, 0, 0, 1, 1]))
    with pytest.raises(DataError, match="fold 2: a probe needs at least two classes"):
        score_folds(fit_logistic, items, [1, 1, 1, 2, 2, 2], seed=0)


# several labels


def labelled_blobs(items: int, classes: int, width: int, seed: int) -> Features:
    rng = np.random.default_rng(seed)
    y = rng.random((items, classes)) < 0.25
    directions = np.random.default_rng(98).normal(size=(classes, width))
    return Features((y @ directions + rng.normal(size=(items, width))).astype(np.float32), y)


def test_items_with_several_labels_get_map_auc_and_d_prime() -> None:
    result = score_split(fit_logistic, labelled_blobs(300, 5, 8, 0), labelled_blobs(150, 5, 8, 1), seed=0)
    assert result.name == "mAP"
    assert 0.6 < result.mean_average_precision <= 1 and 0.8 < result.mean_auc <= 1
    assert result.interval.low < result.mean_average_precision < result.interval.high
    assert result.mean_auc_interval.low < result.mean_auc < result.mean_auc_interval.high
    assert result.d_prime_interval[0] < result.d_prime < result.d_prime_interval[1]
    assert (result.classes, result.classes_present, result.test_items) == (5, 5, 150)
    assert result.chance == pytest.approx(0.25, abs=0.05)


def test_a_label_that_no_test_item_has_is_left_out_and_counted() -> None:
    train, test = labelled_blobs(200, 5, 8, 0), labelled_blobs(100, 5, 8, 1)
    test.y[:, 2] = False
    result = score_split(fit_logistic, train, test, seed=0)
    assert result.name == "mAP"
    assert (result.classes, result.classes_present) == (5, 4)


def test_a_label_that_training_never_saw_scores_as_chance_does() -> None:
    train, test = labelled_blobs(200, 3, 8, 0), labelled_blobs(100, 3, 8, 1)
    train.y[:, 1] = False
    scores = fit_logistic(train, np.zeros(200, dtype=bool)).scores(test)
    assert np.ptp(scores[:, [0, 2]], axis=0).min() > 1
    assert len(np.unique(scores[:, 1])) == 1


def test_several_labels_are_cross_validated_like_one() -> None:
    items = labelled_blobs(120, 4, 8, 0)
    result = score_folds(fit_logistic, items, (np.arange(120) % 3).tolist(), seed=0)
    assert result.name == "mAP"
    each = [fold.mean_average_precision for fold in result.folds]
    assert result.mean_average_precision == pytest.approx(np.mean(each))


def test_a_perfect_ranking_survives_json() -> None:
    y = np.array([[True, False], [False, True]] * 10)
    items = Features(y.astype(np.float32), y)
    found = score_split(fit_logistic, items, items, seed=0)
    assert found.mean_auc == 1.0 and found.d_prime is None
    assert Scores.model_validate_json(json.dumps(found.model_dump(mode="json"), allow_nan=False)) == found


def test_items_with_several_labels_are_split_by_their_rarest() -> None:
    y = np.zeros((50, 3), dtype=bool)
    y[:, 0] = True
    y[:10, 1] = True  # rarer than label 0, which all have
    _, test = split_features(Features(np.zeros((50, 1), np.float32), y), seed=0)
    assert (test.y[:, 1].sum(), len(test.y)) == (2, 10)
