"""The main score of frozen features: fit a classifier on some items, score others that it never saw.

Shapes: N items, D feature width, K classes.

A *method* fits a classifier: it gets the training items and which of them are for validation, chooses its setting on
those, and fits once more on all. Test items are scored once. With folds every fold is the test set of a classifier
fitted on the others, with whole folds for validation, because items of a fold may be parts of one recording.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from bridle.errors import DataError, NonFiniteError
from bridle.evaluate.features import Array, Features, stratified, stratified_folds
from bridle.evaluate.metrics import (
    Ranking,
    balanced_accuracy,
    best_class,
    bootstrap_interval,
    bootstrap_rankings,
    d_prime,
    mean_of_known,
    top_k_hits,
)
from bridle.evaluate.scorers import Pair, Task
from bridle.evaluate.significance import make_hits
from bridle.runs.results import Scores
from bridle.seeding import generator

VALIDATION_SHARE = 0.2  # of the training items
FEW = 1000  # training items; with fewer, one validation part is too small to choose by


class Fitted(Protocol):
    """A classifier."""

    @property
    def classes(self) -> Array: ...  # (K,) labels of the score columns

    @property
    def setting(self) -> Mapping[str, float | bool]: ...  # what was chosen on validation items, by name

    def scores(self, items: Features) -> Array: ...  # (N, K); comparable between the items of one classifier


Method = Callable[[Features, Array], Fitted]  # training items, and (V, N) bool: which of them are for validation


class Part(NamedTuple):
    """Test items as one classifier scored them: the only ones there are, or one fold."""

    name: str
    scores: Array  # (N, K)
    y: Array  # (N,) columns of the true classes, or (N, K) bool
    chance: float  # the main score of a classifier that ignores its input
    train_items: int
    setting: Mapping[str, float | bool]


def split_pairs(train: Features, test: Features, *, seed: int) -> Iterator[Pair]:
    """One pair, with a stratified part of the training items for validation; of few items all parts take turns."""
    _check(train, test)
    held = stratified(train.y, VALIDATION_SHARE, generator(seed, "probe validation"))[None]
    if len(train.y) < FEW:
        held = _apart(stratified_folds(train.y, round(1 / VALIDATION_SHARE), seed=seed))
    yield Pair("", train, held, test)


def fold_pairs(items: Features, folds: Sequence[int], *, seed: int) -> Iterator[Pair]:
    """One pair for every fold, which is scored by a classifier fitted, settings and all, on the others."""
    own = np.asarray(folds)
    numbers = np.unique(own).tolist()
    if len(own) != len(items.y) or len(numbers) < 2:
        raise DataError(
            f"cross-validation needs a fold for each of {len(items.y)} items and at least two different ones; "
            f"got {len(own)} fold numbers, {len(numbers)} different."
        )
    for place, number in enumerate(numbers):
        train, test = items.part(own != number), items.part(own == number)
        _check(train, test, where=f"fold {number}: ")
        held = _validation(train.y, own[own != number], numbers[place + 1 :] + numbers[:place], seed)[None]
        if len(train.y) < FEW and len(numbers) > 2:
            held = _apart(own[own != number])  # whole folds: items of a fold may be parts of one recording
        yield Pair(str(number), train, held, test)


def classify(method: Method) -> Callable[[Task], Scores]:
    """The scorer that fits `method` on every pair and scores its test items once."""

    def score(task: Task) -> Scores:
        return score_pairs(method, task.pairs(), seed=task.seed)

    return score


def score_pairs(method: Method, pairs: Iterable[Pair], *, seed: int) -> Scores:
    """Fit and score every pair; test items are scored once."""
    began = time.perf_counter()
    return summarise([_score(method, pair) for pair in pairs], seed=seed, began=began)


def summarise(parts: Sequence[Part], *, seed: int, began: float) -> Scores:
    """Scores, intervals and the spread over folds, from the classifiers' scores of the test items."""
    multilabel = parts[0].y.ndim == 2
    truths = [part.y if multilabel else np.eye(part.scores.shape[1])[part.y] for part in parts]
    rankings = [Ranking(part.scores, truth) for part, truth in zip(parts, truths, strict=True)]
    rows = [_part_scores(part, ranking) for part, ranking in zip(parts, rankings, strict=True)]
    main, fields = ("mean_average_precision", _multilabel) if multilabel else ("accuracy", _single_label)
    folds = [
        {"fold": int(part.name), **row, "test_items": len(part.y), "setting": dict(part.setting)}
        for part, row in zip(parts, rows, strict=True)
        if len(parts) > 1
    ]
    return Scores.model_validate(
        {
            **{key: statistics.fmean(row[key] for row in rows) for key in rows[0]},
            **fields(parts, rankings, seed),
            "chance": statistics.fmean(part.chance for part in parts),
            "train_items": min(part.train_items for part in parts),
            "test_items": sum(len(part.y) for part in parts),
            "setting": {key: _combined([part.setting[key] for part in parts]) for key in parts[0].setting},
            "folds": folds,
            "sd": statistics.stdev(row[main] for row in rows) if folds else None,
            "seconds": time.perf_counter() - began,
        }
    )


