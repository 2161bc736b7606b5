"""Logistic regression on frozen features, solved to the optimum for a whole path of regularisation strengths.

Shapes: N items, D features, R = rank ≤ min(N, D) rotated features, K classes. With x standardised by the training
items' mean and deviation,

    min_W,b  C · Σ_n ℓ(W x_n + b, y_n) + ½‖W‖²

where ℓ is −log softmax[y] if an item has one label, and Σ_k −log σ(±s_k) (one classifier against the rest per class)
if it may have several. A rotation of x changes neither the loss nor ‖W‖, so x is turned onto its principal axes once;
there the Hessian is close to diagonal,

    H ≈ C · a_k · λ_j + 1,   λ = eigenvalues of XᵀX,   a_k = mean p_k (1 − p_k),

which preconditions the conjugate gradients that solve each step of Newton's method. Steps are computed in float32,
the objective and its slope in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bridle.evaluate.features import Array, Features
from bridle.evaluate.metrics import best_class, mean_average_precision

STRENGTHS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
MAX_ITERATIONS = 60  # Newton steps per fit; a usual fit needs about 10
TOLERANCE = 1e-9  # nats per item that the last step should gain; after it, less than a tenth of that is left
CHOOSING = 1e-5  # the same while a strength is chosen: its answers on held-back items move no more
MOST_PRODUCTS = 200  # with the Hessian in a Newton step
# A step ends when as many products as it had, each worth its last, would gain less than this share: little far from the
# optimum, where the next step looks different anyway.
ENOUGH, ENOUGH_FAR = 0.2, 0.5
NEAR = 1e-3  # nats per item that a step gains
FLOOR = 30.0  # penalties that the modelled Hessian has at least: items that are certain flatten it
SMALLEST_STEP = 1e-6  # share of a Newton step
BLOCK = 256  # rows multiplied with others at once
KEPT_AXES = 1e-10  # principal axes with less than this share of the largest eigenvalue tell nothing
SMALLEST_CURVATURE = 1e-4  # of a_k: where all answers are certain the model of the Hessian must not vanish

Moments = tuple[Tensor, Tensor]  # mean and deviation (D,), float64


class LinearClassifier(NamedTuple):
    """A fitted classifier: scores = (x − mean)/scale · weight + bias, computed in the precision of the weight."""

    classes: Array  # (K,) labels of the columns
    mean: Tensor  # (D,)
    scale: Tensor  # (D,)
    weight: Tensor  # (D, K)
    bias: Tensor  # (K,)
    exclusive: bool  # does every item have one label?
    setting: dict[str, float | bool]  # what was chosen, and whether the fit ended before its iteration limit

    def scores(self, items: Features) -> Array:
        """(N, K): log-probabilities where classes exclude one another, else logits."""
        x = (torch.from_numpy(items.x).to(self.weight.dtype) - self.mean) / self.scale
        return as_scores(x @ self.weight + self.bias, exclusive=self.exclusive)


class _Rotated(NamedTuple):
    """Standardised training features on their principal axes, the orthonormal columns of `left · right` (D, R)."""

    x: Tensor  # (N, R) float64
    left: Tensor  # (D, D or N)
    right: Tensor  # (D or N, R)
    spread: Tensor  # (R,) eigenvalues λ per item, λ/N
    mean: Tensor  # (D,)
    scale: Tensor  # (D,)

    def turned_back(self, weight: Tensor) -> Tensor:
        """(R, K) on the axes -> (D, K) of the standardised features."""
        return self.left @ (self.right @ weight)


class _Solved(NamedTuple):
    """The optimum for one strength, on the principal axes."""

    weight: Tensor  # (R, K)
    bias: Tensor  # (K,)
    converged: bool


def fit_logistic(
    train: Features, held: Array, *, strengths: Sequence[float] = STRENGTHS, moments: Moments | None = None
) -> LinearClassifier:
    """Choose C on the `held` (N,) part of the training items, then fit all of them with it.

    Of several parts, (V, N), each takes its turn, and all answers count. Features are standardised by `moments`, the
    training items' own without them. Ties go to the stronger regularisation. Weaker and weaker regularisation is tried
    only until it has hurt by a point, or twice in a row: such fits take longest and do not recover.
    """
    path = sorted(strengths)
    rotated, (classes, targets) = _rotate(train.x, moments or moments_of(train.x)), one_column_each(train)
    strength, near = path[len(path) // 2], None
    parts = [part for part in np.atleast_2d(held) if _can_choose(train.y, part)]
    if parts and len(path) > 1:
        tried, quality = list[_Solved](), list[float]()
        rest = [torch.from_numpy(~part) for part in parts]
        fits = [_solve_along(rotated, targets, path, rows, train.multilabel, tolerance=CHOOSING) for rows in rest]
        for found in zip(*fits, strict=True):
            each = []
            for part, own in zip(parts, found, strict=True):
                logits = rotated.x[torch.from_numpy(part)] @ own.weight + own.bias
                each.append(fit_quality(as_scores(logits, exclusive=not train.multilabel), train.y[part], classes))
            tried.append(found[0])
            quality.append(float(np.average(each, weights=[part.sum() for part in parts])))
            if max(quality[-2:]) < max(quality) or quality[-1] < max(quality) - 0.01:
                break
        best = int(np.argmax(quality))
        strength, near = path[best], tried[best]
    # What was found without the validation items is close to what all items ask for.
    (final,) = _solve_along(rotated, targets, [strength], slice(None), train.multilabel, start=near)
    weight = rotated.turned_back(final.weight)
    setting: dict[str, float | bool] = {"strength": float(strength), "converged": final.converged}
    return LinearClassifier(classes, rotated.mean, rotated.scale, weight, final.bias, not train.multilabel, setting)


def _can_choose(y: Array, part: Array) -> bool:
    """Are there items in the part, and among the others something to learn?"""
    rest = y[~part]
    if not part.any() or not len(rest):
        return False
    return bool((rest.any(axis=0) & ~rest.all(axis=0)).any()) if y.ndim == 2 else len(np.unique(rest)) > 1


def fit_quality(scores: Array, y: Array, classes: Array) -> float:
    """What settings are chosen by on validation items: mAP where items have several labels, else accuracy."""
    if y.ndim == 2:
        return float(np.nan_to_num(mean_average_precision(scores, y)))
    return float((classes[best_class(scores)] == y).mean())


def one_column_each(items: Features) -> tuple[Array, Tensor]:
    """Labels of the columns (K,) and 0/1 targets (N, K) float64."""
    if items.multilabel:
        return np.arange(items.y.shape[1]), torch.from_numpy(items.y).double()
    classes, place = np.unique(items.y, return_inverse=True)
    return classes, torch.nn.functional.one_hot(torch.from_numpy(place), len(classes)).double()


def as_scores(logits: Tensor, *, exclusive: bool) -> Array:
    """(N, K): log-probabilities where classes exclude one another, else the logits."""
    found: Array = (logits.log_softmax(dim=1) if exclusive else logits).numpy()
    return found


def moments_of(features: Array) -> Moments:
    """Mean and deviation (D,) of features (N, D)."""
    x = torch.from_numpy(features).double()
    mean, scale = x.mean(dim=0), x.std(dim=0, correction=0)
    return mean, torch.where(scale > 1e-8, scale, 1.0)  # a constant feature stays at zero


def in_their_span(train: Features, test: Features) -> tuple[Features, Features]:
    """Both standardised by the training items and turned onto an orthonormal basis of those items' span.

    A classifier's weights lie in the span of the items it is fitted on, so that fits on some of them stay the same, and
    cost less. With more items than features they are only standardised.
    """
    mean, scale = moments_of(train.x)
    known, asked = ((torch.from_numpy(items.x).double() - mean) / scale for items in (train, test))
    if len(known) < known.shape[1]:
        rotated = _rotate(train.x, (mean, scale))
        known, asked = rotated.x, asked @ rotated.left @ rotated.right
    return train._replace(x=known.numpy()), test._replace(x=asked.numpy())


def _rotate(features: Array, moments: Moments) -> _Rotated:
    mean, scale = moments
    x = (torch.from_numpy(features).double() - mean) / scale
    N, D = x.shape
    if D <= N:
        spread, axes = torch.linalg.eigh(products(x.T))
        kept = spread > KEPT_AXES * spread[-1]
        axes = axes[:, kept]
        return _Rotated(x @ axes, torch.eye(D, dtype=x.dtype), axes, spread[kept] / N, mean, scale)
    # The axes xᵀ·rows/√λ lie in the span of the items: the smaller problem is the items' products.
    spread, rows = torch.linalg.eigh(products(x))
    kept = spread > KEPT_AXES * spread[-1]
    length, rows = spread[kept].sqrt(), rows[:, kept]
    return _Rotated(rows * length, x.T, rows / length, spread[kept] / N, mean, scale)


def products(x: Tensor) -> Tensor:
    """x · xᵀ (N, N) in blocks, those above the diagonal copied from below."""
    found = x.new_empty(len(x), len(x))
    for start in range(0, len(x), BLOCK):
        rows = slice(start, start + BLOCK)
        below = x[start:] @ x[rows].T
        found[start:, rows], found[rows, start:] = below, below.T
    return found


def _solve_along(
    rotated: _Rotated,
    targets: Tensor,
    strengths: Sequence[float],
    rows: Tensor | slice,
    multilabel: bool,
    *,
    start: _Solved | None = None,
    tolerance: float = TOLERANCE,
) -> Iterator[_Solved]:
    """One optimum per C, from strong to weak regularisation, each starting where the one before it ended."""
    x, y = rotated.x[rows], targets[rows]
    share = y.mean(dim=0)
    # A class that is nowhere or everywhere in these rows has no finite optimum; it gets one score for all items.
    fitted = (share > 0) & (share < 1) if multilabel else share > 0
    bias = share.logit() if multilabel else share.log()
    found = _Solved(x.new_zeros(x.shape[1], len(share)), bias, True) if start is None else start
    found = found._replace(bias=torch.where(found.bias.isfinite(), found.bias, bias))
    x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)  # the last weight is the bias
    problem = _Problem(x, x.float(), y[:, fitted], torch.cat([rotated.spread, x.new_ones(1)]), multilabel)
    for strength in strengths:
        before = torch.cat([found.weight, found.bias[None]])[:, fitted]
        after, converged = _solve(problem, strength, before, tolerance=tolerance)
        found = _Solved(torch.zeros_like(found.weight), torch.where(fitted, 0.0, bias), converged)
        found.weight[:, fitted], found.bias[fitted] = after[:-1], after[-1]
        yield found


class _Problem(NamedTuple):
    """What is fitted: items on their principal axes with a constant 1 as the last feature, and their targets."""

    x: Tensor  # (N, R + 1) float64
    x32: Tensor  # the same in float32
    y: Tensor  # (N, K)
    spread: Tensor  # (R + 1,)
    multilabel: bool

    def loss(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n ℓ and its derivative by the scores (N, K)."""
        return _against_the_rest(scores, self.y) if self.multilabel else _softmax_loss(scores, self.y)


