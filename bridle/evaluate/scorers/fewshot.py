"""Few-shot probe: what frozen features are worth with a handful of labels.

Shapes: N items, D feature width. For every draw, n training items of each class are drawn and logistic regression is
fitted on them alone; the test items are the same as in the full probe. Features are standardised by all training items,
which takes no labels: by a handful alone, a feature that hardly varies among them would swamp the others in the test
items. The regularisation is fixed, since there are no labels left to choose it by.

Draws depend on labels and seed only, so all models get the same ones and can be compared draw by draw; those of n
labels are among those of more. Where items have several labels, n items are drawn for each label.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch

from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import fit_logistic, fit_quality, in_their_span
from bridle.evaluate.scorers import Score, Task, register_scorer
from bridle.evaluate.significance import half_width
from bridle.runs.results import Interval
from bridle.seeding import generator

STRENGTH = 1.0  # C of the logistic regression


def few_shot(task: Task) -> dict[str, Score]:
    """One score for each number in `probe.shots`: mean and Student's 95 % interval over `probe.draws` draws.

    Numbers above the largest class are capped at its size. With folds, the score of a draw is the mean over them.
    """
    draws = task.settings.draws
    largest = min(max(map(len, class_orders(pair.train.y, generator(0)))) for pair in task.pairs())
    shots = sorted({min(n, largest) for n in task.settings.shots})  # what no class has is not claimed
    total = len(shots) * draws * sum(1 for _ in task.pairs())
    scores: dict[int, list[list[float]]] = {n: [[] for _ in range(draws)] for n in shots}
    sizes, short, done = dict.fromkeys(shots, 0), dict.fromkeys(shots, 0), 0
    for pair in task.pairs():
        train, test = in_their_span(pair.train, pair.test)
        for draw in range(draws):
            order = class_orders(pair.train.y, generator(task.seed, "few shots", pair.name, draw))
            for n in shots:
                rows = np.unique(np.concatenate([own[:n] for own in order]))
                sizes[n] = max(sizes[n], len(rows))
                short[n] = max(short[n], sum(len(own) < n for own in order))
                scores[n][draw].append(_score(train.part(rows), test))
                done += 1
                task.progress("few-shot probe", total, done)
    means = {n: [statistics.fmean(own) for own in scores[n]] for n in shots}
    return {f"{n} per class": over_draws(n, means[n], items=sizes[n], short=short[n]) for n in shots}


def over_draws(shots: int, scores: Sequence[float], *, items: int, short: int = 0) -> Score:
    """Mean and Student's 95 % interval of the scores of each draw, with folds the mean over them.

    `items` and `short` are the most there were.
    """
    value, half = statistics.fmean(scores), half_width(scores)
    return Score(
        value=value, interval=Interval(value - half, value + half), shots=shots, draws=tuple(scores),
        items=items, short=short,
    )  # fmt: skip


def class_orders(y: Array, source: torch.Generator) -> list[Array]:
    """The items of each class that has any, each in a random order."""
    labels = np.unique(y) if y.ndim == 1 else np.flatnonzero(y.any(axis=0))
    found = []
    for label in labels:
        items = np.flatnonzero(y == label if y.ndim == 1 else y[:, label])
        found.append(items[torch.randperm(len(items), generator=source).numpy()])
    return found


def _score(train: Features, test: Features) -> float:
    width = train.x.shape[1]
    standardised = torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    nothing = np.zeros(len(train.y), dtype=bool)
    fitted = fit_logistic(train, nothing, strengths=[STRENGTH], moments=standardised)
    return fit_quality(fitted.scores(test), test.y, fitted.classes)


register_scorer("few_shot", few_shot)
