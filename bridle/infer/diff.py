"""`bridle codes diff OLD NEW`: do two files of codes agree, token by token and stage by stage?

Of two models of the same data it tells what a new version changes; of one model on files and their re-encoded copies,
how steady codes are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bridle.console import plain_table
from bridle.errors import UsageError, quoted
from bridle.infer.read import CodesFile

DRIFTED = 0.99  # a stage of which fewer codes agree, where all earlier stages do, has drifted
Array = NDArray[Any]


class StageAgreement(NamedTuple):
    """Shares of the tokens that both files have."""

    agree: float  # the codes of this stage are equal
    given_earlier: float  # the same, of the tokens whose earlier stages are all equal; NaN if there are none
    up_to_here: float  # the codes of this and all earlier stages are equal
    chance: float  # would be equal if the codes of the two files had nothing to do with each other


class CodesDiff(NamedTuple):
    """How far two files of codes agree."""

    models: tuple[str, str]  # fingerprints
    files: int  # in both
    only_old: int
    only_new: int
    tokens: int  # at the same place in both
    unmatched: int  # tokens of common files that only one of the two has
    stages: tuple[StageAgreement, ...]

    def lines(self) -> list[str]:
        """What there is to say in words."""
        same = "the same model" if self.models[0] == self.models[1] else f"models {self.models[0]} and {self.models[1]}"
        found = [f"{self.files:,} files and {self.tokens:,} tokens in both, made by {same}."]
        if self.only_old or self.only_new or self.unmatched:
            found.append(
                f"Only in OLD: {self.only_old:,} files; only in NEW: {self.only_new:,}; {self.unmatched:,} tokens of "
                "common files are in one of the two."
            )
        drifted = next((m for m, stage in enumerate(self.stages, 1) if stage.given_earlier < DRIFTED), None)
        if all(stage.agree == 1 for stage in self.stages):
            found.append("All codes are equal.")
        elif drifted is None:
            found.append("No stage has drifted: where earlier stages agree, at least 99 % of each stage's codes do.")
        else:
            share = 100 * self.stages[drifted - 1].given_earlier
            found.append(f"Stage {drifted} is the first that drifted: {share:.1f} % agree where earlier stages do.")
        return found


def diff_codes(old: str | Path, new: str | Path) -> CodesDiff:
    """Compare two files of codes on the files that both have."""
    a, b = CodesFile(old), CodesFile(new)
    stages = min(len(a.header.codebook_sizes), len(b.header.codebook_sizes))
    sizes = a.header.codebook_sizes[:stages]
    if not stages or sizes != b.header.codebook_sizes[:stages]:
        raise UsageError(
            f"{quoted(old)} has codebooks of {list(a.header.codebook_sizes)} codes, {quoted(new)} of "
            f"{list(b.header.codebook_sizes)}; codes of different codebooks cannot be compared."
        )
    keys = pair_names(a.files, b.files)
    if keys is None:
        raise UsageError(f"no file is in both {quoted(old)} and {quoted(new)}; tokenize the same files.")
    equal, upto, tokens, unmatched = np.zeros(stages, np.int64), np.zeros(stages, np.int64), 0, 0
    counts = [np.zeros((2, size), np.int64) for size in sizes]
    for left, right in paired_rows(a, b, *keys):
        p, q = matched(left, right)
        unmatched += len(left["codes"]) + len(right["codes"]) - 2 * len(p)
        same = p[:, :stages] == q[:, :stages]  # (n, M)
        equal, upto, tokens = equal + same.sum(0), upto + np.logical_and.accumulate(same, 1).sum(0), tokens + len(p)
        for m, size in enumerate(sizes):
            counts[m] += [np.bincount(codes[:, m], minlength=size)[:size] for codes in (p, q)]
    if not tokens:
        raise UsageError(
            f"{quoted(old)} and {quoted(new)} have no token at the same place; use models of one geometry."
        )
    before = np.array([tokens, *upto[:-1]])
    agreement = tuple(
        StageAgreement(
            agree=float(equal[m] / tokens),
            given_earlier=float(upto[m] / before[m]) if before[m] else float("nan"),
            up_to_here=float(upto[m] / tokens),
            chance=float((counts[m][0] / tokens) @ (counts[m][1] / tokens)),
        )
        for m in range(stages)
    )
    common = len(set(keys[0]) & set(keys[1]))
    models = (a.header.model, b.header.model)
    return CodesDiff(models, common, len(a) - common, len(b) - common, tokens, unmatched, agreement)


def pair_names(old: Sequence[str], new: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Keys of both files' names: the names, the paths below the common folder, or these without endings.

    The first of them that pairs some files and tells the files of each side apart; None if none does.
    """
    for key in (list, below_common, without_endings):
        a, b = key(old), key(new)
        if set(a) & set(b) and len(set(a)) == len(a) and len(set(b)) == len(b):
            return a, b
    return None


def below_common(names: Sequence[str]) -> list[str]:
    """Every path below the folder that all share."""
    parents = [PurePath(name).parent for name in names]
    shared = os.path.commonpath(parents) if len({path.is_absolute() for path in parents}) == 1 else ""
    return [os.path.relpath(name, shared or ".") if shared else name for name in names]


def without_endings(names: Sequence[str]) -> list[str]:
    """Every path below the folder that all share, without the ending of its name."""
    return [os.path.splitext(name)[0] for name in below_common(names)]


def paired_rows(
    a: CodesFile, b: CodesFile, old: Sequence[str], new: Sequence[str]
) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """The columns of the files that both have; in step where the order is the same, else NEW is held in memory."""
    if old == new:
        for (_, left), (_, right) in zip(a.rows(), b.rows(), strict=True):
            yield left, right
        return
    wanted = set(old)
    held = {key: columns for key, (_, columns) in zip(new, b.rows(), strict=True) if key in wanted}
    for key, (_, left) in zip(old, a.rows(), strict=True):
        if key in held:
            yield left, held[key]


def matched(left: dict[str, Array], right: dict[str, Array]) -> tuple[Array, Array]:
    """Codes (n, M) of both at the places that both have."""
    if np.array_equal(left["positions"], right["positions"]):
        return left["codes"], right["codes"]
    places = {tuple(place): row for row, place in enumerate(right["positions"].tolist())}
    rows = [
        (row, places[tuple(place)]) for row, place in enumerate(left["positions"].tolist()) if tuple(place) in places
    ]
    own, other = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return left["codes"][own], right["codes"][other]


def diff_table(found: CodesDiff) -> Table:
    """For the terminal."""
    table = plain_table("stage", "agree %", "where earlier stages agree %", "with all earlier stages %", "by chance %")
    for column in table.columns:
        column.justify = "right"
    for number, stage in enumerate(found.stages, start=1):
        shares = ("–" if np.isnan(share) else f"{100 * share:.1f}" for share in stage)
        table.add_row(str(number), *shares)
    return table