def _solve(problem: _Problem, strength: float, V: Tensor, *, tolerance: float) -> tuple[Tensor, bool]:
    """Newton's method from weights and bias V (R + 1, K): where it ended, and whether at the optimum."""
    x, N = problem.x, len(problem.x)
    penalty = x.new_full((x.shape[1], 1), 1 / (strength * N))  # the objective per item: mean ℓ + ½·penalty·‖W‖²
    penalty[-1] = 0.0  # the bias is free
    scores = x @ V
    total, residual = problem.loss(scores)
    objective = total / N + 0.5 * (penalty * V.square()).sum()
    for _ in range(MAX_ITERATIONS):
        slope = (residual.T @ x).T / N + penalty * V  # Xᵀ(p − y), in the order that reads x row by row
        step, gain = _newton_step(problem, residual + problem.y, slope, penalty)
        change, share = x @ step, 1.0
        while True:  # half as far until it pays
            ahead = V - share * step
            total, residual = problem.loss(scores - share * change)
            lower = total / N + 0.5 * (penalty * ahead.square()).sum()
            if lower <= objective - 1e-4 * share * gain or share < SMALLEST_STEP:
                break
            share /= 2
        V, scores, objective = ahead, scores - share * change, lower
        if gain < tolerance or share < SMALLEST_STEP:
            return V, bool(gain < CHOOSING)
    return V, False


