"""Files as bags of code n-grams, weighted by tf-idf.

Shapes: a file has T tokens with codes (T, M) at positions (T, rank); N files, V distinct terms, P (term, file) pairs.

A term is a stage m, a line ℓ of the grid, a length n, and the codes of that stage at n successive tokens of that line.
Lines run along time where the first axis is time (one for each frequency band, or position in a picture), else along
the last axis (rows of a picture); so what moves along a line keeps its terms. No term crosses a line's end.

    id(m, ℓ, c_1 … c_n)  =  first(m, n) + ℓ·K_m^n + c_1·K_m^{n−1} + … + c_n      no two terms share a number
    idf_t                =  ln((1 + N) / (1 + df_t)) + 1                         df_t: files that hold t
    w_{d,t}              =  (1 + ln tf_{d,t})·idf_t / ‖·‖                        tf_{d,t}: how often d holds t
    score(q, d)          =  Σ_t w_{q,t}·w_{d,t}                                  cosine, in 0 … 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.errors import needs

Array = NDArray[Any]
LONGEST = 2  # successive tokens in a term
STAGES = 2  # later stages describe ever smaller details, which only two copies of a file share


class Terms(NamedTuple):
    """The distinct terms of one file, ascending, and how often it holds each."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]


class Grams(NamedTuple):
    """All files by term: those that hold term v are docs[ends[v]:ends[v + 1]], with their weights."""

    terms: NDArray[np.int64]  # (V,) ascending
    idf: NDArray[np.float64]  # (V,)
    ends: NDArray[np.int64]  # (V + 1,)
    docs: NDArray[np.int32]  # (P,)
    weights: NDArray[np.float32]  # (P,) of unit length per file

    def scores(self, query: Terms, files: int) -> NDArray[np.float64]:
        """(N,) cosine of a query's terms with every file's; terms that no file holds count in its length only."""
        found = np.searchsorted(self.terms, query.ids)
        known = self.terms[np.minimum(found, len(self.terms) - 1)] == query.ids
        unseen = np.log(1.0 + files) + 1.0  # idf of a term with df = 0
        idf = np.where(known, self.idf[np.minimum(found, len(self.terms) - 1)], unseen)
        weights = (1.0 + np.log(query.counts)) * idf
        weights /= max(float(np.linalg.norm(weights)), 1e-12)
        scores = np.zeros(files)
        for term, weight in zip(found[known].tolist(), weights[known].tolist(), strict=True):
            listed = slice(self.ends[term], self.ends[term + 1])
            scores[self.docs[listed]] += weight * self.weights[listed]
        return scores


class Lines(NamedTuple):
    """The lines of a grid along one of its axes, and the codebooks whose codes are counted on them."""

    grid: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]

    def number(self, positions: Array) -> NDArray[np.int64]:
        """(T, rank) -> (T,) which line each token is on."""
        line = np.zeros(len(positions), dtype=np.int64)
        for axis, size in enumerate(self.grid):
            if axis != self.axis:
                line = line * size + positions[:, axis]
        return line

    def firsts(self, longest: int) -> Iterator[int]:
        """The first id of every stage and length, stage by stage."""
        lines = math.prod(self.grid) // self.grid[self.axis]
        blocks = (lines * size**n for size in self.sizes for n in range(1, longest + 1))
        return itertools.accumulate(blocks, initial=0)


def terms_of(codes: Array, positions: Array, lines: Lines, *, longest: int = LONGEST) -> Terms:
    """The terms of a file's codes (T, M ≥ stages counted) at `positions` (T, rank)."""
    line, along = lines.number(positions), positions[:, lines.axis].astype(np.int64)
    order = np.lexsort((along, line))  # line by line
    rows, line, along = codes[order].astype(np.int64), line[order], along[order]
    joined = (np.diff(line) == 0) & (np.diff(along) == 1)  # (T − 1,) is the next token the next of the same line?
    found: list[Array] = []
    firsts = lines.firsts(longest)
    for stage, size in enumerate(lines.sizes):
        values, whole = rows[:, stage], np.ones(len(rows), dtype=bool)
        for n in range(1, longest + 1):
            if n > 1:
                values = values[:-1] * size + rows[n - 1 :, stage]
                whole = whole[:-1] & joined[n - 2 :]
            found.append(next(firsts) + (line[: len(values)] * size**n + values)[whole])
    ids, counts = np.unique(np.concatenate(found), return_counts=True)
    return Terms(ids, counts)


def weigh(files: Iterable[Terms]) -> Grams:
    """tf-idf weights of all files, sorted by term."""
    with needs("search"):
        from scipy.sparse import csc_array, csr_array
        from sklearn.feature_extraction.text import TfidfTransformer

    bags = list(files)
    ids = np.concatenate([bag.ids for bag in bags])
    docs = np.repeat(np.arange(len(bags), dtype=np.int32), [len(bag.ids) for bag in bags])
    terms, which = np.unique(ids, return_inverse=True)
    counts = csr_array((np.concatenate([bag.counts for bag in bags]), (docs, which)), shape=(len(bags), len(terms)))
    tfidf = TfidfTransformer(sublinear_tf=True)
    found = csc_array(tfidf.fit_transform(counts))
    return Grams(terms, tfidf.idf_, found.indptr, found.indices, found.data.astype(np.float32))
