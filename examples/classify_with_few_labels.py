"""Classify with few labels: logistic regression on a model's features, beside the same on raw pixels.

    python examples/classify_with_few_labels.py

The digits come with the package; 1, 3, 10 and 30 labels of each class are drawn five times, and the mean accuracy on
the 360 test digits is printed.
"""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import bridle
from bridle.data.embedded.sets import digits


def main() -> dict[int, tuple[float, float]]:
    """{labels per class: (accuracy of features, of pixels)}"""
    model = bridle.load("digits-tiny")
    splits = digits()
    x = {"train": splits.train.x, "test": splits.test.x}  # (N, 1, 16, 16) in 0 … 1
    y = {"train": np.array(splits.train.labels), "test": np.array(splits.test.labels)}
    # One mean per row of patches says more about a digit than one for all of them.
    features = {name: model.encode(pictures, pool="axis", axis=0).numpy() for name, pictures in x.items()}
    pixels = {name: pictures.flatten(1).numpy() for name, pictures in x.items()}

    results = {}
    print("labels per class   features %   pixels %")
    for count in (1, 3, 10, 30):
        scores = np.array([[accuracy(of, y, count, seed) for of in (features, pixels)] for seed in range(5)])
        results[count] = (scores[:, 0].mean(), scores[:, 1].mean())
        print(f"{count:>16}   {100 * results[count][0]:>10.1f}   {100 * results[count][1]:>8.1f}")
    return results


def accuracy(of: dict[str, np.ndarray], y: dict[str, np.ndarray], count: int, seed: int) -> float:
    """Of a classifier that has seen `count` items of each class."""
    order = np.random.default_rng(seed).permutation(len(y["train"]))
    chosen = np.concatenate([order[y["train"][order] == label][:count] for label in range(10)])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    classifier.fit(of["train"][chosen], y["train"][chosen])
    return float(classifier.score(of["test"], y["test"]))


if __name__ == "__main__":
    main()
