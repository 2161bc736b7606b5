"""Logistic regression on frozen features, solved to the optimum for a whole path of regularisation strengths.

Shapes: N items, D features, R = rank ≤ min(N, D) rotated features, K classes. With x standardised by the training
items' mean and deviation,

    min_W,b  C · Σ_n ℓ(W x_n + b, y_n) + ½‖W‖²

where ℓ is −log softmax[y] if an item has one label, and Σ_k −log σ(±s_k) (one classifier against the rest per class)
if it may have several. A rotation of x changes neither the loss nor ‖W‖, so x is turned onto its principal axes once;
there the Hessian is close to diagonal,

    H ≈ C · a_k · λ_j + 1,   λ = eigenvalues of XᵀX,   a_k = mean p_k (1 − p_k),

and L-BFGS on V = W · √H needs some tens of steps where the plain variables, correlated as pixels are, need hundreds.
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
MAX_ITERATIONS = 300  # of L-BFGS per fit; a usual fit needs under 100
TOLERANCE = 1e-9  # nats per item, of the objective's change between two steps; then it has no digit left to move
CHOOSING = 1e-5  # the same while a strength is chosen: its answers on held-back items move no more
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
    """Standardised training features on their principal axes."""

    x: Tensor  # (N, R) float64
    axes: Tensor  # (D, R), orthonormal columns: standardised x = x_rotated · axesᵀ
    spread: Tensor  # (R,) eigenvalues λ per item, λ/N
    mean: Tensor  # (D,)
    scale: Tensor  # (D,)


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
    weight = rotated.axes @ final.weight  # (R, K) -> (D, K)
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


def _rotate(features: Array, moments: Moments) -> _Rotated:
    mean, scale = moments
    x = (torch.from_numpy(features).double() - mean) / scale
    N, D = x.shape
    if D <= N:
        spread, axes = torch.linalg.eigh(x.T @ x)
        kept = spread > KEPT_AXES * spread[-1]
        axes = axes[:, kept]
    else:  # the axes lie in the span of the items: the smaller problem is the items' products
        spread, rows = torch.linalg.eigh(x @ x.T)
        kept = spread > KEPT_AXES * spread[-1]
        axes = x.T @ (rows[:, kept] / spread[kept].sqrt())
    return _Rotated(x @ axes, axes, spread[kept] / N, mean, scale)


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
    for strength in strengths:
        own = _Solved(found.weight[:, fitted], found.bias[fitted], found.converged)
        own = _solve(x, y[:, fitted], strength, own, spread=rotated.spread, multilabel=multilabel, tolerance=tolerance)
        found = _Solved(torch.zeros_like(found.weight), torch.where(fitted, 0.0, bias), own.converged)
        found.weight[:, fitted], found.bias[fitted] = own.weight, own.bias
        yield found


def _solve(
    x: Tensor, y: Tensor, strength: float, start: _Solved, *, spread: Tensor, multilabel: bool, tolerance: float
) -> _Solved:
    """L-BFGS from `start`, in variables scaled by the square root of the modelled Hessian."""
    N, loss = len(x), _against_the_rest if multilabel else _softmax_loss
    penalty = 1 / (strength * N)  # the objective per item: mean ℓ + ½·penalty·‖W‖²
    p = loss(x @ start.weight + start.bias, y)[1] + y  # the derivative is p − y
    curvature = (p * (1 - p)).mean(dim=0).clamp(min=SMALLEST_CURVATURE)  # (K,)
    stretch = (spread[:, None] * curvature + penalty).rsqrt()  # (R, K): W = stretch · V
    lift = curvature.rsqrt()  # (K,): b = lift · v
    v = torch.cat([start.weight / stretch, (start.bias / lift)[None]])  # (R + 1, K)
    optimizer = torch.optim.LBFGS(
        [v], max_iter=MAX_ITERATIONS, history_size=20, tolerance_grad=0.0, tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def objective() -> float:
        W = stretch * v[:-1]
        total, residual = loss(torch.addmm(lift * v[-1], x, W), y)
        residual /= N
        slope = (residual.T @ x).T  # Xᵀ(p − y), in the order that reads x row by row
        v.grad = torch.cat([(slope + penalty * W) * stretch, (residual.sum(dim=0) * lift)[None]])
        return float(total / N + 0.5 * penalty * W.square().sum())

    optimizer.step(objective)
    converged = optimizer.state[v]["n_iter"] < MAX_ITERATIONS
    return _Solved(stretch * v[:-1], lift * v[-1], bool(converged))


def _softmax_loss(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n ℓ and its derivative by the scores (N, K)."""
    log_p = scores.log_softmax(dim=1)
    return -(log_p * y).sum(), log_p.exp() - y


def _against_the_rest(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one classifier against the rest per class."""
    return torch.nn.functional.softplus(scores).sum() - (scores * y).sum(), scores.sigmoid() - y