def _part_scores(part: Part, ranking: Ranking) -> dict[str, float]:
    """The scores of one part that are averaged over folds."""
    precision = {"mean_average_precision": mean_of_known(ranking.average_precision())}
    if part.y.ndim == 2:
        area = mean_of_known(ranking.auc())
        return {**precision, "mean_auc": area, "d_prime": d_prime(area)}
    hits = {"accuracy": 1, "top5": 5}
    return {**precision, **{name: float(top_k_hits(part.scores, part.y, k=k).mean()) for name, k in hits.items()}}


def _single_label(parts: Sequence[Part], rankings: Sequence[Ranking], seed: int) -> dict[str, Any]:
    """The fields beside those means where every item has one label."""
    right = np.concatenate([top_k_hits(part.scores, part.y) for part in parts])
    hits = make_hits(right, [part.y for part in parts])
    answers, truth = (np.concatenate(a) for a in ([best_class(p.scores) for p in parts], [p.y for p in parts]))
    (map_interval,) = bootstrap_rankings(rankings, [Ranking.average_precision], generator=generator(seed, "probe mAP"))
    seen = max(int(np.isfinite(part.scores).any(axis=0).sum()) for part in parts)
    return {
        "interval": bootstrap_interval(right, generator=generator(seed, "probe bootstrap"), sizes=hits.sizes),
        "balanced_accuracy": balanced_accuracy(answers, truth),
        "mean_average_precision_interval": map_interval,
        "classes": seen,
        "hits": hits,
        **({} if seen > 5 else {"top5": None}),
    }


def _multilabel(parts: Sequence[Part], rankings: Sequence[Ranking], seed: int) -> dict[str, Any]:
    """The same where items may have several."""
    scores, source = [Ranking.average_precision, Ranking.auc], generator(seed, "probe bootstrap")
    map_interval, auc_interval = bootstrap_rankings(rankings, scores, generator=source)
    return {
        "interval": map_interval,
        "mean_auc_interval": auc_interval,
        "d_prime_interval": (d_prime(auc_interval.low), d_prime(auc_interval.high)),
        "classes": parts[0].y.shape[1],
        "classes_present": int(np.concatenate([part.y for part in parts]).any(axis=0).sum()),
    }


def _combined(values: Sequence[float | bool]) -> float | bool:
    """A setting over folds: `all` for booleans, else the lower median."""
    return all(values) if isinstance(values[0], bool) else statistics.median_low(values)


def _score(method: Method, pair: Pair) -> Part:
    train, test = pair.train, pair.test
    fitted = method(train, pair.held)
    found = fitted.scores(test)
    if train.multilabel:
        return Part(pair.name, found, test.y, prevalence(test.y), len(train.y), fitted.setting)
    # A label that training never saw gets a column that is never answered.
    labels = np.union1d(fitted.classes, test.y)
    scores = np.full((len(test.y), len(labels)), -np.inf)
    scores[:, np.searchsorted(labels, fitted.classes)] = found
    values, counts = np.unique(train.y, return_counts=True)
    chance = float((test.y == values[counts.argmax()]).mean())
    return Part(pair.name, scores, np.searchsorted(labels, test.y), chance, len(train.y), fitted.setting)


def prevalence(truth: Array) -> float:
    """The mAP of scores that ignore the input: mean share of items (N, K) per label that occurs."""
    shares = truth.mean(axis=0)
    return float(shares[shares > 0].mean()) if truth.any() else 0.0


def _validation(y: Array, folds: Array, order: Sequence[int], seed: int) -> Array:
    """(N,) bool: about a fifth of the training folds, the next ones; with a single one a stratified part of it."""
    if len(order) == 1:
        return stratified(y, VALIDATION_SHARE, generator(seed, "probe validation"))
    return np.isin(folds, order[: max(1, round(VALIDATION_SHARE * len(order)))])


def _apart(folds: Sequence[int] | Array) -> Array:
    """(V, N) bool: the items of every fold."""
    own = np.asarray(folds)
    return np.stack([own == number for number in np.unique(own)])


def _check(train: Features, test: Features, where: str = "") -> None:
    if len(train.y) == 0 or len(test.y) == 0:
        raise DataError(f"{where}a probe needs training and test items; got {len(train.y)} and {len(test.y)}.")
    if train.multilabel:
        if not (train.y.any(axis=0) & ~train.y.all(axis=0)).any():
            raise DataError(f"{where}a probe needs a label that some training items have and others have not.")
    elif len(np.unique(train.y)) < 2:
        raise DataError(f"{where}a probe needs at least two classes, but all training items have the same label.")
    for name, items in (("training", train), ("test", test)):
        if not np.isfinite(items.x).all():
            raise NonFiniteError(f"{where}{name} features are not finite; evaluate an earlier checkpoint.")
