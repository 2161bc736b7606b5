"""What a report shows of a run's data: plain values for the page, every picture and sound as a `data:` address."""

from __future__ import annotations

from typing import NamedTuple


class Shown(NamedTuple):
    """One sample."""

    name: str
    label: str  # empty where there is none
    picture: str
    sound: str = ""  # empty where there is nothing to play
    score: float | None = None  # cosine similarity with the query
    same: bool | None = None  # has it the query's label? None where there are no labels


class TokenMap(NamedTuple):
    """A sample and, for every stage, the sample with its patches in the colours of their codes."""

    sample: Shown
    stages: list[str]


class CodeStrip(NamedTuple):
    """The patches nearest to one code."""

    code: int
    share: float  # of the tokens looked at
    color: str  # "#rrggbb", as in the token maps
    patches: str


class Neighbours(NamedTuple):
    """A sample and those whose features are most like its own, the most similar first."""

    query: Shown
    hits: list[Shown]


class Gallery(NamedTuple):
    """All there is to see of a run's data, or in `note` why there is nothing."""

    note: str = ""
    about: str = ""  # which samples, and which tokenizer and encoder
    wide: bool = False  # pictures are much wider than high
    crisp: bool = False  # pictures are so small that their pixels should show
    maps: list[TokenMap] = []  # noqa: RUF012 - never changed
    codes: list[list[CodeStrip]] = []  # noqa: RUF012 - one list per stage
    neighbours: list[Neighbours] = []  # noqa: RUF012
