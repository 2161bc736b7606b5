"""How good frozen features are: fit a classifier on some items, score others that it never saw.

Shapes: N items, D feature width, K classes.

A *method* fits a classifier: it is given the training items and which of them are for validation, chooses its setting
on those, and fits once more on all. Test items are scored once. With folds every fold is the test set of a classifier
fitted on the others, with whole folds for validation, because items of a fold may be parts of one recording.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bridle.errors import DataError, NonFiniteError
from bridle.evaluate.features import Array, Features, stratified, stratified_folds
from bridle.evaluate.heads.logistic import STRENGTHS, fit_logistic
from bridle.evaluate.metrics import (
    Interval,
    Ranking,
    balanced_accuracy,
    best_class,
    bootstrap_interval,
    bootstrap_rankings,
    d_prime,
    mean_of_known,
    top_k_hits,
)
from bridle.evaluate.significance import make_hits
from bridle.seeding import generator

VALIDATION_SHARE = 0.2  # of the training items
FEW = 1000  # training items; of fewer, one part is too small to choose by


class Fitted(Protocol):
    """A classifier."""

    @property
    def classes(self) -> Array:
        """(K,) labels of the score columns."""
        ...

    @property
    def setting(self) -> Mapping[str, float | bool]:
        """What was chosen on validation items, by name."""
        ...

    def scores(self, items: Features) -> Array:
        """(N, K); comparable between the items of one classifier."""
        ...


Method = Callable[[Features, Array], Fitted]  # training items, and (V, N) bool: which of them are for validation


class Part(NamedTuple):
    """Test items as one classifier scored them: the only ones there are, or one fold."""

    name: str
    scores: Array  # (N, K)
    y: Array  # (N,) columns of the true classes, or (N, K) bool
    chance: float  # the main score of a classifier that ignores its input
    train_items: int
    setting: Mapping[str, float | bool]


class ProbeResult(NamedTuple):
    """What a classifier of frozen features is worth where every item has one label. With folds, means over them."""

    accuracy: float  # top-1 on the test items
    interval: Interval  # 95 % bootstrap over the test items
    top5: float | None  # None with five classes or fewer, where it says nothing
    balanced_accuracy: float
    mean_average_precision: float  # average precision, averaged over the classes that occur in the test items
    mean_average_precision_interval: Interval
    chance: float  # accuracy on the test items of always answering the commonest training class
    classes: int
    train_items: int  # with folds, of the smallest training part
    test_items: int
    setting: Mapping[str, float | bool]  # what was chosen; with folds the median, or whether all did
    seconds: float
    folds: list[dict[str, Any]] | None = None
    sd: float | None = None  # of the accuracy over folds
    hits: dict[str, Any] | None = None  # which test items were answered rightly; see `paired.Hits`
    few_shot: list[dict[str, Any]] | None = None  # with few labels; see `fewshot.FewShot`
    retrieval: dict[str, Any] | None = None  # see `retrieval.Retrieval`

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return _plain(self._asdict())


class LabelsResult(NamedTuple):
    """The same where items have any number of labels."""

    mean_average_precision: float  # over the classes that occur in the test items
    interval: Interval  # of mAP, 95 % bootstrap over the test items
    mean_auc: float
    mean_auc_interval: Interval
    d_prime: float
    d_prime_interval: Interval
    chance: float  # mAP of scores that ignore the input
    classes: int
    classes_present: int  # classes that some test item has; the others are left out
    train_items: int
    test_items: int
    setting: Mapping[str, float | bool]
    seconds: float
    folds: list[dict[str, Any]] | None = None
    sd: float | None = None  # of mAP over folds
    few_shot: list[dict[str, Any]] | None = None
    retrieval: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return _plain(self._asdict())


Result = ProbeResult | LabelsResult


class Pair(NamedTuple):
    """Items to fit a classifier on, and items to score it on: the only ones there are, or those of one fold."""

    name: str
    train: Features
    held: Array  # (V, N) bool: training items for validation, in one part, or in several that take turns
    test: Features


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


def score_pairs(method: Method, pairs: Iterable[Pair], *, seed: int) -> Result:
    """Fit and score every pair; test items are scored once."""
    began = time.perf_counter()
    return summarise([_score(method, pair) for pair in pairs], seed=seed, began=began)


def score_split(method: Method, train: Features, test: Features, *, seed: int) -> Result:
    """Fit on `train`, choosing on a stratified part of it, and score `test` once."""
    return score_pairs(method, split_pairs(train, test, seed=seed), seed=seed)


def score_folds(method: Method, items: Features, folds: Sequence[int], *, seed: int) -> Result:
    """Every fold scored by a classifier that was fitted, settings and all, on the others."""
    return score_pairs(method, fold_pairs(items, folds, seed=seed), seed=seed)


def linear_probe(train: Features, test: Features, *, seed: int, strengths: Sequence[float] = STRENGTHS) -> Result:
    """Logistic regression fitted on `train`, scored on `test`. The same inputs give the same result."""
    return score_split(partial(fit_logistic, strengths=strengths), train, test, seed=seed)


def summarise(parts: Sequence[Part], *, seed: int, began: float) -> Result:
    """Scores, intervals and the spread over folds, from what the classifiers said of the test items."""
    source = generator(seed, "probe bootstrap")
    if parts[0].y.ndim == 2:
        return _labels_result(parts, source, began)
    rows = [_class_scores(part) for part in parts]
    right = np.concatenate([top_k_hits(part.scores, part.y) for part in parts])
    hits = make_hits(right, [part.y for part in parts])
    answers, truth = (np.concatenate(a) for a in ([best_class(p.scores) for p in parts], [p.y for p in parts]))
    rankings = [Ranking(part.scores, np.eye(part.scores.shape[1])[part.y]) for part in parts]
    (map_interval,) = bootstrap_rankings(rankings, [Ranking.average_precision], generator=generator(seed, "probe mAP"))
    seen = max(int(np.isfinite(part.scores).any(axis=0).sum()) for part in parts)
    return ProbeResult(
        accuracy=_mean(rows, "accuracy"),
        interval=bootstrap_interval(hits.right, generator=source, sizes=hits.sizes),
        top5=_mean(rows, "top5") if seen > 5 else None,
        balanced_accuracy=balanced_accuracy(answers, truth),
        mean_average_precision=_mean(rows, "mean_average_precision"),
        mean_average_precision_interval=map_interval,
        chance=statistics.fmean(part.chance for part in parts),
        classes=seen,
        hits=hits.packed(),
        **_shared(parts, rows, "accuracy", began),
    )


def _labels_result(parts: Sequence[Part], source: torch.Generator, began: float) -> LabelsResult:
    rankings = [Ranking(part.scores, part.y) for part in parts]
    rows = [_label_scores(ranking) for ranking in rankings]
    map_interval, auc_interval = bootstrap_rankings(
        rankings, [Ranking.average_precision, Ranking.auc], generator=source
    )
    return LabelsResult(
        mean_average_precision=_mean(rows, "mean_average_precision"),
        interval=map_interval,
        mean_auc=_mean(rows, "mean_auc"),
        mean_auc_interval=auc_interval,
        d_prime=_mean(rows, "d_prime"),
        d_prime_interval=Interval(*map(d_prime, auc_interval)),
        chance=statistics.fmean(part.chance for part in parts),
        classes=parts[0].y.shape[1],
        classes_present=int(np.concatenate([part.y for part in parts]).any(axis=0).sum()),
        **_shared(parts, rows, "mean_average_precision", began),
    )


def _class_scores(part: Part) -> dict[str, Any]:
    truth = np.eye(part.scores.shape[1])[part.y]
    return {
        "accuracy": float(top_k_hits(part.scores, part.y).mean()),
        "top5": float(top_k_hits(part.scores, part.y, k=5).mean()),
        "mean_average_precision": mean_of_known(Ranking(part.scores, truth).average_precision()),
    }


def _label_scores(ranking: Ranking) -> dict[str, Any]:
    area = mean_of_known(ranking.auc())
    precision = mean_of_known(ranking.average_precision())
    return {"mean_average_precision": precision, "mean_auc": area, "d_prime": d_prime(area)}


def _shared(parts: Sequence[Part], rows: Sequence[dict[str, Any]], main: str, began: float) -> dict[str, Any]:
    """What results of both kinds say in the same way."""
    folds = None
    if len(parts) > 1:
        folds = [
            {"fold": int(p.name), **row, "test_items": len(p.y), **p.setting}
            for p, row in zip(parts, rows, strict=True)
        ]
    return {
        "train_items": min(part.train_items for part in parts),
        "test_items": sum(len(part.y) for part in parts),
        "setting": {key: _agreed([part.setting[key] for part in parts]) for key in parts[0].setting},
        "folds": folds,
        "sd": statistics.stdev(row[main] for row in rows) if folds else None,
        "seconds": time.perf_counter() - began,
    }


def _agreed(values: Sequence[float | bool]) -> float | bool:
    """Did all? Or else the middle one."""
    return all(values) if isinstance(values[0], bool) else statistics.median_low(values)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no infinity: what is not finite becomes null. What there is not is left out."""
    flat = {**result, **result["setting"]}
    del flat["setting"]
    for key in ("folds", "sd", "hits", "few_shot", "retrieval"):
        if key in flat and flat[key] is None:
            del flat[key]
    return {key: _finite(value) for key, value in flat.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _score(method: Method, pair: Pair) -> Part:
    train, test = pair.train, pair.test
    fitted = method(train, pair.held)
    found = fitted.scores(test)
    if train.several:
        return Part(pair.name, found, test.y, _prevalence(test.y), len(train.y), fitted.setting)
    # A label that training never saw gets a column that is never answered.
    labels = np.union1d(fitted.classes, test.y)
    scores = np.full((len(test.y), len(labels)), -np.inf)
    scores[:, np.searchsorted(labels, fitted.classes)] = found
    values, counts = np.unique(train.y, return_counts=True)
    chance = float((test.y == values[counts.argmax()]).mean())
    return Part(pair.name, scores, np.searchsorted(labels, test.y), chance, len(train.y), fitted.setting)


def _prevalence(truth: Array) -> float:
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
    if train.several:
        if not (train.y.any(axis=0) & ~train.y.all(axis=0)).any():
            raise DataError(f"{where}a probe needs a label that some training items have and others have not.")
    elif len(np.unique(train.y)) < 2:
        raise DataError(f"{where}a probe needs at least two classes, but all training items have the same label.")
    for name, items in (("training", train), ("test", test)):
        if not np.isfinite(items.x).all():
            raise NonFiniteError(f"{where}{name} features are not finite; evaluate an earlier checkpoint.")


def in_words(found: Result) -> str:
    """The main scores of a result for a line of text."""
    low, high = found.interval
    folds = "" if found.sd is None else f", sd {found.sd:.3f} over {len(found.folds or [])} folds"
    if isinstance(found, ProbeResult):
        return f"accuracy {found.accuracy:.3f} (95 % interval {low:.3f}–{high:.3f}{folds})"
    precision, area, apart = found.mean_average_precision, found.mean_auc, found.d_prime
    return f"mAP {precision:.3f} (95 % interval {low:.3f}–{high:.3f}{folds}), AUC {area:.3f}, d′ {apart:.2f}"
