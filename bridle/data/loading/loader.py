"""Batches for an optimizer step, a codebook start or an evaluation, from any source.

Everything is a function of names, nothing is state: row i of the global batch of step s is the sample at stream
position t = s·B + i (`order.py`), augmented by generator(seed, phase, s, "augment", t). So the number of workers, the
number of ranks and a restart cannot change a batch, and no loader state is saved.

Shapes: x (B, C, *input) float32, normalised per channel as (x − mean) / std; valid (B, T).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bridle import failpoints
from bridle.data.loading.order import Order
from bridle.data.loading.watchdog import watched
from bridle.data.loading.worker_pool import map_in_order, note_unprotected
from bridle.data.sources import Sample, Source, class_shares
from bridle.errors import DataError, UsageError
from bridle.seeding import generator, mix

ATTEMPTS = 20  # replacements tried for one bad sample; with half of all files bad, one row in a million fails


class BadSample(NamedTuple):
    """A sample that could not be used, and why."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    name: str
    reason: str


class Batch(NamedTuple):
    """Rows of a global batch, ready for the network."""

    x: Tensor  # (B, C, *input) float32, normalised
    index: Tensor  # type: ignore[assignment]  # (B,) int64, the samples shown (after replacement of bad ones)
    label: Tensor | None  # (B,) int64, or (B, K) float32 shares of the classes; None for unlabelled data
    valid: Tensor | None  # (B, T) bool, False where a token is padding; None means all tokens are real
    bad: tuple[BadSample, ...]  # samples that had to be replaced, each once
    rows: slice  # which rows of the global batch (or of the whole pass) these are


class Draw(NamedTuple):
    """What one micro-batch shows: positions of the stream and how to load them."""

    step: int
    positions: range  # stream positions
    rows: slice
    augment: bool


class SampleOrder(Protocol):
    """Which sample comes at which stream position; a pure function that workers hold a copy of."""

    def at(self, positions: ArrayLike) -> NDArray[np.int64]: ...


@dataclass(frozen=True, kw_only=True)
class BatchMaker:
    """Turns draws into batches; a pure function that workers hold a copy of.

    A sample that cannot be used is replaced by another one that only the seed decides; with `strict` it raises.
    """

    source: Source
    seed: int
    phase: str
    mean: Tensor
    std: Tensor
    order: SampleOrder | None
    strict: bool

    def __call__(self, draw: Draw) -> Batch:
        positions = list(draw.positions)
        drawn = positions if self.order is None else self.order.at(positions).tolist()
        samples, shown, bad = list[Sample](), list[int](), dict[int, BadSample]()
        for position, first in zip(positions, drawn, strict=True):
            index = first
            for attempt in range(1, ATTEMPTS + 1):
                randomness = generator(self.seed, self.phase, draw.step, "augment", position) if draw.augment else None
                try:
                    sample = load_checked(self.source, index, randomness)
                    if not self.strict and is_constant(sample) and is_blank(self.source, index):
                        raise DataError(f"{self.source.describe(index)} holds the same value everywhere.")
                    break
                except DataError as error:
                    if self.strict:
                        raise
                    bad.setdefault(index, BadSample(index, self.source.describe(index), str(error)))
                index = mix(self.seed, "replace", index, attempt) % len(self.source)
            else:
                last = next(reversed(bad.values()))
                raise DataError(
                    f"too many bad samples: {ATTEMPTS} draws in a row cannot be used, the last one: {last.reason} "
                    "Mend or remove such files, or point data.root elsewhere."
                )
            samples.append(sample)
            shown.append(index)
        x = torch.stack([sample.x for sample in samples])  # (B, C, *input)
        return Batch(
            x=normalise(x, mean=self.mean, std=self.std),
            index=torch.tensor(shown, dtype=torch.int64),
            label=stack_labels(samples),
            valid=stack_valid(samples),
            bad=tuple(bad.values()),
            rows=draw.rows,
        )


