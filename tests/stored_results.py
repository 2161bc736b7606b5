"""Results as a report reads them from JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from bridle.report.runs import RunSummary
from bridle.runs.results import Evaluation, Results, Scores, StageHealth
from bridle.runs.results_file import readable_part

STAGE = {"stage": 1, "codes": 4, "usage_rate": 0.9, "entropy": 1.0, "effective_usage": 0.8, "perplexity": 3.0}
STAGE["top_share"] = 0.3


def results(found: Mapping[str, Any]) -> Results:
    """Parts of the wrong kind are left out."""
    return readable_part(Results, copy.deepcopy(dict(found)), []) or Results()


def evaluation(**found: Any) -> Evaluation:
    return Evaluation.model_validate({"iteration": 1, **found})


def scores(**found: Any) -> Scores:
    return Scores.model_validate(found)


def stage(**found: Any) -> StageHealth:
    return StageHealth.model_validate({**STAGE, **found})


def summary(found: Mapping[str, Any], *, title: str = "set", method: str = "RQ") -> RunSummary:
    """A run with these results and nothing else."""
    stored = results({"method": method, **found})
    return RunSummary("name", title, method, [], stored, "", {})
