"""Few-shot probe: what frozen features are worth with a handful of labels.

Shapes: N items, D feature width. For every draw, n training items of each class are drawn and logistic regression is
fitted on them alone; the test items are the same as in the full probe. Features are standardised by all training items,
which takes no labels: by a handful alone, a feature that hardly varies among them would swamp the others in the test
items. The regularisation is fixed, since there are no labels left to choose it by.

Draws depend on labels and seed only, so all models are given the same ones and can be compared draw by draw; those of
n labels are among those of more. Where items have several labels, n items that have it are drawn for each label.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import fit_logistic, fit_quality, moments_of
from bridle.evaluate.metrics import Interval
from bridle.evaluate.probe import Pair
from bridle.evaluate.significance import compare, half_width
from bridle.seeding import generator

STRENGTH = 1.0  # C of the logistic regression


class FewShot(NamedTuple):
    """The probe with so many labels per class."""

    shots: int
    several: bool  # labels per item: then the score is mAP, else accuracy
    scores: list[float]  # of each draw; with folds the mean over them
    train_items: int  # of a draw, the most there were
    short: int  # classes with fewer training items, of which all were taken; with folds the most there were

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: mean and Student's 95 % interval over draws."""
        score, half = statistics.fmean(self.scores), half_width(self.scores)
        return {
            "shots": self.shots,
            "mean_average_precision" if self.several else "accuracy": score,
            "interval": list(Interval(score - half, score + half)),
            "sd": statistics.stdev(self.scores),
            "draws": len(self.scores),
            "scores": self.scores,
            "train_items": self.train_items,
            "short": self.short,
        }


def few_shots(
    pairs: Iterable[Pair], *, shots: Sequence[int], draws: int, seed: int, tell: Callable[[int], None] | None = None
) -> list[FewShot]:
    """Every number of shots on the same pairs (one, or one per fold) of training and test items.

    `tell` hears how many classifiers have been fitted.
    """
    scores: dict[int, list[list[float]]] = {n: [[] for _ in range(draws)] for n in shots}
    sizes, short, done, several = dict.fromkeys(shots, 0), dict.fromkeys(shots, 0), 0, False
    for pair in pairs:
        moments, several = moments_of(pair.train.x), pair.train.several
        for draw in range(draws):
            order = class_orders(pair.train.y, generator(seed, "few shots", pair.name, draw))
            for n in shots:
                rows = np.unique(np.concatenate([own[:n] for own in order]))
                sizes[n] = max(sizes[n], len(rows))
                short[n] = max(short[n], sum(len(own) < n for own in order))
                scores[n][draw].append(_score(pair.train.part(rows), pair.test, moments))
                done += 1
                if tell is not None:
                    tell(done)
    return [FewShot(n, several, [statistics.fmean(s) for s in scores[n]], sizes[n], short[n]) for n in shots]


def class_orders(y: Array, source: torch.Generator) -> list[Array]:
    """The items of each class that has any, each in a random order."""
    labels = np.unique(y) if y.ndim == 1 else np.flatnonzero(y.any(axis=0))
    found = []
    for label in labels:
        items = np.flatnonzero(y == label if y.ndim == 1 else y[:, label])
        found.append(items[torch.randperm(len(items), generator=source).numpy()])
    return found


def beside(own: Sequence[Mapping[str, Any]], baselines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Few-shot figures, each compared with those of the baselines draw by draw."""
    rows = []
    for row in own:
        others = {
            name: other
            for name, baseline in baselines.items()
            for other in baseline.get("few_shot", ())
            if other["shots"] == row["shots"] and other["draws"] == row["draws"]
        }
        changes = {name: compare(row["scores"], other["scores"]) for name, other in others.items()}
        rows.append({**row, "over": {name: {"change": c.change, "half": c.half} for name, c in changes.items()}})
    return rows


def _score(train: Features, test: Features, moments: tuple[torch.Tensor, torch.Tensor]) -> float:
    fitted = fit_logistic(train, np.zeros(len(train.y), dtype=bool), strengths=[STRENGTH], moments=moments)
    return fit_quality(fitted.scores(test), test.y, fitted.classes)
