"""The six sets: every class in both parts, readable, and the same every time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridle.data.inspect.survey import survey_data

SCRIPT = Path(__file__).parents[2] / "benchmarks/sets"
SHARE = 0.05  # of the items
EXPECTED = {  # modality, classes, items of a class in train and test, shape
    "speech": ("audio", 20, 60, 20, None),
    "sensors": ("signals", 8, 120, 60, (6, 512)),
    "textures": ("images", 12, 100, 40, (3, 64, 64)),
    "icons": ("images", 16, 100, 40, (3, 32, 32)),
    "shapes": ("video", 10, 60, 30, (3, 16, 48, 48)),
    "charts": ("images", 12, 80, 30, (3, 64, 64)),
}


Write = Callable[[str, Path], Path]


@pytest.fixture
def write(benchmark_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Write:
    """write(name, out): a small part of the set."""
    monkeypatch.syspath_prepend(str(SCRIPT))
    script = benchmark_script("sets/__main__")
    return lambda name, out: script.write_set(name, out, SHARE)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_set_has_its_classes_in_both_parts_and_files_that_bridle_reads(
    name: str, tmp_path: Path, write: Write
) -> None:
    if name == "speech" and shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    modality, classes, train, test, shape = EXPECTED[name]
    seen = survey_data(write(name, tmp_path))
    assert seen.modality.name == modality
    assert seen.classes is not None
    assert (seen.classes.classes, seen.bad) == (classes, ())
    assert [seen.train, seen.test] == [classes * round(SHARE * n) for n in (train, test)]
    assert shape is None or {facts.shape for facts in seen.facts} == {shape}


@pytest.mark.parametrize("name", ["sensors", "icons"])
def test_a_set_is_the_same_every_time_and_no_item_repeats(name: str, tmp_path: Path, write: Write) -> None:
    first, again = ([path.read_bytes() for path in sorted(write(name, tmp_path / part).rglob("*.*"))] for part in "ab")
    assert first == again
    assert len(set(first)) == len(first)


def test_a_set_that_is_there_is_left_alone(tmp_path: Path, write: Write) -> None:
    (tmp_path / "icons").mkdir()
    assert list(write("icons", tmp_path).iterdir()) == []


def test_motions_move_as_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT))
    import shapes

    moved = {name: np.ptp(shapes.path_of(name, 1.0, np.random.default_rng(0)), axis=0) for name in shapes.MOTIONS}
    ends = {name: np.subtract(*shapes.path_of(name, 1.0, np.random.default_rng(0))[[-1, 0]]) for name in shapes.MOTIONS}
    assert ends["left"][0] == pytest.approx(-22) and ends["right"][0] == pytest.approx(22)
    assert ends["up"][1] == pytest.approx(-22) and ends["down"][1] == pytest.approx(22)
    assert ends["shrink"][2] < 0 < ends["grow"][2]
    assert moved["shake"][1] == 0 and moved["bounce"][0] == 0
