"""Judging frozen features: collect them once, then fit a linear classifier on top.

Shapes: B batch, C channels, T tokens, D feature width, N items.

The probe is multinomial logistic regression on features standardised with the training items' mean and deviation,

    min_W  C · Σ_n −log softmax(W x_n + b)[y_n] + ½‖W‖²,

with C chosen on a stratified part of the training items, then fitted again on all of them; the test items are scored
once.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle.errors import DataError, NonFiniteError
from bridle.evaluate.metrics import Interval, balanced_accuracy, best_class, bootstrap_interval, top_k_hits
from bridle.seeding import generator

Array = NDArray[Any]

RAW_LIMIT = 4096  # the widest raw feature vector a probe should be asked to fit
STRENGTHS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
MAX_ITERATIONS = 300  # of L-BFGS per fit; a usual fit needs under 50
TOLERANCE = 1e-5  # at scikit-learn's 1e-4 weak regularisation stops where the stronger one before it stopped


class Batch(Protocol):
    """What a loader yields. `label` is (B,) or None, `valid` (B, T) or None where every token is real."""

    @property
    def x(self) -> Tensor: ...
    @property
    def label(self) -> Tensor | None: ...
    @property
    def valid(self) -> Tensor | None: ...


class Features(NamedTuple):
    """One vector and one label per item."""

    x: NDArray[np.float32]  # (N, D)
    y: NDArray[np.int64]  # (N,)


class ProbeResult(NamedTuple):
    """What a linear probe found."""

    accuracy: float  # top-1 on the test items
    interval: Interval  # 95 % bootstrap over the test items
    top5: float | None  # None with five classes or fewer, where it says nothing
    balanced_accuracy: float
    chance: float  # accuracy on the test items of always answering the commonest training class
    classes: int
    train_items: int
    test_items: int
    strength: float  # the C that was chosen; smaller is more regularised
    converged: bool  # did the final fit end before its iteration limit?
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {**self._asdict(), "interval": list(self.interval)}


def collect_features(batches: Iterable[Batch], features: Callable[[Tensor, Tensor | None], Tensor]) -> Features:
    """Run `features(x, valid) -> (B, D)` over all batches, without gradients, and join the rows in order."""
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    with torch.no_grad():
        for index, batch in enumerate(batches):
            if batch.label is None or bool((batch.label < 0).any()):
                raise DataError(
                    f"batch {index} has items without a label, but a probe needs one for every item; "
                    "put the files in one folder per class, or name a manifest with a label column."
                )
            found = features(batch.x, batch.valid)
            if not bool(torch.isfinite(found).all()):
                bad = int((~torch.isfinite(found)).flatten(1).any(dim=1).sum())
                raise NonFiniteError(
                    f"features of {bad} of {len(found)} items in batch {index} are not finite; "
                    "the encoder or its input holds NaN or infinity: evaluate an earlier checkpoint."
                )
            xs.append(found.float().cpu())
            ys.append(batch.label.long().cpu())
    if not xs:
        raise DataError("there are no items to collect features from; expected at least one batch.")
    return Features(torch.cat(xs).numpy(), torch.cat(ys).numpy())


def mean_pool(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """(B, T, D) -> (B, D): mean over the real tokens; a sample without any gives zeros."""
    return axis_pool(tokens, tokens.shape[1:2], axis=None, valid=valid)


def axis_pool(tokens: Tensor, grid: Sequence[int], axis: int | None, valid: Tensor | None = None) -> Tensor:
    """Mean over all grid axes but one, the rest concatenated: (B, T, D) -> (B, grid[axis]·D).

    For a (time, frequency) grid, axis 1 keeps one mean per frequency band. A place without a real token gives zeros.
    """
    B, T, D = tokens.shape
    kept = 1 if axis is None else grid[axis]
    real = tokens.new_ones(B, T, dtype=torch.bool) if valid is None else valid
    # Zero the padding before summing: a NaN there must not leak through a multiplication by zero.
    filled = torch.where(real[..., None], tokens, tokens.new_zeros(()))
    total = _sum_but_one(filled.reshape(B, *grid, D), axis)
    count = _sum_but_one(real.to(tokens.dtype).reshape(B, *grid, 1), axis)
    return (total / count.clamp(min=1)).reshape(B, kept * D)


def raw_features(x: Tensor, valid: Tensor | None = None, *, grid: Sequence[int] | None = None) -> Tensor:
    """The baseline without any network: (B, C, *input) -> (B, ·), at most 4,096 numbers where that is possible.

    A small input is flattened. Of a larger one, mean and standard deviation are taken along its first axis (log-mel:
    over time, per band), and along further axes until few enough numbers are left. Padding is left out of both;
    to tell where it is, `grid` (patches per axis) must be given with a `valid` (B, T) that is not all true.
    """
    if x[0].numel() <= RAW_LIMIT:
        return x.flatten(1).float()
    axes = 1
    while axes < x.dim() - 2 and 2 * x[0].numel() // int(np.prod(x.shape[2 : 2 + axes])) > RAW_LIMIT:
        axes += 1
    dims = tuple(range(2, 2 + axes))
    real = _real_positions(x, valid, grid)  # (B, 1, *input)
    x = torch.where(real, x.double(), 0.0)
    count = real.sum(dim=dims, keepdim=True).clamp(min=1)
    mean = x.sum(dim=dims, keepdim=True) / count
    spread = torch.where(real, (x - mean).square(), 0.0).sum(dim=dims, keepdim=True) / count
    return torch.cat([mean.flatten(1), spread.sqrt().flatten(1)], dim=1).float()


def split_features(features: Features, *, seed: int, test_share: float = 0.2) -> tuple[Features, Features]:
    """(train, test), stratified by class: for a data set that comes without a test split."""
    test = _stratified(features.y, test_share, generator(seed, "probe split"))
    if not test.any():
        raise DataError(
            f"cannot hold back a test split: none of the {len(np.unique(features.y))} classes has two items; "
            "add labelled items or give a test split."
        )
    return Features(features.x[~test], features.y[~test]), Features(features.x[test], features.y[test])


def linear_probe(
    train: Features, test: Features, *, seed: int, strengths: Sequence[float] = STRENGTHS, validation_share: float = 0.2
) -> ProbeResult:
    """Fit on `train`, choosing C on a part of it, and score `test` once. The same inputs give the same result."""
    began = time.perf_counter()
    _check(train, test)
    strength = _choose_strength(train, sorted(strengths), validation_share, generator(seed, "probe validation"))
    *_, fit = _fit_along(train, [c for c in sorted(strengths) if c <= strength])
    scores, y = fit.scores(test.x), fit.columns(test.y)  # (N, K), (N,)
    hits = top_k_hits(scores, y) & (y >= 0)
    commonest = np.bincount(fit.columns(train.y)).argmax()
    return ProbeResult(
        accuracy=float(hits.mean()),
        interval=bootstrap_interval(hits, generator=generator(seed, "probe bootstrap")),
        top5=float((top_k_hits(scores, y, k=5) & (y >= 0)).mean()) if len(fit.classes) > 5 else None,
        balanced_accuracy=balanced_accuracy(fit.classes[best_class(scores)], test.y),
        chance=float((y == commonest).mean()),
        classes=len(fit.classes),
        train_items=len(train.y),
        test_items=len(test.y),
        strength=float(strength),
        converged=fit.converged,
        seconds=time.perf_counter() - began,
    )


class _Fit(NamedTuple):
    """A fitted classifier: scores = (x − mean)/scale · weight + bias."""

    classes: Array  # (K,) labels of the columns
    mean: Array  # (D,)
    scale: Array  # (D,)
    weight: Array  # (D, K)
    bias: Array  # (K,)
    converged: bool

    def scores(self, x: Array) -> Array:
        scores: Array = (x.astype(np.float64) - self.mean) / self.scale @ self.weight + self.bias
        return scores

    def columns(self, y: Array) -> Array:
        """The column of each label; −1 for a label that training never saw, which is then never answered rightly."""
        place = np.searchsorted(self.classes, y).clip(max=len(self.classes) - 1)
        return np.where(self.classes[place] == y, place, -1)


def _fit_along(items: Features, strengths: Sequence[float]) -> Iterator[_Fit]:
    """One fit per C, from strong to weak regularisation, each starting where the one before it ended."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    x = items.x.astype(np.float64)
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-8, scale, 1.0)  # a constant feature stays at zero
    x = (x - mean) / scale
    model = LogisticRegression(solver="lbfgs", warm_start=True, max_iter=MAX_ITERATIONS, tol=TOLERANCE)
    for strength in strengths:
        # As many threads as torch may use: the bits of a fit depend on their number.
        with warnings.catch_warnings(), threadpool_limits(torch.get_num_threads(), user_api="blas"):
            warnings.simplefilter("ignore", ConvergenceWarning)  # told by `converged` instead
            model.set_params(C=strength).fit(x, items.y)
        weight, bias = model.coef_.T, model.intercept_
        if len(model.classes_) == 2:  # scikit-learn keeps only the second class's logit
            weight, bias = np.concatenate([-weight, weight], axis=1) / 2, np.concatenate([-bias, bias]) / 2
        converged = int(model.n_iter_.max()) < MAX_ITERATIONS
        yield _Fit(model.classes_, mean, scale, weight.copy(), bias.copy(), converged)


