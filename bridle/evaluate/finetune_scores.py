"""Scores of a fine-tuned classifier on items it never saw.

Shapes: N items, K classes, V views of an item; scores (N, K) are probabilities, averaged over the views.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from bridle import distributed
from bridle.config import Config
from bridle.data.loading.balance import label_set
from bridle.data.loading.loader import sequential
from bridle.data.sources import Labels, Source, Views
from bridle.errors import NonFiniteError
from bridle.evaluate.scorers.probe import prevalence
from bridle.machine import Machine
from bridle.models.classifier import Classifier
from bridle.train.engine import move

MOST_ROWS = 256  # that go through the network at once


class Scored(NamedTuple):
    """Test items with their scores."""

    scores: NDArray[np.float32]  # (N, K)
    truth: NDArray[Any]  # (N,) int64, or (N, K) bool where items may have several labels

    def save(self, path: Path) -> None:
        save_file({"scores": self.scores, "truth": self.truth}, path)

    @classmethod
    def read(cls, path: Path) -> Scored:
        found = load_file(path)
        return cls(found["scores"], found["truth"])


@torch.no_grad()
def score_items(
    model: Classifier, source: Source, *, config: Config, machine: Machine, multilabel: bool, exclusive: bool
) -> Scored | None:
    """Score every item in fp32, eval mode, over all its views; DataError for an item that cannot be read.

    Collective: the ranks share the items, and rank 0 gets the scores of all.
    Probabilities are a softmax where classes are `exclusive` (trained with CE), else one sigmoid each.
    """
    (mean, std), views = config.data.statistics, Views(source)
    assert source.labels is not None  # fine-tuning begins with labels
    model.eval()
    rows = min(config.finetune.micro_batch or config.finetune.batch, MOST_ROWS)
    found: list[Tensor] = []

    batches = sequential(
        views, batch=rows, mean=mean, std=std, workers=config.data.workers,
        rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip

    def run() -> None:
        for batch in batches:
            moved = move(batch, machine.device)
            logits = model(moved.x, valid=moved.valid).float()
            found.append((logits.softmax(1) if exclusive else logits.sigmoid()).cpu())

    distributed.done_together(run)
    joined = distributed.rows_on_first_rank(found)
    if distributed.rank():
        return None
    assert joined is not None  # a test split has items
    scores = joined.unflatten(0, (len(source), views.views)).mean(1)  # (N·V, K) -> (N, K)
    if not bool(torch.isfinite(scores).all()):
        raise NonFiniteError("scores of the fine-tuned model are not finite; try a lower finetune.learning_rate.")
    return Scored(scores.numpy(), true_labels(source.labels, model.classes, multilabel=multilabel))


def true_labels(labels: Labels, classes: int, *, multilabel: bool) -> NDArray[Any]:
    """(N,) classes, or (N, K) bool."""
    if not multilabel:
        return np.array([label_set(label)[0] for label in labels], dtype=np.int64)
    truth = np.zeros((len(labels), classes), dtype=bool)
    for item, label in enumerate(labels):
        truth[item, list(label_set(label))] = True
    return truth


def blind_score(train_labels: Labels, scored: Scored) -> float:
    """What is reached without looking: by always answering the commonest training class; several labels: by chance."""
    if scored.truth.ndim > 1:
        return prevalence(scored.truth)
    commonest = Counter(label_set(label)[0] for label in train_labels).most_common(1)[0][0]
    return float((scored.truth == commonest).mean())
