from __future__ import annotations

import math

import numpy as np
import pytest

from bridle.evaluate.features import Features
from bridle.evaluate.scorers.knn import TEMPERATURE, fit_neighbours

NOTHING_HELD = np.zeros(3, dtype=bool)


def test_the_votes_of_a_hand_worked_neighbourhood() -> None:
    # Deviations are √2 and √2/4; standardised, the items lie along the axes and the query at (.6, .8).
    x = np.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 0.5], [0.0, -0.5]], dtype=np.float32) + 10
    train = Features(x, np.array([7, 9, 9, 7]))
    found = fit_neighbours(train, np.zeros(4, dtype=bool), neighbours=[2])
    scores = found.scores(Features(np.array([[11.2, 10.4]], dtype=np.float32), np.array([9])))
    # The cosines are .6, −.6, .8 and −.8: item 2 (label 9) and item 0 (label 7) vote.
    second = math.exp((0.6 - 0.8) / TEMPERATURE)
    assert found.classes.tolist() == [7, 9]
    assert scores[0].tolist() == pytest.approx([second / (1 + second), 1 / (1 + second)], rel=1e-5)


def test_a_feature_of_large_scale_does_not_drown_the_others() -> None:
    told = np.array([1.0, -1.0] * 20)
    noise = 1000 * np.random.default_rng(0).normal(size=40)
    items = Features(np.stack([told, noise], axis=1).astype(np.float32), (told > 0).astype(int))
    train, test = items.part(np.arange(40) < 20), items.part(np.arange(40) >= 20)
    scores = fit_neighbours(train, np.zeros(20, dtype=bool), neighbours=[5]).scores(test)
    assert (scores.argmax(1) == test.y).mean() > 0.9


def test_an_item_with_several_labels_votes_for_each() -> None:
    y = np.array([[True, True, False], [False, False, True], [False, True, False]])
    x = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=np.float32)
    scores = fit_neighbours(Features(x, y), NOTHING_HELD, neighbours=[1]).scores(Features(x, y))
    assert scores.tolist() == y.astype(float).tolist()


def test_k_is_chosen_on_the_held_items() -> None:
    # The nearest item to each held one has the wrong label, the next two the right one.
    angles = np.radians([0, 2, 3, 90, 92, 93, 1, 91])
    x = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    y = np.array([1, 0, 0, 0, 1, 1, 0, 1])
    x[[0, 3]] = x[[6, 7]]
    held = np.arange(8) >= 6
    assert fit_neighbours(Features(x, y), held, neighbours=[1, 3]).setting == {"neighbours": 3}
    assert fit_neighbours(Features(x, 1 - y), ~held, neighbours=[1]).setting == {"neighbours": 1}


def test_more_neighbours_than_items_are_not_asked_for() -> None:
    train = Features(np.eye(3, dtype=np.float32), np.array([0, 1, 1]))
    assert fit_neighbours(train, NOTHING_HELD, neighbours=[50, 100]).setting == {"neighbours": 3}


def test_features_of_length_zero_do_no_harm() -> None:
    train = Features(np.zeros((3, 2), np.float32), np.array([0, 1, 1]))
    assert np.isfinite(fit_neighbours(train, NOTHING_HELD).scores(train)).all()
