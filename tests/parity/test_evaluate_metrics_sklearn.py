"""bridle.evaluate.metrics against scikit-learn, with ties and absent classes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
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
    assert metrics.top_k_accuracy(scores, y, k) == pytest.approx(expected, abs=1e-12)


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