def _choose_strength(train: Features, path: Sequence[float], share: float, source: torch.Generator) -> float:
    """The C with the best accuracy on a held-back part of the training items; ties go to the stronger one.

    Weaker and weaker regularisation is tried only until it has hurt by a point, or twice in a row: such fits take
    longest.
    """
    held = _stratified(train.y, share, source)
    if not held.any() or len(path) == 1:
        return path[len(path) // 2]
    accuracy: list[float] = []
    for fit in _fit_along(Features(train.x[~held], train.y[~held]), path):
        accuracy.append(float((fit.classes[best_class(fit.scores(train.x[held]))] == train.y[held]).mean()))
        if max(accuracy[-2:]) < max(accuracy) or accuracy[-1] < max(accuracy) - 0.01:
            break
    return path[int(np.argmax(accuracy))]


def _stratified(y: Array, share: float, source: torch.Generator) -> Array:
    """(N,) bool, true for about `share` of each class; a class keeps an item on both sides if it has two."""
    held = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        items = np.flatnonzero(y == label)
        order = torch.randperm(len(items), generator=source).numpy()
        count = min(max(1, round(share * len(items))), len(items) - 1)
        held[items[order[:count]]] = True
    return held


def _check(train: Features, test: Features) -> None:
    if len(train.y) == 0 or len(test.y) == 0:
        raise DataError(f"a probe needs training and test items; got {len(train.y)} and {len(test.y)}.")
    if len(np.unique(train.y)) < 2:
        raise DataError("a probe needs at least two classes, but all training items have the same label.")
    for name, items in (("training", train), ("test", test)):
        if not np.isfinite(items.x).all():
            raise NonFiniteError(f"{name} features are not finite; evaluate an earlier checkpoint.")


def _sum_but_one(x: Tensor, axis: int | None) -> Tensor:
    """Sum (B, *grid, D) over all grid axes but `axis`."""
    rank = x.dim() - 2
    kept = None if axis is None else axis % rank
    return x.sum(dim=[1 + a for a in range(rank) if a != kept])


def _real_positions(x: Tensor, valid: Tensor | None, grid: Sequence[int] | None) -> Tensor:
    """(B, 1, *input) bool from (B, T) tokens."""
    if valid is None or bool(valid.all()):
        return torch.ones_like(x[:, :1], dtype=torch.bool)
    if grid is None:
        raise ValueError("raw_features needs grid= (patches per axis) to leave padding out of its means.")
    real = valid.reshape(len(valid), 1, *grid)
    for axis, (size, patches) in enumerate(zip(x.shape[2:], grid, strict=True)):
        real = real.repeat_interleave(size // patches, dim=2 + axis)
    return real
