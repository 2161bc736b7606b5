"""Attentive probe: learned queries pool the frozen tokens, a linear head reads what they bring.

Shapes: N items, T tokens, D features, Q queries, K classes, S settings learned side by side. With tokens standardised
by the training tokens' mean and deviation,

    a = softmax_t(x_t · q / √D)   (Q, T);     pooled = Σ_t a_t x_t   (Q, D);     scores = W · [pooled_1 … pooled_Q] + b

Queries begin near zero, where every token counts the same, so that learning starts from mean pooling. AdamW with a
cosine learning rate; its weight decay is chosen on validation items. All settings see the same batches and learn at
once, because reading the tokens is what takes time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import as_scores, fit_quality, one_column_each
from bridle.evaluate.heads.sgd import sum_of_losses
from bridle.seeding import generator

QUERIES = 4
EPOCHS = 30
FEWEST_STEPS = 600  # small sets get more epochs
BATCH = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAYS = (0.01, 0.1, 1.0)
QUERY_STD = 0.02


class _Heads(NamedTuple):
    """S attentive heads."""

    query: Tensor  # (S, Q, D)
    weight: Tensor  # (S, Q·D, K)
    bias: Tensor  # (S, K)


class AttentiveClassifier(NamedTuple):
    """A fitted attentive probe."""

    classes: Array  # (K,) labels of the columns
    mean: Tensor  # (D,) of the training tokens
    scale: Tensor  # (D,)
    heads: _Heads  # a single one
    exclusive: bool
    setting: dict[str, float | bool]

    def scores(self, items: Features) -> Array:
        """(N, K): log-probabilities where classes exclude one another, else logits."""
        return as_scores(_all_logits(items, self.heads, self.mean, self.scale)[0], exclusive=self.exclusive)


def fit_attentive(train: Features, held: Array, *, seed: int) -> AttentiveClassifier:
    """Choose the weight decay on the `held` (N,) part of the training items, then learn from all of them with it."""
    held = np.atleast_2d(held)[0]  # of several parts one will do
    classes, targets = one_column_each(train)
    y, (mean, scale) = targets.float(), _moments(train)
    decay = WEIGHT_DECAYS[len(WEIGHT_DECAYS) // 2]
    if held.any():
        rest = ~held
        heads = _learn(train.part(rest), y[torch.from_numpy(rest)], mean, scale, WEIGHT_DECAYS, seed)
        logits = _all_logits(train.part(held), heads, mean, scale)  # (S, N, K)
        quality = [fit_quality(own.numpy(), train.y[held], classes) for own in logits]
        # Ties go to the stronger decay.
        decay = max(zip(quality, WEIGHT_DECAYS, strict=True))[1]
    heads = _learn(train, y, mean, scale, [decay], seed)
    return AttentiveClassifier(classes, mean, scale, heads, not train.multilabel, {"weight_decay": decay})


def _learn(items: Features, y: Tensor, mean: Tensor, scale: Tensor, decays: Sequence[float], seed: int) -> _Heads:
    source = generator(seed, "attentive probe")
    N, D, K = len(items.y), items.x.shape[2], y.shape[1]
    queries, weights, biases = [], [], []
    for _ in decays:  # all begin alike
        draw = torch.randn(QUERIES, D, generator=generator(seed, "attentive queries"))
        queries.append((QUERY_STD * draw).requires_grad_())
        weights.append(torch.zeros(QUERIES * D, K, requires_grad=True))
        biases.append(torch.zeros(K, requires_grad=True))
    groups = [{"params": [weight], "weight_decay": decay} for weight, decay in zip(weights, decays, strict=True)]
    groups.append({"params": [*queries, *biases], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    a_pass = math.ceil(N / BATCH)
    steps = max(FEWEST_STEPS, EPOCHS * a_pass)
    for step in range(steps):
        if step % a_pass == 0:
            order = torch.randperm(N, generator=source).numpy()
        rows = order[step % a_pass * BATCH :][:BATCH]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        heads = _Heads(torch.stack(queries), torch.stack(weights), torch.stack(biases))
        logits = _logits(items, rows, heads, mean, scale)
        loss = sum_of_losses(logits, y[torch.from_numpy(rows)], "bce" if items.multilabel else "ce")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _Heads(torch.stack(queries).detach(), torch.stack(weights).detach(), torch.stack(biases).detach())


def _logits(items: Features, rows: Array, heads: _Heads, mean: Tensor, scale: Tensor) -> Tensor:
    """(S, B, K) of the items `rows` (B,)."""
    x = (torch.from_numpy(items.x[rows]) - mean) / scale  # (B, T, D)
    S, Q, D = heads.query.shape
    aim = x @ heads.query.reshape(S * Q, D).T / math.sqrt(D)  # (B, T, S·Q)
    if items.valid is not None:
        real = torch.from_numpy(items.valid[rows])
        real = real | ~real.any(dim=1, keepdim=True)  # no softmax over nothing
        aim = aim.masked_fill(~real[..., None], -torch.inf)
    pooled = aim.softmax(dim=1).transpose(1, 2) @ x  # (B, S·Q, D)
    pooled = pooled.reshape(len(x), S, Q * D).transpose(0, 1)  # (S, B, Q·D)
    return torch.baddbmm(heads.bias[:, None], pooled, heads.weight)


def _all_logits(items: Features, heads: _Heads, mean: Tensor, scale: Tensor) -> Tensor:
    """(S, N, K)."""
    with torch.no_grad():
        cuts = np.array_split(np.arange(len(items.y)), math.ceil(len(items.y) / BATCH))
        return torch.cat([_logits(items, rows, heads, mean, scale) for rows in cuts], dim=1)


def _moments(items: Features) -> tuple[Tensor, Tensor]:
    """Mean and deviation (D,) of the real tokens, item by item in float64."""
    total, squares, count = (np.zeros(items.x.shape[2]) for _ in range(3))
    for n, tokens in enumerate(items.x):
        real = tokens if items.valid is None else tokens[items.valid[n]]
        total += real.sum(axis=0, dtype=np.float64)
        squares += np.square(real, dtype=np.float64).sum(axis=0)
        count += len(real)
    mean = total / np.maximum(count, 1)
    spread = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))
    spread = np.where(spread > 1e-6 * np.maximum(np.abs(mean), 1), spread, 1.0)  # a constant feature stays at zero
    return torch.from_numpy(mean).float(), torch.from_numpy(spread).float()