class Loader:
    """The batches of one phase, for this rank."""

    def __init__(
        self,
        *,
        source: Source,
        seed: int,
        phase: str,
        batch: int,
        mean: Tensor | Sequence[float],
        std: Tensor | Sequence[float],
        workers: int = 0,
        augment: bool = True,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int | None = None,
        pin_memory: bool = False,
        order: SampleOrder | None = None,  # None: every sample once an epoch
        repeats: int = 1,  # steps for which a batch stays
    ) -> None:
        require_even_shares(batch, world_size)
        if micro_batch is not None and micro_batch < 1:
            raise UsageError(f"micro_batch is {micro_batch}; expected at least 1.")
        self.source, self.batch, self.workers, self.augment = source, batch, workers, augment
        self.rank, self.world_size, self.pin_memory = rank, world_size, pin_memory
        self.repeats = repeats
        self.micro_batch = min(micro_batch or batch, batch // world_size)
        mean, std = moments_tensors(mean, std)
        self.maker = BatchMaker(
            source=source,
            seed=seed,
            phase=phase,
            mean=mean,
            std=std,
            order=order or Order(size=len(source), seed=seed, phase=phase),
            strict=False,
        )

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """For each optimizer step in [start, stop) the micro-batches of this rank, in row order.

        With `repeats` r, steps n·r to n·r + r − 1 get the n-th batch; it is made once.
        """
        turns = range(start // self.repeats, -(-stop // self.repeats))
        draws = (draw for turn in turns for draw in self.draws(turn))
        batches = made(self.maker, draws, workers=self.workers, pin_memory=self.pin_memory)
        for turn in turns:
            found = list(islice(batches, len(self.draws(turn))))
            for _ in range(max(start, turn * self.repeats), min(stop, (turn + 1) * self.repeats)):
                yield found

    def draws(self, step: int) -> list[Draw]:
        """This rank's rows of the `step`-th global batch, cut into micro-batches."""
        share = self.batch // self.world_size
        begin, end = self.rank * share, (self.rank + 1) * share
        first = step * self.batch
        return [
            Draw(step, range(first + cut.start, first + cut.stop), cut, self.augment)
            for cut in cuts(begin, end, self.micro_batch)
        ]

    def first(self, count: int, *, rows: int) -> Iterator[Batch]:
        """The first `count` samples of the phase's order (at most one epoch), un-augmented, `rows` at a time.

        The samples are cut into batches before they are shared out, whole batches to each rank, so that the network
        sees the same batches at every world size; ranks in order, their rows joined, are the samples in order.
        """
        draws = whole_batches(min(count, len(self.source)), rows, rank=self.rank, world_size=self.world_size)
        yield from made(self.maker, draws, workers=self.workers, pin_memory=self.pin_memory)


def sequential(
    source: Source,
    *,
    batch: int,
    mean: Tensor | Sequence[float],
    std: Tensor | Sequence[float],
    workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Every sample exactly once, in index order, un-augmented; a bad one raises DataError: evaluation must be whole.

    Of several ranks each gets whole batches, so that ranks in order, their rows joined, are the samples in order.
    """
    means, stds = moments_tensors(mean, std)
    maker = BatchMaker(source=source, seed=0, phase="sequential", mean=means, std=stds, order=None, strict=True)
    draws = whole_batches(len(source), batch, rank=rank, world_size=world_size)
    yield from made(maker, draws, workers=workers, pin_memory=pin_memory)


def whole_batches(count: int, size: int, *, rank: int, world_size: int) -> list[Draw]:
    """The un-augmented batches of the first `count` positions that a rank gets."""
    every = cuts(0, count, size)
    begin, end = (len(every) * r // world_size for r in (rank, rank + 1))
    return [Draw(0, range(cut.start, cut.stop), cut, False) for cut in every[begin:end]]


def made(maker: BatchMaker, draws: Iterable[Draw], *, workers: int, pin_memory: bool) -> Generator[Batch, None, None]:
    """The batches of the draws, in order."""
    if workers == 0 and reads_files(maker.source):
        note_unprotected()
    return map_in_order(maker, draws, workers=workers, records=(Batch, BadSample), pin_memory=pin_memory)


def require_even_shares(batch: int, world_size: int, *, key: str = "the batch") -> None:
    """UsageError unless every rank gets the same number of rows; `key` is the setting that says how many there are."""
    if batch < 1 or batch % world_size:
        raise UsageError(
            f"a global batch of {batch} cannot be shared evenly by {world_size} processes; "
            f"choose a multiple of {world_size} for {key}."
        )


def cuts(start: int, stop: int, size: int) -> list[slice]:
    """[start, stop) in slices of `size`, the last one shorter where it must be."""
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]


def load_checked(source: Source, index: int, randomness: torch.Generator | None) -> Sample:
    """Sample `index`; DataError if it cannot be read or holds a number that is not finite."""
    name = source.describe(index)
    try:
        with watched(name):
            failpoints.hit("sample.load")
            sample = source.load(index, randomness)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch has no error of its own
            raise
        raise DataError(f"{name} cannot be read: it needs more memory than a file may take.") from error
    if not torch.isfinite(sample.x).all():
        raise DataError(f"{name} holds numbers that are not finite (NaN or infinity).")
    return sample


def load_samples(source: Source, indices: Sequence[int], *, workers: int) -> Iterator[Sample | DataError]:
    """Samples, un-augmented, or why one cannot be used; files are decoded by at least one worker."""
    workers = max(1, workers) if reads_files(source) else 0
    return map_in_order(partial(sample_or_error, source), indices, workers=workers, records=(Sample,))


def sample_or_error(source: Source, index: int) -> Sample | DataError:
    try:
        return load_checked(source, index, None)
    except DataError as error:
        return error


def is_constant(sample: Sample) -> bool:
    """Is every value of the sample the same?"""
    low, high = sample.x.aminmax()
    return bool(low == high)


def is_blank(source: Source, index: int) -> bool:
    """Is there nothing in a file's sample, although it can be read? A random cut may show an empty part of a good file,
    so that the un-augmented sample decides. What does not come from files is its owner's business."""
    return reads_files(source) and is_constant(load_checked(source, index, None))


def reads_files(source: Source) -> bool:
    """Does a source, or the one it is a part or view of, decode files?"""
    owner: Any = source
    while not getattr(owner, "from_files", False):
        if not hasattr(owner, "source"):
            return False
        owner = owner.source
    return True


def normalise(x: Tensor, *, mean: Tensor, std: Tensor) -> Tensor:
    """(x − mean) / std per channel; x is (B, C, *input), mean and std have C numbers or one."""
    for name, moment in (("mean", mean), ("std", std)):
        if len(moment) not in (1, x.shape[1]):
            raise DataError(
                f"{name} has {len(moment)} numbers, the samples have {x.shape[1]} channels; give one, or one each."
            )
    trailing = (1,) * (x.dim() - 2)
    return (x - mean.reshape(-1, *trailing)) / std.reshape(-1, *trailing)


def moments_tensors(mean: Tensor | Sequence[float], std: Tensor | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Mean and std as float32 CPU vectors; std must be positive."""
    mean, std = (torch.as_tensor(m, dtype=torch.float32).detach().cpu().reshape(-1) for m in (mean, std))
    if not (std > 0).all() or not torch.isfinite(torch.cat([mean, std])).all():
        raise UsageError(f"mean {mean.tolist()} and std {std.tolist()} must be finite, and every std above 0.")
    return mean, std


def stack_labels(samples: list[Sample]) -> Tensor | None:
    """(B,) classes, or (B, K) shares where any sample has several; None if a sample has no label."""
    labels = [sample.label for sample in samples]
    if any(label is None for label in labels):
        return None
    shares = next((label for label in labels if isinstance(label, Tensor)), None)
    if shares is None:
        return torch.tensor(labels, dtype=torch.int64)
    return torch.stack([y if isinstance(y, Tensor) else class_shares([int(y or 0)], len(shares)) for y in labels])


def stack_valid(samples: list[Sample]) -> Tensor | None:
    """(B, T); samples that say nothing are all real, and None if no sample has padding."""
    some = next((sample.valid for sample in samples if sample.valid is not None), None)
    if some is None:
        return None
    return torch.stack([torch.ones_like(some) if sample.valid is None else sample.valid for sample in samples])
