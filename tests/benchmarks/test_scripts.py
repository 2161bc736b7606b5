"""The benchmark scripts that are run by hand still run, on inputs too small to say anything about speed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from bench.quantizer import fixture
from bench.timing import one_thread

from bridle.config import Config
from bridle.data.build import open_data
from bridle.data.inspect.survey import survey_data

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ("assign", {"vector-quantize-pytorch", "faiss, beam 1"}),
        ("train step", {"vector-quantize-pytorch"}),
        ("k-means", {"vector-quantize-pytorch", "faiss", "scikit-learn"}),
    ],
)
def test_every_library_does_the_work_it_is_measured_at(work: str, expected: set[str]) -> None:
    with one_thread():
        calls = script("quantizer_libraries").other_libraries(work, fixture(4096))
        assert set(calls) == expected
        for call in calls.values():
            call()


def test_the_parts_of_a_step_are_timed(small: Callable[..., Config]) -> None:
    parts = script("step_parts").measure(small(), rows=2, repeats=1)
    assert list(parts) == ["data", "tokenizer", "encoder", "decoder", "heads, loss", "backward", "optimizer"]
    assert all(seconds >= 0 for seconds in parts.values())


def test_memory_is_measured_after_every_pass(small: Callable[..., Config]) -> None:
    config = small()
    assert len(script("data_memory").measure(open_data(config).train, config, samples=16)) == 4


@pytest.mark.parametrize("clips", [False, True])
def test_generated_scenes_are_read_the_same_every_time_and_clips_move(
    clips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / "sets"))  # put back afterwards
    written = script("picture_scenes")
    for part in "ab":
        written.write(tmp_path / part, clips=clips, count=3, seed=0)
    first, again = ([path.read_bytes() for path in sorted((tmp_path / part).iterdir())] for part in "ab")
    assert first == again and len(set(first)) == 3
    seen = survey_data(tmp_path / "a")
    assert (seen.modality.name, len(seen.facts), seen.bad) == ("video" if clips else "images", 3, ())
    assert {facts.shape for facts in seen.facts} == {(3, 16, 64, 64) if clips else (3, 64, 64)}
    frames = written.scene(16, np.random.default_rng([0, 1]))
    assert np.abs(frames[-1] - frames[0]).mean() > 2 * np.abs(frames[1] - frames[0]).mean() > 0


def test_simulated_ranks_wait_for_the_slowest_and_for_their_batches() -> None:
    simulation = importlib.import_module("cluster_simulation")
    two = simulation.Cluster(2, 0, 8.0, 0, 1, 0, bandwidth=float("inf"), latency=0, queue=1, every=2, copy=1.0)
    compute, nothing = np.array([[1.0, 3.0], [2.0, 1.0]]), np.zeros((2, 2))
    found = simulation.simulate(two, compute, nothing)
    assert found == pytest.approx({"seconds": 5 / 2, "data": 0, "ranks": (1 + 0.5) / 5, "checkpoint": 0})
    # A batch takes 2 s to load, the second only once the first is taken: 2 + 3, then from 4 on there is the second.
    found = simulation.simulate(two, compute, nothing + 2)
    assert found["seconds"] * 2 == pytest.approx(2 + 3 + 2)
    assert found["data"] * 7 == pytest.approx(2)
    # An exchange of 8 bytes at 4 bytes/s between two: 2 s after the slower; a checkpoint of 3 bytes at 1 byte/s.
    slow = replace(two, bandwidth=4.0, checkpoint=3.0)
    found = simulation.simulate(slow, compute, nothing)
    assert found["seconds"] * 2 == pytest.approx(3 + 2 + 2 + 2 + 3)
    assert found["checkpoint"] * 12 == pytest.approx(3)


def test_decoders_are_compared_at_the_same_picture() -> None:
    decoders = script("decoders")
    calls = decoders.decoders(decoders.picture())
    whole = calls["Pillow, as bridle"]()
    assert whole.shape == (375, 500, 3)
    assert all(call().shape == whole.shape for call in calls.values())
