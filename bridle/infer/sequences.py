"""Codes as one row of integers that any language model can be trained on, and back again, without loss.

Shapes: a file has T tokens of M codes (T, M) with sizes K_1 … K_M; its ids are (L,).

Every stage has its own range of ids, so that a code is never mistaken for one of another stage:

    id(m, c) = 5 + K_1 + … + K_{m−1} + c,      0 pad, 1 bos, 2 eos, 3 sep, 4 empty

    interleaved   c_1(0) c_2(0) … c_M(0) c_1(1) …            all codes of a token, then the next one      L = T·M
    delayed       c_1(0) ∅ ∅ | c_1(1) c_2(0) ∅ | …           stage m comes m − 1 steps later              L = (T+M−1)·M
    stage1        c_1(0) c_1(1) …                            the first stage alone                        L = T

In the delayed pattern the M ids of a step belong to M different tokens, so that a model may predict them at once; ∅ is
`empty`.

Tokens come in the order of the codes file: along time, or row by row. A file is bos … eos; packed files have a `sep`
between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bridle.errors import DataError, UsageError, quoted

Pattern = Literal["interleaved", "delayed", "stage1"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
Array = NDArray[Any]
Ids = NDArray[np.int64]

PAD, BOS, EOS, SEP, EMPTY = range(5)
SPECIAL = {"pad": PAD, "bos": BOS, "eos": EOS, "sep": SEP, "empty": EMPTY}


class Vocabulary(NamedTuple):
    """What the ids mean."""

    sizes: tuple[int, ...]  # of the codebooks that are written
    pattern: Pattern

    @property
    def offsets(self) -> tuple[int, ...]:
        """The id of code 0 of each stage."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=len(SPECIAL)))

    @property
    def size(self) -> int:
        """Ids in all: what a model's embedding needs."""
        return len(SPECIAL) + sum(self.sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id, of two bytes or more."""
        return np.promote_types(np.uint16, np.min_scalar_type(self.size - 1))

    def encode(self, codes: Array) -> Ids:
        """(T, M) codes -> (L,) ids, without bos and eos."""
        self._require_codes(codes)
        ids = codes.astype(np.int64) + np.array(self.offsets)
        return (_delayed(ids) if self.pattern == "delayed" else ids).reshape(-1)

    def decode(self, ids: Array) -> Array:
        """(L,) ids, with or without bos, eos and trailing pad -> (T, M) codes; DataError for ids in wrong places."""
        rows = _stripped(np.asarray(ids, dtype=np.int64))
        M = len(self.sizes)
        if len(rows) % M:
            raise DataError(f"a sequence of {len(rows)} ids is cut off: every token has {M} codes.")
        steps = rows.reshape(-1, M)  # (T, M), delayed (T + M − 1, M)
        found = _undelayed(steps) if self.pattern == "delayed" else steps
        codes = found - np.array(self.offsets)
        wrong = (codes < 0) | (codes >= np.array(self.sizes))
        if wrong.any():
            token, stage = (int(place) for place in np.argwhere(wrong)[0])
            raise DataError(f"id {found[token, stage]} at token {token} is no code of stage {stage + 1}.")
        smallest: Array = codes.astype(np.min_scalar_type(max(self.sizes) - 1))
        return smallest

    def described(self) -> dict[str, Any]:
        """As vocabulary.json holds it."""
        return {
            "pattern": self.pattern,
            "codebook_sizes": list(self.sizes),
            "offsets": list(self.offsets),
            "special": SPECIAL,
            "vocab_size": self.size,
        }

    def _require_codes(self, codes: Array) -> None:
        M = len(self.sizes)
        if codes.ndim != 2 or codes.shape[1] != M:
            raise UsageError(f"expected codes of shape (T, {M}), got {codes.shape}.")
        if codes.size and bool((codes.max(0) >= np.array(self.sizes)).any()):
            raise DataError(f"a code is not below its codebook's size; the sizes are {list(self.sizes)}.")


def make_vocabulary(sizes: Sequence[int], pattern: str) -> Vocabulary:
    """The vocabulary of codebooks of these sizes; `stage1` keeps the first."""
    if pattern not in PATTERNS:
        raise UsageError(f"--pattern {quoted(pattern)}: expected one of {', '.join(PATTERNS)}.")
    chosen: Pattern = next(known for known in PATTERNS if known == pattern)
    return Vocabulary(tuple(sizes[:1] if chosen == "stage1" else sizes), chosen)


def read_vocabulary(described: Mapping[str, Any]) -> Vocabulary:
    """From vocabulary.json; ValueError, KeyError or TypeError where it is not one of ours."""
    vocabulary = Vocabulary(tuple(int(size) for size in described["codebook_sizes"]), described["pattern"])
    if vocabulary.pattern not in PATTERNS or any(
        described[key] != value for key, value in vocabulary.described().items()
    ):
        raise ValueError("its offsets or special ids are not those of its codebook sizes")
    return vocabulary


def framed(ids: Ids) -> Ids:
    """bos, the ids of a file, eos."""
    return np.concatenate([[BOS], ids, [EOS]])


def packed(rows: Iterable[Ids], *, context: int) -> Iterator[Ids]:
    """Files one after the other with `sep` between them, cut into blocks of `context` ids; the last is padded."""
    waiting = np.zeros(0, dtype=np.int64)
    for number, row in enumerate(rows):
        waiting = np.concatenate([waiting, row] if number == 0 else [waiting, [SEP], row])
        whole = len(waiting) // context * context
        yield from waiting[:whole].reshape(-1, context)
        waiting = waiting[whole:]
    if len(waiting):
        yield np.concatenate([waiting, np.full(context - len(waiting), PAD)])


def unpacked(blocks: Iterable[Array]) -> Iterator[Ids]:
    """The rows that went into `packed`."""
    waiting = np.zeros(0, dtype=np.int64)
    for block in blocks:
        *ended, waiting = _split(np.concatenate([waiting, np.asarray(block, dtype=np.int64)]))
        yield from ended
    last = waiting[: np.flatnonzero(waiting != PAD)[-1] + 1] if (waiting != PAD).any() else waiting[:0]
    if len(last):
        yield last


def _split(ids: Ids) -> list[Ids]:
    """Parts between separators."""
    return [part[part != SEP] for part in np.split(ids, np.flatnonzero(ids == SEP))]


def _stripped(ids: Ids) -> Ids:
    """Without padding behind, bos in front and eos at the end."""
    real = np.flatnonzero(ids != PAD)
    ids = ids[: real[-1] + 1] if len(real) else ids[:0]
    if len(ids) and ids[0] == BOS:
        ids = ids[1:]
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def _delayed(ids: Ids) -> Ids:
    """(T, M) -> (T + M − 1, M): column m moves down by m."""
    T, M = ids.shape
    if T == 0:
        return ids
    out = np.full((T + M - 1, M), EMPTY, dtype=np.int64)
    for m in range(M):
        out[m : m + T, m] = ids[:, m]
    return out


def _undelayed(steps: Ids) -> Ids:
    """(T + M − 1, M) -> (T, M)."""
    S, M = steps.shape
    if S == 0:
        return steps
    T = S - M + 1
    if T < 1:
        raise DataError(f"a delayed sequence of {S} steps is cut off: it takes {M} steps to hold one token.")
    outside = np.ones((S, M), dtype=bool)
    for m in range(M):
        outside[m : m + T, m] = False
    if (steps[outside] != EMPTY).any():
        raise DataError("a delayed sequence is damaged: an id stands where the pattern leaves a gap.")
    return np.stack([steps[m : m + T, m] for m in range(M)], axis=1)
