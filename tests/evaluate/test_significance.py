"""Differences between two models, and what the items say where there is one seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats

from bridle.evaluate.significance import compare, compare_hits, make_hits
from bridle.runs.results import Hits, Scores
from bridle.runs.results_file import readable_part

TRUTH = [np.array([0, 1, 2, 0, 1]), np.array([2, 0, 1])]


def hits(text: str, truth: list[np.ndarray] | None = None) -> Hits:
    return make_hits(np.array([letter == "1" for letter in text]), truth or TRUTH)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_hits_survive_json_at_a_bit_an_item() -> None:
    own = hits("10110010")
    assert len(own.bits) == 4  # one byte in base64
    back = Hits.model_validate_json(own.model_dump_json())
    assert back == own and back.right.tolist() == [letter == "1" for letter in "10110010"]


@pytest.mark.parametrize(
    "damage",
    [{"items": 9}, {"bits": "!!"}, {"bits": ""}, {"sizes": [8, 0]}, {"sizes": "many"}, {"truth": None, "items": None}],
)
def test_hits_that_cannot_be_read_are_refused_or_left_out(damage: dict[str, Any]) -> None:
    damaged = {"accuracy": 0.5, "hits": {**hits("10110010").model_dump(mode="json"), **damage}}
    with pytest.raises(ValidationError):
        Scores.model_validate(damaged)
    assert readable_part(Scores, damaged, []) == Scores(accuracy=0.5)


def test_the_difference_is_the_mean_over_folds_and_p_is_mcnemars() -> None:
    own, other = hits("11111011"), hits("00101110")
    found = compare_hits(own, other, generator=seeded())
    assert found is not None
    assert found.change == pytest.approx(((5 - 2) / 5 + (2 - 2) / 3) / 2)
    # Only own is right about items 0, 1, 3 and 7, only the other about item 5: 4 of 5.
    assert found.p == pytest.approx(stats.binomtest(4, 5).pvalue) == pytest.approx(2 * (1 + 5) / 32)
    assert (found.over, found.pairs, found.is_clear) == ("items", 8, False)


def test_many_items_make_a_small_difference_clear() -> None:
    random = np.random.default_rng(0)
    base = random.random(4000) < 0.7
    better = base | (random.random(4000) < 0.05)
    truth = [np.zeros(4000, dtype=np.int64)]
    found = compare_hits(make_hits(better, truth), make_hits(base, truth), generator=seeded())
    assert found is not None and found.half is not None
    gap = better.astype(float) - base
    assert found.half == pytest.approx(1.96 * gap.std() / np.sqrt(4000), rel=0.15)
    assert found.is_clear and str(found).endswith("*")


def test_equal_answers_are_no_difference() -> None:
    found = compare_hits(hits("10110010"), hits("10110010"), generator=seeded())
    assert found is not None
    assert (found.change, found.p, found.is_clear) == (0.0, 1.0, False)


def test_other_items_are_not_compared() -> None:
    other = hits("10110010", [np.array([1, 1, 2, 0, 1]), np.array([2, 0, 1])])
    assert compare_hits(hits("10110010"), other, generator=seeded()) is None
    assert compare_hits(hits("10110010"), None, generator=seeded()) is None
    assert compare_hits(hits("10110010"), hits("10110010", [np.concatenate(TRUTH)]), generator=seeded()) is None


def test_changes_are_paired_and_their_interval_is_students() -> None:
    own, base = [0.50, 0.54, 0.61], [0.48, 0.50, 0.60]
    change = compare(own, base)
    expected = stats.ttest_rel(own, base).confidence_interval(0.95)
    assert change.change == pytest.approx((0.02 + 0.04 + 0.01) / 3)
    assert change.half is not None
    assert change.change - change.half == pytest.approx(expected.low)
    assert change.change + change.half == pytest.approx(expected.high)
    assert "*" not in str(change)
    assert str(compare([0.5, 0.6, 0.701], [0.4, 0.5, 0.6])).endswith("*")


def test_a_single_pair_has_no_interval() -> None:
    assert compare([0.5], [0.4]).half is None


def test_differences_that_are_all_the_same_are_not_taken_for_certain() -> None:
    found = compare([0.55, 0.57], [0.50, 0.52])  # two seeds, by chance the same five points
    assert found.change == pytest.approx(0.05) and found.half == pytest.approx(0.0, abs=1e-9)
    assert not found.is_clear
