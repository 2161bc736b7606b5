"""A few mutations of configs and of files: a value or an error of ours, in time; `make soak` tries more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from soak.fuzz import KINDS, SPECIMENS, fuzz, good_files, lay_out, mutated_files

from bridle.errors import DataError

QUICK = [kind for kind in KINDS if kind != "run for a report"]  # a page takes half a second


@pytest.mark.parametrize("kind", ["config", "override"])
def test_a_mutated_config_is_read_or_refused(kind: str) -> None:
    found = fuzz(kind, 120, workers=1)
    assert found.held == found.tried == 120, found.count
    assert found.count["refused"] > 20


@pytest.mark.parametrize("kind", QUICK)
def test_a_good_file_is_read_and_mutated_ones_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    lay_out(tmp_path, good_files(kind))
    if kind == "tiff (never read)":
        with pytest.raises(DataError, match="not a JPEG, PNG, WebP or BMP file"):
            SPECIMENS[kind].read(tmp_path)
    else:
        SPECIMENS[kind].read(tmp_path)
    found = fuzz(kind, 12, workers=1)
    assert found.held == found.tried == 12, found.count


def test_mutations_do_change_files_and_repeat_by_seed() -> None:
    for kind in KINDS:
        changed = [mutated_files(kind, random.Random(seed)) for seed in range(20)]
        assert sum(files != good_files(kind) for files in changed) >= 15
        assert changed == [mutated_files(kind, random.Random(seed)) for seed in range(20)]
