"""Scorers: labelled features in, named scores out.

A scorer is called with a `Task` and returns `{name: Score or number}`, or a whole `Scores` record where it fits the
classifier that the main score comes from. `probe.scorers: [NAME, …]` adds scorers by name to `bridle pretrain` and
`bridle probe`; `register_scorer` makes a name known, also from a file of your own (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bridle.config.training_schema import ProbeConfig
from bridle.errors import ConfigError
from bridle.evaluate.features import Array, Features
from bridle.runs.results import Interval, Score, Scores

__all__ = ["Features", "Interval", "Pair", "Score", "Scorer", "Scores", "Task", "find_scorer", "register_scorer"]


class Pair(NamedTuple):
    """Items to fit on and items to score: the only ones there are, or those of one fold."""

    name: str  # of the fold; empty without folds
    train: Features
    held: Array  # (V, N) bool: training items for validation, in one part, or in several that take turns
    test: Features


@dataclass(frozen=True)
class Task:
    """The labelled features of one model, ready to be scored."""

    pairs: Callable[[], Iterator[Pair]]  # one pair, or one per fold; the same each time it is called
    settings: ProbeConfig
    seed: int
    progress: Callable[[str, int, int], None] = lambda what, total, done: None


class Scorer(Protocol):
    """Scores the features of a task."""

    def __call__(self, task: Task, /) -> Scores | Mapping[str, Score | float]: ...


_scorers: dict[str, Scorer] = {}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Make a scorer known as `name`, for `probe.scorers`; ConfigError if another one has that name."""
    known = _scorers.setdefault(name, scorer)
    if _origin(known) != _origin(scorer):
        raise ConfigError(f"a scorer named {name!r} is already registered ({_origin(known)}); choose another name.")
    _scorers[name] = scorer


def _origin(scorer: Scorer) -> str:
    """Where a scorer is defined; a file that is loaded twice may register its scorer again."""
    kind = scorer if hasattr(scorer, "__qualname__") else type(scorer)
    return f"{kind.__module__}.{kind.__qualname__}"


def find_scorer(name: str) -> Scorer:
    """The scorer of that name; ConfigError if there is none."""
    from bridle.evaluate.scorers import fewshot, knn, retrieval  # noqa: F401 - they register themselves

    if name not in _scorers:
        raise ConfigError(
            f"probe.scorers: there is no scorer {name!r}; known are {', '.join(sorted(_scorers))}. "
            "One of your own is registered by a file that --plugin names."
        )
    return _scorers[name]
