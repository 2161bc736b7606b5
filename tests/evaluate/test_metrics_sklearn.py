"""bridle.evaluate.metrics against scikit-learn, with ties and absent classes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.stats import norm
from sklearn import metrics as sklearn_metrics

from bridle.evaluate import metrics

CASES = range(20)


def case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """scores (N, K) with many equal values, labels y that miss some classes, truth (N, K) with empty columns."""
    rng = np.random.default_rng(seed)
    items, classes = int(rng.integers(5, 60)), int(rng.integers(3, 9))
    scores = rng.integers(0, 4, (items, classes)) / 4.0
    y = rng.choice(rng.permutation(classes)[: max(2, classes - 2)], items)
    truth = rng.random((items, classes)) < 0.3
    truth[:, 0] = False
    truth[0, 1:] = True
    return scores, y, truth


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_accuracy_equals_scikit_learns(seed: int, k: int) -> None:
    scores, y, _ = case(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # k ≥ classes is scored 1 with a warning
        expected = sklearn_metrics.top_k_accuracy_score(y, scores, k=k, labels=np.arange(scores.shape[1]))
    assert metrics.top_k_hits(scores, y, k).mean() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_balanced_accuracy_equals_scikit_learns(seed: int) -> None:
    scores, y, _ = case(seed)
    predicted = metrics.best_class(scores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # answers with classes that y lacks
        expected = sklearn_metrics.balanced_accuracy_score(y, predicted)
    assert metrics.balanced_accuracy(predicted, y) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_mean_average_precision_equals_scikit_learns_over_the_classes_present(seed: int) -> None:
    scores, _, truth = case(seed)
    expected = sklearn_metrics.average_precision_score(truth[:, 1:], scores[:, 1:], average="macro")
    assert metrics.mean_average_precision(scores, truth) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_average_precision_and_auc_of_every_class_equal_scikit_learns(seed: int) -> None:
    scores, _, truth = case(seed)
    ranking = metrics.Ranking(scores, truth)
    for c in range(1, scores.shape[1]):
        expected = sklearn_metrics.average_precision_score(truth[:, c], scores[:, c])
        assert ranking.average_precision()[c] == pytest.approx(expected, abs=1e-12)
        if not truth[:, c].all():
            expected = sklearn_metrics.roc_auc_score(truth[:, c], scores[:, c])
            assert ranking.auc()[c] == pytest.approx(expected, abs=1e-12)
    assert np.isnan(ranking.average_precision()[0]) and np.isnan(ranking.auc()[0])


@pytest.mark.parametrize("seed", CASES)
def test_the_mean_auc_is_over_the_classes_that_some_items_have_and_some_have_not(seed: int) -> None:
    scores, _, truth = case(seed)
    truth[:, 1] = True
    known = [c for c in range(2, scores.shape[1]) if not truth[:, c].all()]
    expected = np.mean([sklearn_metrics.roc_auc_score(truth[:, c], scores[:, c]) for c in known])
    assert metrics.mean_of_known(metrics.Ranking(scores, truth).auc()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_an_item_counted_twice_scores_as_two_items_would(seed: int) -> None:
    scores, _, truth = case(seed)
    counts = np.random.default_rng(seed).integers(0, 3, len(scores))
    counts[0] = 1  # keeps a positive item of every class
    ranking = metrics.Ranking(scores, truth)
    for c in range(1, scores.shape[1]):
        own, ranks = np.repeat(truth[:, c], counts), np.repeat(scores[:, c], counts)
        expected = sklearn_metrics.average_precision_score(own, ranks)
        assert ranking.average_precision(counts)[c] == pytest.approx(expected, abs=1e-12)
        if not own.all():
            assert ranking.auc(counts)[c] == pytest.approx(sklearn_metrics.roc_auc_score(own, ranks), abs=1e-12)


@pytest.mark.parametrize("area", [0.2, 0.5, 0.85, 0.975])
def test_d_prime_is_the_distance_of_two_normal_distributions_with_that_auc(area: float) -> None:
    assert metrics.d_prime(area) == pytest.approx(np.sqrt(2) * norm.ppf(area), abs=1e-9)
    # P(a draw of the shifted one lies above a draw of the other) = Φ(d′/√2)
    assert norm.cdf(metrics.d_prime(area) / np.sqrt(2)) == pytest.approx(area)
