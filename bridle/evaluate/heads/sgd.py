"""A linear head learned in batches, as the paper does it: SGD or AdamW on frozen features.

Shapes: N items, D features, K classes, S settings learned side by side. With x̂ the features after a batch norm without
weights (or as they are),

    scores = W x̂ + b,   loss per item: CE −log softmax[y], or BCE Σ_k −log σ(±s_k),

the learning rate falls along a cosine from its peak to zero; the peak is chosen on validation items, and the head is
then learned once more from all of them. All settings see the same batches, so trying them costs little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bridle.errors import ConfigError, NonFiniteError
from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import fit_quality, one_column_each
from bridle.seeding import generator

BATCH = 256
FEWEST_STEPS = 600  # small sets get more epochs
MOMENTUM = 0.9  # of SGD
WEIGHT_DECAY = 0.01  # of AdamW
NORM_EPS = 1e-6
LEARNING_RATES = {
    "sgd": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "adamw": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
}

Optimizer = Literal["sgd", "adamw"]
Loss = Literal["ce", "bce"]


class TrainedHead(NamedTuple):
    """A learned head: scores = (x − mean)/scale · weight + bias."""

    classes: Array  # (K,) labels of the columns
    mean: Tensor  # (D,) running statistics of the batch norm; 0 and 1 without one
    scale: Tensor  # (D,)
    weight: Tensor  # (D, K)
    bias: Tensor  # (K,)
    exclusive: bool  # trained with CE?
    setting: dict[str, float | bool]

    def scores(self, items: Features) -> Array:
        """(N, K): log-probabilities where classes exclude one another, else logits."""
        logits = ((torch.from_numpy(items.x) - self.mean) / self.scale) @ self.weight + self.bias
        found: Array = (logits.log_softmax(dim=1) if self.exclusive else logits).numpy()
        return found


class _Heads(NamedTuple):
    """S heads behind one batch norm, which knows nothing of them."""

    weight: Tensor  # (S, D, K)
    bias: Tensor  # (S, K)
    mean: Tensor  # (D,)
    scale: Tensor  # (D,)

    def logits(self, x: Array) -> Tensor:
        """(S, N, K)."""
        return _all_logits((torch.from_numpy(x) - self.mean) / self.scale, self.weight, self.bias)


def fit_head(
    train: Features,
    held: Array,
    *,
    optimizer: Optimizer,
    loss: Literal["auto", "ce", "bce"] = "auto",
    epochs: int,
    batch_norm: bool = True,
    seed: int,
) -> TrainedHead:
    """Choose the learning rate on the `held` (N,) part of the training items, then learn from all of them with it.

    Ties go to the lower rate.
    """
    if train.several and loss == "ce":
        raise ConfigError("probe.loss: 'ce' needs one label per item, but some have several; use 'bce' or 'auto'.")
    kind: Loss = ("bce" if train.several else "ce") if loss == "auto" else loss
    held = np.atleast_2d(held)[0]  # of several parts one will do
    classes, targets = one_column_each(train)
    y, rates = targets.float(), LEARNING_RATES[optimizer]

    def learn(rows: Array, rates: Sequence[float]) -> _Heads:
        x, own = train.x[rows], y[torch.from_numpy(rows)]
        return _learn(x, own, rates, optimizer=optimizer, loss=kind, epochs=epochs, norm=batch_norm, seed=seed)

    rate = rates[len(rates) // 2]
    if held.any():
        logits = learn(~held, rates).logits(train.x[held])  # (S, N, K)
        quality = [_quality(own, train.y[held], classes) for own in logits]
        rate = rates[int(np.argmax(quality))]
    heads = learn(np.ones(len(y), dtype=bool), [rate])
    if not bool(torch.isfinite(heads.weight).all()):
        raise NonFiniteError(f"the {optimizer} head diverged at learning rate {rate:g}; use probe.head=logistic.")
    weight, bias = heads.weight[0], heads.bias[0]
    return TrainedHead(classes, heads.mean, heads.scale, weight, bias, kind == "ce", {"learning_rate": rate})


def _quality(logits: Tensor, y: Array, classes: Array) -> float:
    """A head that diverged is worse than any other."""
    return fit_quality(logits.numpy(), y, classes) if bool(torch.isfinite(logits).all()) else -1.0


def _learn(
    x: Array, y: Tensor, rates: Sequence[float], *, optimizer: Optimizer, loss: Loss, epochs: int, norm: bool, seed: int
) -> _Heads:
    N, D, K = *x.shape, y.shape[1]
    weights = [torch.zeros(D, K, requires_grad=True) for _ in rates]
    biases = [torch.zeros(K, requires_grad=True) for _ in rates]
    learner = _optimizer(optimizer, weights, biases, rates)
    layer = torch.nn.BatchNorm1d(D, eps=NORM_EPS, affine=False) if norm and N > 1 else None
    source, a_pass = generator(seed, "probe head"), math.ceil(N / BATCH)
    steps = max(FEWEST_STEPS, epochs * a_pass)
    for step in range(steps):
        if step % a_pass == 0:
            # Equal parts: a leftover of one item has no spread to be normalised by.
            batches = np.array_split(torch.randperm(N, generator=source).numpy(), a_pass)
        rows = batches[step % a_pass]
        for group in learner.param_groups:
            group["lr"] = group["peak"] * 0.5 * (1 + math.cos(math.pi * step / steps))
        seen = torch.from_numpy(x[rows])
        seen = seen if layer is None else layer(seen)
        logits = _all_logits(seen, torch.stack(weights), torch.stack(biases))
        learner.zero_grad()
        sum_of_losses(logits, y[torch.from_numpy(rows)], loss).backward()
        learner.step()
    mean, scale = torch.zeros(D), torch.ones(D)
    if layer is not None and layer.running_mean is not None and layer.running_var is not None:
        mean, scale = layer.running_mean, (layer.running_var + NORM_EPS).sqrt()
    return _Heads(torch.stack(weights).detach(), torch.stack(biases).detach(), mean, scale)


def _optimizer(
    name: Optimizer, weights: Sequence[Tensor], biases: Sequence[Tensor], rates: Sequence[float]
) -> torch.optim.Optimizer:
    """Every setting has its own peak of the learning rate; biases do not decay."""
    groups = [
        {"params": [part], "lr": rate, "peak": rate, "weight_decay": decay if name == "adamw" else 0.0}
        for parts, decay in ((weights, WEIGHT_DECAY), (biases, 0.0))
        for part, rate in zip(parts, rates, strict=True)
    ]
    return torch.optim.SGD(groups, momentum=MOMENTUM) if name == "sgd" else torch.optim.AdamW(groups)


def _all_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(N, D), (S, D, K), (S, K) -> (S, N, K)."""
    return torch.baddbmm(bias[:, None], x.expand(len(weight), -1, -1), weight)


def sum_of_losses(logits: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Of logits (S, B, K), targets (B, K): summed over settings, so that each learns as if alone; mean over items."""
    if loss == "bce":
        return binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="sum") / len(y)
    return -(logits.log_softmax(dim=2) * y).sum() / len(y)
