"""Decoders that crash, hang or eat memory cost one file, with and without workers; killed workers change no result."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from bridle import failpoints
from bridle.config.schema import AugmentConfig
from bridle.data.audio import decode as audio_decode
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.source import Recordings
from bridle.data.image import source as image_source
from bridle.data.image.source import Images
from bridle.data.listing.folders import Listing
from bridle.data.loading import keeper, watchdog
from bridle.data.loading.loader import Batch, Loader, sequential
from bridle.data.loading.worker_pool import in_order
from bridle.data.sources import Sample, Source
from bridle.errors import DataError
from bridle.geometry import Geometry

RATE = 16_000


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test's files did is not held against another's."""
    yield
    watchdog.condemned.clear()
    watchdog.strikes.clear()
    failpoints.arm("")


def pictures(root: Path, count: int = 8) -> Images:
    paths = [root / f"{i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        noise = np.random.default_rng(i).integers(0, 255, (8, 8, 3))
        Image.fromarray(noise.astype(np.uint8)).save(path)
    return Images(paths=paths, labels=[i % 2 for i in range(count)], classes=["a", "b"], channels=3, size=(8, 8))


def sounds(root: Path, count: int = 8, **options: Any) -> Recordings:
    paths = [root / f"{i}.wav" for i in range(count)]
    for i, path in enumerate(paths):
        soundfile.write(path, 0.1 * np.random.default_rng(i).standard_normal(4000), RATE)
    front = LogMel(sample_rate=RATE, mels=8, low=20.0, window_ms=25.0, shift_ms=10.0)
    geometry = Geometry(1, (16, 8), (4, 4))
    augment = AugmentConfig(**options)
    return Recordings(
        listing=Listing(paths, None, None), classes=None, geometry=geometry, front=front, augment=augment, cache_mb=1
    )


def epoch(source: Source, *, workers: int, steps: int = 2) -> list[Batch]:
    loader = Loader(source=source, seed=0, phase="p", batch=8, mean=[0.0], std=[1.0], workers=workers, micro_batch=2)
    return [batch for step in loader.steps(0, steps) for batch in step]


def assert_equal(a: list[Batch], b: list[Batch]) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left.x, right.x)
        assert torch.equal(left.index, right.index)


def misbehave(monkeypatch: pytest.MonkeyPatch, how: str, name: str) -> None:
    """Make decoding of the file `name` go wrong in C, in whatever process it happens."""

    def trouble(path: object) -> None:
        if not str(path).endswith(name) or watchdog.at_hand is None:  # never in the process of the tests
            return
        if how == "crash":
            faulthandler.disable()  # which pytest has enabled
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "hang":
            ctypes.CDLL(None).sleep(1000)
        else:
            np.ones(6 * 2**30, dtype=np.uint8)

    for module in (image_source, audio_decode):
        original = module.opened

        def spoiled(*arguments: Any, original: Any = original) -> Any:
            trouble(arguments[-1])
            return original(*arguments)

        monkeypatch.setattr(module, "opened", spoiled)
    original_read = image_source.read_part

    def spoiled_read(path: Path, *arguments: Any, **more: Any) -> Any:
        with watchdog.watched(path):
            trouble(path)
        return original_read(path, *arguments, **more)

    monkeypatch.setattr(image_source, "read_part", spoiled_read)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [pictures, sounds])
@pytest.mark.parametrize(
    ("how", "why"), [("crash", "crash 2 times (SIGSEGV)"), ("hang", "longer than 5 s"), ("devour", "emory")]
)
def test_a_decoder_that_misbehaves_costs_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, how: str, why: str, workers: int
) -> None:
    source = make(tmp_path)
    sound = epoch(source, workers=0)
    if how == "hang":  # the others are to be found out by what they do, however slow the machine is
        monkeypatch.setattr(watchdog, "PATIENCE", 5.0)
    misbehave(monkeypatch, how, "3.png" if make is pictures else "3.wav")
    keeper.keepers.clear()
    if how == "devour":
        monkeypatch.setattr(watchdog, "MEMORY", 2**30)
    batches = epoch(make(tmp_path), workers=workers)
    bad = {Path(one.name).name: one.reason for batch in batches for one in batch.bad}
    assert list(bad) == ["3.png" if make is pictures else "3.wav"]
    assert why in next(iter(bad.values()))
    for before, after in zip(sound, batches, strict=True):  # whatever did not show the bad file is unchanged
        same = before.index == after.index
        assert torch.equal(before.x[same], after.x[same])
        assert (before.index[~same] == 3).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_workers_change_no_result_and_blame_no_file(tmp_path: Path, workers: int) -> None:
    source = pictures(tmp_path)
    whole = epoch(source, workers=0)
    failpoints.arm("sample.load@3=kill", log=str(tmp_path / "fired"))
    batches = epoch(source, workers=workers)
    assert (tmp_path / "fired").read_text() == "sample.load@3=kill\n"
    assert_equal(whole, batches)
    assert [one for batch in batches for one in batch.bad] == []


