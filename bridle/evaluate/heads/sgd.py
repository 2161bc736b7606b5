"""A linear head learned in batches, as the paper does it: SGD or AdamW on frozen features.

Shapes: N items, D features, K classes, S settings learned side by side. With x̂ the features after a batch norm without
weights (or as they are),

    scores = W x̂ + b,   loss per item: CE −log softmax[y], or BCE Σ_k −log σ(±s_k),

the learning rate rises over `probe.warmup_epochs` and falls along a cosine to zero. Its peak is `probe.learning_rate`,
or chosen on validation items, and the head is then learned once more from all of them. All settings see the same
batches, so trying them costs little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bridle.config.training_schema import ProbeConfig
from bridle.errors import ConfigError, NonFiniteError
from bridle.evaluate.features import Array, Features
from bridle.evaluate.heads.logistic import LinearClassifier, fit_quality, one_column_each
from bridle.seeding import generator
from bridle.train.optim import learning_rate

FEWEST_STEPS = 600  # where the learning rate is chosen, small sets get more epochs
MOMENTUM = 0.9  # of SGD
NORM_EPS = 1e-6
LEARNING_RATES = {
    "sgd": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    "adamw": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
}

Loss = Literal["ce", "bce"]


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
    train: Features, held: Array, *, settings: ProbeConfig, seed: int, device: torch.device | str = "cpu"
) -> LinearClassifier:
    """Learn from all training items, at the given learning rate or the best on the `held` (N,) part of them.

    Ties go to the lower rate.
    """
    assert settings.head != "logistic"
    if train.multilabel and settings.loss == "ce":
        raise ConfigError("probe.loss: 'ce' needs one label per item, but some have several; use 'bce' or 'auto'.")
    loss: Loss = ("bce" if train.multilabel else "ce") if settings.loss == "auto" else settings.loss
    held = np.atleast_2d(held)[0]  # of several parts one will do
    classes, targets = one_column_each(train)
    y, rates = targets.float(), LEARNING_RATES[settings.head]

    def learn(rows: Array, rates: Sequence[float]) -> _Heads:
        x, own = train.x[rows], y[torch.from_numpy(rows)]
        return _learn(x, own, rates, settings=settings, loss=loss, seed=seed, device=device)

    rate = settings.learning_rate or rates[len(rates) // 2]
    if held.any() and settings.learning_rate is None:
        logits = learn(~held, rates).logits(train.x[held])  # (S, N, K)
        quality = [fit_quality(own.numpy(), train.y[held], classes) for own in logits]
        sound = logits.isfinite().flatten(1).all(1).numpy()  # a head that diverged is worse than any other
        rate = rates[int(np.argmax(np.where(sound, quality, -1.0)))]
    heads = learn(np.ones(len(y), dtype=bool), [rate])
    if not bool(torch.isfinite(heads.weight).all()):
        raise NonFiniteError(f"the {settings.head} head diverged at learning rate {rate:g}; use probe.head=logistic.")
    weight, bias = heads.weight[0], heads.bias[0]
    return LinearClassifier(classes, heads.mean, heads.scale, weight, bias, loss == "ce", {"learning_rate": rate})


def _learn(
    x: Array, y: Tensor, rates: Sequence[float], *, settings: ProbeConfig, loss: Loss, seed: int,
    device: torch.device | str,
) -> _Heads:  # fmt: skip
    N, D, K = *x.shape, y.shape[1]
    weights = [torch.zeros(D, K, device=device, requires_grad=True) for _ in rates]
    biases = [torch.zeros(K, device=device, requires_grad=True) for _ in rates]
    learner = _optimizer(settings, weights, biases, rates)
    norm = settings.batch_norm and N > 1
    layer = torch.nn.BatchNorm1d(D, eps=NORM_EPS, affine=False).to(device) if norm else None
    a_pass = math.ceil((settings.epoch_items or N) / settings.batch)
    fewest = FEWEST_STEPS if settings.learning_rate is None else 1
    steps, warmup = max(fewest, settings.epochs * a_pass), round(settings.warmup_epochs * a_pass)
    for step, rows in enumerate(_batches(y, steps, a_pass, settings, seed=seed)):
        for group in learner.param_groups:
            group["lr"] = learning_rate(step, steps=steps, warmup=warmup, peak=group["peak"], final=0.0)
        seen = torch.from_numpy(x[rows]).to(device)
        seen = seen if layer is None else layer(seen)
        logits = _all_logits(seen, torch.stack(weights), torch.stack(biases))
        learner.zero_grad()
        sum_of_losses(logits, y[torch.from_numpy(rows)].to(device), loss).backward()
        learner.step()
    mean, scale = torch.zeros(D), torch.ones(D)
    if layer is not None and layer.running_mean is not None and layer.running_var is not None:
        mean, scale = layer.running_mean.cpu(), (layer.running_var + NORM_EPS).sqrt().cpu()
    return _Heads(torch.stack(weights).detach().cpu(), torch.stack(biases).detach().cpu(), mean, scale)


def _batches(y: Tensor, steps: int, a_pass: int, settings: ProbeConfig, *, seed: int) -> Iterator[Array]:
    """The rows of each step: every item once an epoch, or with balanced sampling drawn by how rare its classes are."""
    source, N = generator(seed, "probe head"), len(y)
    rarity = (y / y.sum(0).clamp_min(1)).sum(1)  # (N,) Σ 1/n_c over an item's classes
    drawn = settings.sampling == "balanced" or settings.epoch_items is not None
    shares = rarity if settings.sampling == "balanced" else torch.ones(N)
    for step in range(steps):
        if drawn:
            yield torch.multinomial(shares, settings.batch, replacement=True, generator=source).numpy()
            continue
        if step % a_pass == 0:
            # Equal parts: a leftover of one item has no spread to be normalised by.
            batches = np.array_split(torch.randperm(N, generator=source).numpy(), a_pass)
        yield batches[step % a_pass]


def _optimizer(
    settings: ProbeConfig, weights: Sequence[Tensor], biases: Sequence[Tensor], rates: Sequence[float]
) -> torch.optim.Optimizer:
    """Every setting has its own peak of the learning rate; biases do not decay."""
    is_adamw = settings.head == "adamw"
    groups = [
        {"params": [part], "lr": rate, "peak": rate, "weight_decay": decay if is_adamw else 0.0}
        for parts, decay in ((weights, settings.weight_decay), (biases, 0.0))
        for part, rate in zip(parts, rates, strict=True)
    ]
    return torch.optim.AdamW(groups, betas=settings.betas) if is_adamw else torch.optim.SGD(groups, momentum=MOMENTUM)


def _all_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(N, D), (S, D, K), (S, K) -> (S, N, K)."""
    return torch.baddbmm(bias[:, None], x.expand(len(weight), -1, -1), weight)


def sum_of_losses(logits: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Of logits (S, B, K), targets (B, K): summed over settings, so that each learns as if alone; mean over items."""
    if loss == "bce":
        return binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="sum") / len(y)
    return -(logits.log_softmax(dim=2) * y).sum() / len(y)
