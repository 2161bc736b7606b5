"""Classifiers on features without an evaluator around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bridle.evaluate.features import Features
from bridle.evaluate.heads.logistic import STRENGTHS, fit_logistic
from bridle.evaluate.scorers.probe import Method, fold_pairs, score_pairs, split_pairs
from bridle.runs.results import Scores


def score_split(method: Method, train: Features, test: Features, *, seed: int) -> Scores:
    return score_pairs(method, split_pairs(train, test, seed=seed), seed=seed)


def score_folds(method: Method, items: Features, folds: Sequence[int], *, seed: int) -> Scores:
    return score_pairs(method, fold_pairs(items, folds, seed=seed), seed=seed)


def linear_probe(train: Features, test: Features, *, seed: int, strengths: Sequence[float] = STRENGTHS) -> Scores:
    return score_split(partial(fit_logistic, strengths=strengths), train, test, seed=seed)
