"""Which items a fine-tuned model learns from and is scored on: a split, folds, and subsets with few labels.

The subsets of `finetune.shots` are those of the few-shot probe: the same classes, draws and items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.config import Config
from bridle.config.training_schema import FinetuneConfig
from bridle.data.loading.balance import label_set
from bridle.data.sources import Labels, Source, Splits
from bridle.data.subset import subset_of
from bridle.errors import DataError
from bridle.evaluate.features import choose_items, stratified
from bridle.evaluate.finetune_scores import true_labels
from bridle.evaluate.scorers.fewshot import class_orders, over_draws
from bridle.runs.results import Score
from bridle.seeding import generator
from bridle.train.finetune import Loss

TEST_SHARE = 0.2  # of each class, where the data has neither a test split nor folds
FOLD = "fold"


class Task(NamedTuple):
    """What is learnt."""

    classes: int
    multilabel: bool  # may an item have several labels?
    loss: Loss


class Unit(NamedTuple):
    """One model to train and to score."""

    name: str  # of its folder inside the start's; empty without folds
    train: Source
    test: Source
    shots: int | None = None  # labels per class; None: all
    draw: int = 0  # of the few labels

    @property
    def fold(self) -> str:
        return self.name.removeprefix(FOLD)


def labels_of(source: Source, where: str = "the data") -> Labels:
    if source.labels is None:
        raise DataError(
            f"{where}: fine-tuning needs labels: one folder per class, or a manifest with a label column; "
            "point data.root=… or data.manifest=… to labelled data."
        )
    return source.labels


def find_units(splits: Splits, config: Config, task: Task) -> list[Unit]:
    """One unit for a given test split, one per fold, or one with a part of each class held back for the test."""
    folds = splits.folds if splits.test is None else None
    kept = _chosen(splits.train, config, "train", folds)
    if splits.test is not None:
        test = subset_of(splits.test, _chosen(splits.test, config, "test"))
        return [Unit("", subset_of(splits.train, kept), test)]
    if splits.folds is not None:
        of = [splits.folds[i] for i in kept]
        if len(set(of)) < 2:
            raise DataError(f"the data has only fold {of[0]}; cross-validation needs at least two.")
        units = [_unit(splits.train, kept, np.array(of) == fold, f"{FOLD}{fold}") for fold in sorted(set(of))]
        for unit in units:
            if len({one for label in labels_of(unit.train) for one in label_set(label)}) < 2:
                raise DataError(
                    f"{unit.name}: fine-tuning needs at least two classes, but the items outside this fold have one."
                )
        return units
    labels = labels_of(splits.train)
    truth = true_labels([labels[i] for i in kept], task.classes, multilabel=task.multilabel)
    held = stratified(truth, TEST_SHARE, generator(config.seed, "probe split"))  # the same that a probe holds back
    if not held.any():
        raise DataError("cannot hold back a test split: no class has two items; add labelled items or a test split.")
    return [_unit(splits.train, kept, held, "")]


def _chosen(source: Source, config: Config, split: str, folds: Sequence[int] | None = None) -> list[int]:
    """The items of a split that are used, the same that a probe of so many items uses."""
    limit, seed = config.finetune.items, config.seed
    return choose_items(len(source), limit, labels=source.labels, folds=folds, seed=seed, split=split)


def _unit(source: Source, kept: Sequence[int], held: NDArray[np.bool_], name: str) -> Unit:
    indices = np.array(kept)
    return Unit(name, subset_of(source, indices[~held].tolist()), subset_of(source, indices[held].tolist()))


def few_label_units(units: Sequence[Unit], config: Config, task: Task) -> Iterator[Unit]:
    """Every unit's subsets with `finetune.shots` labels per class, one for each draw."""
    for unit in units:
        truth = true_labels(labels_of(unit.train), task.classes, multilabel=task.multilabel)
        for draw in range(config.finetune.draws if config.finetune.shots else 0):
            order = class_orders(truth, generator(config.seed, "few shots", unit.fold, draw))
            for n in sorted(config.finetune.shots):
                rows = np.unique(np.concatenate([own[:n] for own in order])).tolist()
                name = "-".join(filter(None, [unit.name, f"shots{n}", f"draw{draw}"]))
                yield Unit(name, subset_of(unit.train, rows), unit.test, n, draw)


def settings_of(unit: Unit, settings: FinetuneConfig) -> FinetuneConfig:
    """The settings of a unit: with few labels `shot_steps` steps, a tenth of them to warm up."""
    if unit.shots is None:
        return settings
    length = {"steps": settings.shot_steps, "epochs": None, "epoch_items": None}
    return settings.model_copy(update={**length, "warmup_steps": settings.shot_steps // 10, "warmup_epochs": None})


def few_label_scores(units: Sequence[Unit], scores: Sequence[float]) -> dict[str, Score]:
    """One score for each number of labels, over draws; with folds that of a draw is the mean over them."""
    found = {}
    for n in sorted({unit.shots for unit in units if unit.shots is not None}):
        own = [(unit, score) for unit, score in zip(units, scores, strict=True) if unit.shots == n]
        draws = sorted({unit.draw for unit, _ in own})
        means = [fmean(score for unit, score in own if unit.draw == draw) for draw in draws]
        found[f"{n} per class"] = over_draws(n, means, items=max(len(unit.train) for unit, _ in own))
    return found