def _newton_step(problem: _Problem, p: Tensor, slope: Tensor, penalty: Tensor) -> tuple[Tensor, float]:
    """Solve H · step = slope (R + 1, K) by preconditioned conjugate gradients; returns it and how much it should gain.

    In float32: an inexact step costs a further one, not the optimum. It ends when a further product gains little.
    """
    x, N, p = problem.x32, len(problem.x), p.float()
    spread = problem.spread[:, None] * (p * (1 - p)).double().mean(dim=0).clamp(min=SMALLEST_CURVATURE)
    model = torch.maximum(spread, FLOOR * penalty) + penalty  # (R + 1, K), the diagonal of H ≈
    model, penalty = model.float(), penalty.float()

    def hessian(v: Tensor) -> Tensor:
        u = x @ v
        u = p * (1 - p) * u if problem.multilabel else p * (u - (p * u).sum(dim=1, keepdim=True))
        return (u.T @ x).T / N + penalty * v

    rest = slope.float()
    step, near = torch.zeros_like(rest), rest / model
    along, size, gain = near, float((rest * near).sum()), 0.0
    for product in range(1, MOST_PRODUCTS + 1):
        if size <= 0.0:
            break
        bent = hessian(along)
        length = size / float((along * bent).sum())
        step += length * along
        rest = rest - length * bent
        gain += (own := 0.5 * length * size)
        if product * own < (ENOUGH if gain < NEAR else ENOUGH_FAR) * gain:
            break
        near = rest / model
        before, size = size, float((rest * near).sum())
        along = near + (size / before) * along
    return step.double(), gain


def _softmax_loss(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n ℓ and its derivative by the scores (N, K)."""
    log_p = scores.log_softmax(dim=1)
    return -(log_p * y).sum(), log_p.exp() - y


def _against_the_rest(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one classifier against the rest per class."""
    return torch.nn.functional.softplus(scores).sum() - (scores * y).sum(), scores.sigmoid() - y
