"""Similarity search: exact cosine of pooled features, or of code n-grams.

Shapes: N files, D pooled features; vectors (N, D) have length one, so a product is a cosine.

Features are compared after the mean of the collection is taken off: what all files share says nothing about which are
alike. The best candidates are scored again in float64 and ties go to the earlier file.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import UsageError, quoted
from bridle.infer.model import Model, load
from bridle.infer.read import one_line_errors
from bridle.search.index import ITEMS, MEAN, REBUILD, VECTORS, IndexedItem, lines_of, read_index, read_items, unit
from bridle.search.ngrams import Grams, terms_of

By = Literal["features", "codes"]
ROWS = 65_536  # vectors read from disk at a time
NEARLY = 1e-4  # float32 sums of a cosine differ by less


class Hit(NamedTuple):
    """A file of the collection and how like the query it is, 1 being the same."""

    score: float
    entry: IndexedItem


class Found(NamedTuple):
    """The hits of a query, the most similar first."""

    query: Path
    by: By
    hits: list[Hit]
    itself: int  # files left out because they are the query


class Index:
    """A collection that can be searched: `index.search("dog.wav").hits`."""

    def __init__(self, folder: str | Path, *, run: str | Path | None = None, device: str = "auto") -> None:
        self.folder, self.device = Path(folder), device
        self.settings = read_index(self.folder)
        if self.settings.generation is None:
            raise UsageError(f"{quoted(folder)} is not finished; run the same `bridle index` command again.")
        self.run = run if run is not None else self.settings.run
        self.generation: Path = self.folder / self.settings.generation
        with one_line_errors(self.generation, REBUILD):
            self.items = list(read_items(self.generation / ITEMS))
            if self.settings.base != os.getcwd():
                self.items = [entry.relative_to(Path(self.settings.base)) for entry in self.items]
            self.mean: NDArray[np.float32] = np.load(self.generation / MEAN, allow_pickle=False)
            self.vectors: NDArray[np.float32] = self._mapped(VECTORS)
            if self.vectors.shape != (len(self.items), len(self.mean)):
                raise ValueError(f"{VECTORS} does not fit {ITEMS}")

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def model(self) -> Model:
        """The model the index was made with."""
        model = load(self.run, device=self.device)
        if model.fingerprint != self.settings.model:
            raise UsageError(
                f"{quoted(self.run)} is not the model {quoted(self.folder)} was made with; index it again with "
                "--overwrite, or name the right one with --run."
            )
        return model

    @cached_property
    def grams(self) -> Grams:
        with one_line_errors(self.generation, REBUILD):
            grams = Grams(*(self._mapped(f"{name}.npy") for name in Grams._fields))
            if len(grams.ends) != len(grams.terms) + 1 or grams.ends[-1] != len(grams.docs):
                raise ValueError("the arrays of n-grams do not fit each other")
        return grams

    def search(self, query: str | Path, *, by: By = "features", k: int = 10) -> Found:
        """The k files most like the query, without the query itself."""
        path = Path(query)
        if by not in ("features", "codes"):
            raise UsageError(f"--by {quoted(by)}: expected features or codes.")
        if k < 1:
            raise UsageError(f"-k {k}: at least one hit.")
        if by == "codes" and not self.settings.codes:
            raise UsageError(
                f"{quoted(self.folder)} has no codes, because its model has no tokenizer; search --by features."
            )
        itself = {n for n, entry in enumerate(self.items) if entry.is_file(path)}
        if by == "features":
            (found,) = self.model.encode_files([path], workers=1, **self.settings.features._asdict())
            best = self.nearest(unit(found.z - self.mean), k=k, without=itself)
        else:
            best = top(self.code_scores(path), k=k, without=itself)
        return Found(path, by, [Hit(score, self.items[n]) for n, score in best], len(itself))

    def nearest(self, vector: NDArray[np.float32], *, k: int, without: Collection[int] = ()) -> list[tuple[int, float]]:
        """Number and cosine of the k rows nearest to a vector (D,) of length one."""
        scores = np.concatenate([self.vectors[at : at + ROWS] @ vector for at in range(0, len(self.vectors), ROWS)])
        at = len(scores) - min(len(scores), k + len(without))
        near = np.flatnonzero(scores >= np.partition(scores, at)[at] - NEARLY)  # all that may be among the nearest
        # Row by row: a matrix product may round equal rows differently, which would break ties.
        exact = (self.vectors[near].astype(np.float64) * vector.astype(np.float64)).sum(axis=1)
        order = np.lexsort((near, -exact))
        return [(int(near[n]), float(exact[n])) for n in order if near[n] not in without][:k]

    def code_scores(self, path: Path) -> NDArray[np.float64]:
        """(N,) cosine of the n-grams of a file's codes with those of every file."""
        (found,) = self.model.tokenize_files([path], workers=1)
        terms = terms_of(found.codes, found.positions, lines_of(self.model))
        with one_line_errors(self.generation, REBUILD):
            return self.grams.scores(terms, len(self.items))

    def _mapped(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = np.load(self.generation / name, mmap_mode="r", allow_pickle=False)
        return found


def top(scores: NDArray[np.float64], *, k: int, without: Collection[int]) -> list[tuple[int, float]]:
    """Number and score of the k best; ties go to the earlier one."""
    order = np.argsort(-scores, kind="stable")[: k + len(without)].tolist()
    return [(n, float(scores[n])) for n in order if n not in without][:k]


def open_index(folder: str | Path, *, run: str | Path | None = None, device: str = "auto") -> Index:
    """What `bridle index` wrote: `bridle.open_index("index").search("dog.wav", k=5).hits`."""
    return Index(folder, run=run, device=device)