def test_a_worker_killed_from_outside_is_replaced() -> None:
    def slow(x: int) -> int:
        time.sleep(0.02)
        return x * x

    results = in_order(slow, range(40), workers=2)
    found = [next(results)]
    for child in active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
    assert [*found, *results] == [x * x for x in range(40)]


def test_a_killed_keeper_is_replaced_and_draws_stay_the_same(tmp_path: Path) -> None:
    options = {"enabled": True, "gain_db": 6.0, "time_mask": 2}
    with keeper.here():
        whole = epoch(sounds(tmp_path, **options), workers=0)
    source = sounds(tmp_path, **options)
    first = epoch(source, workers=0, steps=1)
    os.kill(keeper.keepers[source].process.process.pid or 0, signal.SIGKILL)
    batches = [*first, *epoch(source, workers=0)[len(first) :]]
    assert_equal(whole, batches)
    assert_equal(whole, epoch(sounds(tmp_path, **options), workers=2))


def test_what_was_decoded_stays_with_the_keeper(tmp_path: Path) -> None:
    source = sounds(tmp_path)
    epoch(source, workers=0)
    for i in range(8):
        (tmp_path / f"{i}.wav").unlink()
    assert all(not batch.bad for batch in epoch(source, workers=0))


def test_a_keeper_is_told_once_what_is_condemned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    send = keeper.send

    def noted(line: Any, facts: dict[str, Any], *rest: Any) -> None:
        told.append(facts.get("condemned"))  # an answer, in the other process, has none
        send(line, facts, *rest)

    source = pictures(tmp_path)
    watchdog.condemned[1] = "made it crash"
    monkeypatch.setattr(keeper, "send", noted)
    epoch(source, workers=0, steps=1)
    assert told
    assert not any(told)  # a fork knows it already
    told.clear()
    watchdog.condemned[watchdog.key_of(source.describe(3))] = "made it crash, too"
    bad = {one.index for batch in epoch(source, workers=0) for one in batch.bad}
    assert bad == {3}
    assert told[0] == [(watchdog.key_of(source.describe(3)), "made it crash, too")]
    assert len(told) > 1
    assert not any(told[1:])


def test_a_keeper_goes_with_its_data_set(tmp_path: Path) -> None:
    source = pictures(tmp_path)
    epoch(source, workers=0)
    process = keeper.keepers[source].process.process
    assert process.is_alive()
    del source
    process.join(10)
    assert not process.is_alive()


def test_errors_of_the_keeper_arrive_as_they_are(tmp_path: Path) -> None:
    source = pictures(tmp_path)
    (tmp_path / "2.png").write_text("not a picture")
    with pytest.raises(DataError, match=r"2\.png' cannot be read as an image: not a JPEG, PNG, WebP or BMP file"):
        list(sequential(source, batch=4, mean=[0.0], std=[1.0]))


def test_a_constant_file_is_left_out_of_training_but_can_be_scored(tmp_path: Path) -> None:
    source = pictures(tmp_path)
    Image.new("RGB", (8, 8), (7, 7, 7)).save(tmp_path / "5.png")
    bad = [one for batch in epoch(source, workers=0) for one in batch.bad]
    assert {(Path(one.name).name, one.reason.split("png")[1]) for one in bad} == {
        ("5.png", " holds the same value everywhere.")
    }
    assert sum(len(batch.x) for batch in sequential(source, batch=4, mean=[0.0], std=[1.0])) == 8


class Owned:
    """Samples that come from no file."""

    classes = labels = None

    def __len__(self) -> int:
        return 8

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        return Sample(torch.full((1, 4, 4), float(index)))

    def describe(self, index: int) -> str:
        return f"sample {index}"


def test_constant_samples_that_come_from_no_file_are_their_owners_business() -> None:
    assert all(not batch.bad for batch in epoch(Owned(), workers=0))


@pytest.mark.parametrize("error", [TimeoutError, NotADirectoryError, ConnectionResetError, BlockingIOError])
def test_every_error_of_a_disk_stays_one_on_its_way(error: type[OSError]) -> None:
    came = keeper.told({"error": error.__name__, "text": "it did not answer"})
    assert isinstance(came, OSError)
    assert str(came) == "it did not answer"


def test_a_run_that_was_stopped_and_goes_on_gives_its_files_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.05)
    slot = watchdog.Slot()
    slot.note(5, time.monotonic_ns() - 1)
    assert not slot.late  # the clock went on while everything stood still
    time.sleep(0.06)
    assert slot.late
    slot.note(5, time.monotonic_ns() - 1)  # it has got on
    assert not slot.late
