"""A look at part of a user's data: kind and number of files, their sizes and rates, labels, repeated and bad files.

At most LOOKED files are decoded and at most SECONDS are spent on them, and as many on comparing the content of files.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bridle.data.inspect.check import inspect_at
from bridle.data.inspect.findings import UNUSABLE, CheckOptions, Facts, Finding
from bridle.data.inspect.statistics import ClassSizes, count_classes, guess_modality
from bridle.data.listing.address import local_path
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.folders import printable
from bridle.data.listing.layouts import find_listing
from bridle.data.listing.table import Listing
from bridle.data.loading.order import Order
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.modality import Modality
from bridle.data.shards.tar_member import Location, byte_count
from bridle.errors import DataError
from bridle.files import sha256_of

LOOKED = 200  # files
SECONDS = 30.0
FRAMES = 30  # decoded of a video
COMPARED = 100_000  # of more files the content is not compared


class Repeats(NamedTuple):
    """Files with the same bytes as another one."""

    across: int  # test files that are also in train
    train: int  # train files beyond the first of their content


class Survey(NamedTuple):
    """What is known of a data set after a look at some of its files."""

    path: Path
    modality: Modality
    train: int  # items
    test: int | None
    folds: int  # 0: the data has none
    classes: ClassSizes | None  # of the train items
    facts: tuple[Facts, ...]  # of the files that were looked at and can be used
    bad: tuple[tuple[str, str], ...]  # name and reason of those that cannot
    silent: int  # files looked at that hold no sound, or one colour or number only
    repeats: Repeats
    notes: tuple[str, ...]  # how the data was read

    @property
    def looked(self) -> int:
        return len(self.facts) + len(self.bad)

    def sizes(self, axis: int) -> list[int]:
        """Of the files looked at, the size along an axis of (C, …), in ascending order."""
        return sorted(facts.shape[axis] for facts in self.facts if facts.shape is not None)

    def rates(self) -> Counter[int]:
        """Files looked at by samples per second."""
        return Counter(facts.rate for facts in self.facts if facts.rate is not None)

    def exact_rates(self) -> set[float]:
        """The rates of signals, whole or not."""
        lengths = ((facts.shape, facts.seconds) for facts in self.facts)
        return {float(f"{shape[-1] / seconds:.6g}") for shape, seconds in lengths if shape is not None and seconds}

    def seconds(self) -> list[float]:
        """Lengths of the files looked at, sounds without the silence at their ends, in ascending order."""
        return sorted(facts.seconds if facts.sounding is None else facts.sounding
                      for facts in self.facts if facts.seconds is not None)  # fmt: skip

    @property
    def silence(self) -> float:
        """Share of the sound that is digital silence at the ends of files."""
        whole = sum(facts.seconds or 0.0 for facts in self.facts)
        return max(0.0, 1 - sum(self.seconds()) / whole) if whole else 0.0


def survey_data(path: Path, *, workers: int = 1, tell: Callable[[int, int], None] | None = None) -> Survey:
    """Look at the data in a folder or a manifest; DataError if none of the files can be used."""
    local = local_path(path)
    modality = guess_modality(local)
    found = find_listing(local, extensions=modality.extensions)
    parts = [found.train] if found.test is None else [found.train, found.test]
    facts, bad = look_at(parts, modality, workers=workers, tell=tell)
    if not facts:
        name, why = bad[0]
        raise DataError(f"none of the {len(bad)} {modality.items} looked at can be used; the first, {name}: {why}.")
    return Survey(
        path=path,
        modality=modality,
        train=len(found.train.paths),
        test=None if found.test is None else len(found.test.paths),
        folds=0 if found.folds is None else len(set(found.folds)),
        classes=count_classes(found.train.labels, found.classes),
        facts=tuple(facts),
        bad=tuple(bad),
        silent=sum(any(finding.name in ("silent", "blank") for finding in fact.findings) for fact in facts),
        repeats=find_repeats(*parts),
        notes=found.notes,
    )


def look_at(
    parts: Sequence[Listing], modality: Modality, *, workers: int, tell: Callable[[int, int], None] | None
) -> tuple[list[Facts], list[tuple[str, str]]]:
    """Facts of some files of every split, and name and reason of those that cannot be used."""
    total = sum(len(part.paths) for part in parts)
    chosen: list[tuple[Location, Span]] = []
    for part in parts:
        share = -(-LOOKED * len(part.paths) // max(total, LOOKED))
        for i in Order(size=len(part.paths), seed=0, phase="survey").at(range(share)).tolist():
            chosen.append((part.paths[i], WHOLE if part.spans is None else part.spans[i]))
    paths = [path for path, _ in chosen]
    look = partial(inspect_at, paths, modality, modality, CheckOptions(frames=FRAMES))
    facts, bad, end = [], [], time.monotonic() + SECONDS
    results = map_in_order(look, range(len(paths)), workers=max(1, workers), records=(Facts, Finding))
    for number, (fact, (path, span)) in enumerate(zip(results, chosen, strict=False), start=1):
        wrong = next((finding for finding in fact.findings if finding.name in UNUSABLE), None)
        if wrong is None:
            facts.append(cut(fact, span))
        else:
            bad.append((printable(path), wrong.detail))
        if tell is not None:
            tell(number, len(chosen))
        if facts and time.monotonic() > end:
            break
    results.close()
    return facts, bad


def cut(facts: Facts, span: Span) -> Facts:
    """The facts of a part of a file."""
    if span == WHOLE or not facts.seconds or facts.shape is None:
        return facts
    seconds = max(0.0, min(facts.seconds, facts.seconds if span[1] is None else span[1]) - span[0])
    length = round(facts.shape[1] * seconds / facts.seconds)
    return facts._replace(seconds=seconds, sounding=None, shape=(facts.shape[0], length, *facts.shape[2:]))


def find_repeats(train: Listing, test: Listing | None = None) -> Repeats:
    """Compare whole files of the same size; those not reached in time count as different."""
    parts = [part for part in (train, test) if part is not None]
    if any(part.spans is not None for part in parts) or sum(len(part.paths) for part in parts) > COMPARED:
        return Repeats(0, 0)
    names = [{str(path): path for path in part.paths} for part in parts]
    sizes = {name: byte_count(path) for name, path in chain(*(part.items() for part in names))}
    often, digests, end = Counter(sizes.values()), {}, time.monotonic() + SECONDS
    for name, path in chain(*(part.items() for part in reversed(names))):  # test files first
        if sizes[name] > 0 and often[sizes[name]] > 1 and time.monotonic() < end:
            digests[name] = sha256_of(path) if isinstance(path, Path) else hashlib.sha256(path.read()).hexdigest()
    seen = [digests[name] for name in names[0] if name in digests]
    different = set(seen)
    across = 0 if test is None else sum(digests.get(name) in different for name in names[1])
    return Repeats(across, len(seen) - len(different))
