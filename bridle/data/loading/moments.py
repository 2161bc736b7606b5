"""Mean and standard deviation of a data set, per channel, which its samples are normalised by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bridle.data.loading.loader import reads_files, sample_or_error
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order, note_unprotected
from bridle.data.sources import Source, real_values
from bridle.errors import DataError

SMALLEST_STD = 1e-6  # a channel that varies less counts as constant


class Moments(NamedTuple):
    """Mean and standard deviation of a data set, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    count: int  # type: ignore[assignment]  # samples measured
    constant: tuple[int, ...] = ()  # channels that never change; their std is given as 1


def measure(
    source: Source,
    *,
    limit: int = 2048,
    seed: int = 0,
    workers: int = 0,
    grid: Sequence[int] | None = None,  # tokens along each axis, to leave padding out; None: everything counts
    tell: Callable[[int, int], None] | None = None,  # hears of samples done, samples in all
) -> Moments:
    """Mean and standard deviation per channel over up to `limit` samples spread over the source; bad ones are skipped.

    Padding would pull the mean of short recordings to the feature floor.
    Streaming in float64: with n values seen and n' new ones, δ = mean' − mean,
    mean ← mean + δ·n'/(n+n'),   M2 ← M2 + M2' + δ²·n·n'/(n+n'),   var = M2/n.
    """
    chosen = Order(size=len(source), seed=seed, phase="measure").at(range(min(limit, len(source)))).tolist()
    count, n, reason = 0, 0, ""
    mean = squares = torch.zeros((), dtype=torch.float64)
    if workers == 0 and reads_files(source):
        note_unprotected()
    spreads = map_in_order(partial(spread, source, grid), chosen, workers=workers, records=(Spread,))
    for done, found in enumerate(spreads, start=1):
        if tell is not None:
            tell(done, len(chosen))
        if isinstance(found, DataError):
            reason = str(found)
            continue
        delta, share = found.mean - mean, found.n / (n + found.n)
        squares = squares + found.squares + delta.square() * (n * share)
        mean = mean + delta * share
        n, count = n + found.n, count + 1
    if count == 0:
        raise DataError(f"none of the {len(chosen)} samples tried can be used; the last one: {reason}")
    std = (squares / n).sqrt()
    constant = tuple(int(channel) for channel in torch.nonzero(std < SMALLEST_STD).flatten())
    if len(constant) == len(std):
        raise DataError(
            f"all values of the {count} samples measured are the same, {mean.tolist()} per channel; there is nothing "
            "to learn from. Check that the files hold what they should."
        )
    std[list(constant)] = 1.0  # a dead channel becomes zero, not rounding noise blown up a million times
    return Moments(mean=tuple(mean.tolist()), std=tuple(std.tolist()), count=count, constant=constant)


class Spread(NamedTuple):
    """What one sample adds to the moments, per channel."""

    n: int  # values
    mean: Tensor  # (C,) float64
    squares: Tensor  # (C,) float64, summed squares around the mean


def spread(source: Source, grid: Sequence[int] | None, index: int) -> Spread | DataError:
    """The moments of sample `index`, or why it cannot be used."""
    sample = sample_or_error(source, index)
    if isinstance(sample, DataError):
        return sample
    x = sample.x.flatten(1).double()  # (C, values)
    if sample.valid is not None and grid is not None and sample.valid.any():
        x = x[:, real_values(sample.valid[None], sample.x.shape[1:], grid).flatten()]
    mean = x.mean(1)
    return Spread(x.shape[1], mean, (x - mean[:, None]).square().sum(1))
