"""A few mutations of configs and of files: a value or an error of ours, in time; `make soak` tries more."""

from __future__ import annotations

import random

import pytest
from soak.fuzz import KINDS, fuzz, good_file, mutated


@pytest.mark.parametrize("kind", ["config", "override"])
def test_a_mutated_config_is_read_or_refused(kind: str) -> None:
    found = fuzz(kind, 120, workers=1)
    assert found.held == found.tried == 120, found.count
    assert found.count["refused"] > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused(kind: str) -> None:
    found = fuzz(kind, 25, workers=1)
    assert found.held == found.tried == 25, found.count


def test_mutations_do_change_files_and_repeat_by_seed() -> None:
    for kind in KINDS:
        changed = [mutated(good_file(kind), random.Random(seed)) for seed in range(20)]
        assert sum(content != good_file(kind) for content in changed) >= 15
        assert changed == [mutated(good_file(kind), random.Random(seed)) for seed in range(20)]
