from __future__ import annotations

import numpy as np
import pytest

from bridle.evaluate.metrics import (
    Ranking,
    balanced_accuracy,
    best_class,
    bootstrap_interval,
    bootstrap_rankings,
    d_prime,
    mean_average_precision,
    mean_of_known,
    top_k_hits,
)
from bridle.seeding import generator


def test_top_k_counts_the_true_class_among_the_k_best() -> None:
    scores = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    y = np.array([0, 1, 2])
    assert [top_k_hits(scores, y, k).mean() for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_best_class_of_equal_scores_is_the_one_that_counts_as_a_hit() -> None:
    scores = np.zeros((3, 3))
    assert best_class(scores).tolist() == [2, 2, 2]
    assert top_k_hits(scores, np.array([0, 1, 2])).mean() == pytest.approx(1 / 3)


def test_balanced_accuracy_weighs_a_rare_class_like_a_common_one() -> None:
    y = np.array([0] * 9 + [1])
    assert balanced_accuracy(np.zeros(10, dtype=int), y) == pytest.approx(0.5)


def test_average_precision_of_a_hand_worked_ranking() -> None:
    scores = np.array([[0.9], [0.8], [0.7], [0.6]])
    truth = np.array([[1], [0], [1], [0]])
    assert Ranking(scores, truth).average_precision()[0] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_a_class_without_positives_is_left_out_of_the_mean() -> None:
    scores = np.array([[0.9, 0.1], [0.1, 0.9]])
    truth = np.array([[1, 0], [0, 0]])
    assert mean_average_precision(scores, truth) == pytest.approx(1.0)


def test_the_bootstrap_interval_is_as_wide_as_the_binomial_says() -> None:
    hits = np.arange(400) < 300
    low, high = bootstrap_interval(hits, generator=generator(0, "test"))
    spread = 1.96 * np.sqrt(0.75 * 0.25 / 400)  # 0.0424
    assert low == pytest.approx(0.75 - spread, abs=0.008)
    assert high == pytest.approx(0.75 + spread, abs=0.008)


def test_the_auc_of_a_hand_worked_ranking_counts_ties_half() -> None:
    scores = np.array([[3.0], [2.0], [2.0], [1.0]])
    truth = np.array([[1], [1], [0], [0]])
    assert mean_of_known(Ranking(scores, truth).auc()) == pytest.approx(
        (1 + 1 + 0.5 + 1) / 4
    )  # four pairs, one of them a tie


def test_d_prime_of_chance_is_zero_and_of_perfection_infinite() -> None:
    assert d_prime(0.5) == 0.0
    assert d_prime(1.0) == float("inf")


def test_without_any_positive_item_there_is_no_score() -> None:
    assert np.isnan(mean_average_precision(np.ones((3, 2)), np.zeros((3, 2))))


def test_the_interval_of_a_ranking_lies_around_its_score_although_repeated_items_flatter_it() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.normal(size=(100, 20)), rng.random((100, 20)) < 0.05  # noise: few positives, low precision
    ranking = Ranking(scores, truth)
    itself = mean_of_known(ranking.average_precision())
    drawn = np.random.default_rng(1).multinomial(100, [0.01] * 100, size=200)
    flattered = np.mean([mean_of_known(ranking.average_precision(counts)) for counts in drawn])
    (found,) = bootstrap_rankings([ranking], [Ranking.average_precision], generator=generator(0, "test"))
    assert flattered > itself + 0.01
    assert (found.low + found.high) / 2 == pytest.approx(itself, abs=0.01)


def test_folds_of_uneven_size_count_alike_and_no_interval_passes_one() -> None:
    assert bootstrap_interval(np.ones(110), generator=generator(0, "test"), sizes=[10, 100]) == (1.0, 1.0)
    half = np.concatenate([np.ones(10), np.zeros(1000)])  # one fold all right, the other all wrong
    assert bootstrap_interval(half, generator=generator(0, "test"), sizes=[10, 1000]) == (0.5, 0.5)
