"""Weighted k-nearest-neighbour classification of frozen features.

Shapes: N items, D features, K classes. With x standardised by the mean and deviation of the training items, which takes
no labels, and scaled to length one, the k training items of highest cosine vote,

    score_c(x) = Σ_{i among the k nearest} exp(cos(x, x_i)/τ) · [c is a label of i],   τ = 0.07.

As they are, features share most of their length, and the few that vary most decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import Moments, fit_quality, moments_of, one_column_each
from bridle.evaluate.scorers import Score, Task, register_scorer
from bridle.evaluate.scorers.probe import classify

NEIGHBOURS = (1, 2, 5, 10, 20, 50, 100, 200)
TEMPERATURE = 0.07
ROWS = 1024  # items compared with all training items at once


class NeighbourClassifier(NamedTuple):
    """The training items themselves."""

    classes: Array  # (K,) labels of the columns
    moments: Moments
    x: Tensor  # (N, D) float32, standardised and of length one
    y: Tensor  # (N, K) float32, 1 where an item has the label
    setting: dict[str, float | bool]

    def scores(self, items: Features) -> Array:
        """(N, K) shares of the votes."""
        (found,) = _votes(self.x, self.y, unit_rows(items.x, self.moments), [int(self.setting["neighbours"])])
        return found


def knn(task: Task) -> dict[str, Score]:
    """k-NN accuracy, or mAP, beside the main score of another classifier."""
    found = classify(fit_neighbours)(task)
    return {f"k-NN {found.name}": Score(value=found.main, interval=found.interval, chance=found.chance)}


def fit_neighbours(train: Features, held: Array, *, neighbours: Sequence[int] = NEIGHBOURS) -> NeighbourClassifier:
    """Choose k on the `held` (N,) part of the training items; ties go to the smaller k."""
    held = np.atleast_2d(held)[0]  # of several parts one will do
    classes, targets = one_column_each(train)
    moments = moments_of(train.x)
    x, y = unit_rows(train.x, moments), targets.float()
    rest = torch.from_numpy(~held)
    possible = sorted({min(k, int(rest.sum())) for k in neighbours})
    best = possible[len(possible) // 2]
    if held.any() and len(possible) > 1:
        found = _votes(x[rest], y[rest], x[torch.from_numpy(held)], possible)
        best = possible[int(np.argmax([fit_quality(scores, train.y[held], classes) for scores in found]))]
    return NeighbourClassifier(classes, moments, x, y, {"neighbours": best})


def unit_rows(x: Array, moments: Moments | None = None) -> Tensor:
    """(N, D) scaled to length one, standardised by `moments` before."""
    rows = torch.from_numpy(x)
    if moments is not None:
        mean, scale = moments
        rows = ((rows.double() - mean) / scale).float()
    return torch.nn.functional.normalize(rows, dim=1)


def _votes(known: Tensor, y: Tensor, asked: Tensor, neighbours: Sequence[int]) -> Iterator[Array]:
    """For every k, from the smallest on, the (N, K) shares of the votes; the nearest items are looked up once."""
    near = [torch.topk(rows @ known.T, max(neighbours), dim=1) for rows in asked.split(ROWS)]
    cosine, index = (torch.cat([getattr(part, name) for part in near]) for name in ("values", "indices"))
    weight = ((cosine - cosine[:, :1]) / TEMPERATURE).exp()  # relative to the nearest, so that nothing overflows
    votes = asked.new_zeros(len(asked), y.shape[1])
    for n in range(max(neighbours)):  # one neighbour at a time keeps memory at (N, K)
        votes += weight[:, n, None] * y[index[:, n]]
        if n + 1 in neighbours:
            shares: Array = (votes / weight[:, : n + 1].sum(dim=1, keepdim=True)).numpy()
            yield shares


register_scorer("knn", knn)
