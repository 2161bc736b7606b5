"""Decoders that crash, hang or eat memory cost one file, and killed workers change no result: fork and spawn."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from video_files import write_pictures

from bridle import failpoints
from bridle.config.data_schema import AugmentConfig
from bridle.data.audio.logmel import LogMel
from bridle.data.audio.source import Recordings
from bridle.data.image.source import Images
from bridle.data.listing.table import Listing
from bridle.data.loading import watchdog, worker_pool
from bridle.data.loading.loader import Batch, Loader, sequential
from bridle.data.loading.worker_pool import map_in_order
from bridle.data.loading.worker_process import start_context
from bridle.data.sources import Sample, Source
from bridle.data.video.source import Decoding, Videos
from bridle.errors import DataError, UsageError
from bridle.geometry import Geometry

RATE = 16_000
FAULTS = {2: "crash", 4: "hang", 6: "devour"}  # by number of the file


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test's files did is not held against another's."""
    yield
    watchdog.blocklist.clear()
    watchdog.crashes.clear()
    failpoints.arm("")


def pictures(root: Path, count: int = 8) -> Images:
    paths = [root / f"{i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        noise = np.random.default_rng(i).integers(0, 255, (8, 8, 3))
        Image.fromarray(noise.astype(np.uint8)).save(path)
    listing = Listing(paths, [i % 2 for i in range(count)])
    return Images(listing, ["a", "b"], geometry=Geometry(3, (8, 8), (4, 4)))


def sounds(root: Path, count: int = 8, **options: Any) -> Recordings:
    paths = [root / f"{i}.wav" for i in range(count)]
    for i, path in enumerate(paths):
        soundfile.write(path, 0.1 * np.random.default_rng(i).standard_normal(4000), RATE)
    front = LogMel(sample_rate=RATE, mels=8, low=20.0, window_ms=25.0, shift_ms=10.0)
    geometry = Geometry(1, (16, 8), (4, 4))
    augment = AugmentConfig(**options)
    return Recordings(Listing(paths), None, geometry=geometry, front=front, augment=augment, cache_mb=1)


def videos(root: Path, count: int = 8) -> Videos:
    paths = [root / f"{i}.mkv" for i in range(count)]
    for i, path in enumerate(paths):
        write_pictures(path, list(np.random.default_rng(i).integers(0, 255, (4, 16, 16, 3), dtype=np.uint8)))
    decoding = Decoding(Geometry(3, (2, 8, 8), (2, 4, 4)), stride=1, short_side=None, timeout=watchdog.limits.timeout)
    return Videos(Listing(paths), None, decoding=decoding, augment=AugmentConfig(), cache_mb=1)


def epoch(source: Source, *, workers: int, steps: int = 2) -> list[Batch]:
    loader = Loader(source=source, seed=0, phase="p", batch=8, mean=[0.0], std=[1.0], workers=workers, micro_batch=2)
    return [batch for step in loader.steps(0, steps) for batch in step]


def assert_equal(a: list[Batch], b: list[Batch]) -> None:
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left.x, right.x)
        assert torch.equal(left.index, right.index)


class Spoiled:
    """A source whose decoders misbehave in C for the files of FAULTS, in workers only."""

    from_files = True

    def __init__(self, source: Any) -> None:
        self.source, self.classes, self.labels = source, source.classes, source.labels

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return str(self.source.describe(index))

    def load(self, index: int, generator: torch.Generator | None) -> Sample:
        assert watchdog.slot is not None
        spoil_decoders()
        sample: Sample = self.source.load(index, generator)
        return sample


def spoil_decoders() -> None:
    """Once in a process: what bridle calls to open a file misbehaves, whichever library it is."""
    import av

    if hasattr(av, "spoiled"):
        return
    av.spoiled = True
    for module, name in ((Image, "open"), (soundfile, "SoundFile"), (av, "open")):
        setattr(module, name, spoiled(getattr(module, name)))


def spoiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: Any, *arguments: Any, **more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        how = FAULTS.get(int(Path(path).stem))
        if how == "crash":
            faulthandler.disable()  # which pytest has enabled
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "hang":
            ctypes.CDLL(None).sleep(1000)
        elif how == "devour":
            np.ones(6 * 2**30, dtype=np.uint8)
        return function(file, *arguments, **more)

    return call


@pytest.mark.parametrize("make", [pictures, sounds, videos])
def test_a_decoder_that_misbehaves_costs_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, start_method: str
) -> None:
    monkeypatch.setattr(watchdog, "limits", watchdog.Limits(timeout=8.0, memory=2**30))
    good = epoch(make(tmp_path), workers=0)
    batches = epoch(Spoiled(make(tmp_path)), workers=2)  # with an empty cache
    bad = {one.index: one.reason for batch in batches for one in batch.bad}
    assert set(bad) == set(FAULTS)
    assert "crash 2 times (SIGSEGV)" in bad[2]
    assert "timed out: it took longer than 8 s" in bad[4]
    assert "memory" in bad[6].lower()
    for before, after in zip(good, batches, strict=True):  # whatever did not show a bad file is unchanged
        same = before.index == after.index
        assert torch.equal(before.x[same], after.x[same])
        assert set(before.index[~same].tolist()) <= set(FAULTS)


def test_killed_workers_change_no_result_and_blame_no_file(
    tmp_path: Path, start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pictures(tmp_path)
    whole = epoch(source, workers=0)
    fault, fired = "sample.load@3=kill", tmp_path / "fired"
    failpoints.arm(fault, log=str(fired))
    monkeypatch.setenv("BRIDLE_FAILPOINTS", fault)  # for a spawned worker
    monkeypatch.setenv("BRIDLE_FAILPOINTS_LOG", str(fired))
    batches = epoch(source, workers=2)
    assert fired.read_text() == f"{fault}\n"
    assert_equal(whole, batches)
    assert [one for batch in batches for one in batch.bad] == []


@pytest.mark.parametrize("make", [pictures, sounds, videos])
def test_batches_do_not_depend_on_workers_or_how_they_start(tmp_path: Path, make: Any, start_method: str) -> None:
    options = {"enabled": True, "gain_db": 6.0, "time_mask": 2} if make is sounds else {}
    whole = epoch(make(tmp_path, **options), workers=0)
    for workers in (1, 2) if start_method == "fork" else (2,):
        assert_equal(whole, epoch(make(tmp_path, **options), workers=workers))


def square_slowly(x: int) -> int:
    time.sleep(0.02)
    return x * x


def test_a_worker_killed_from_outside_is_replaced(start_method: str) -> None:
    results = map_in_order(square_slowly, range(40), workers=2)
    found = [next(results)]
    for child in active_children():
        os.kill(child.pid or 0, signal.SIGKILL)
    assert [*found, *results] == [x * x for x in range(40)]


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (Path(self.mark), "executed")


def send_pickle(mark: str) -> None:
    """In a worker that a file has taken over: send what it likes."""
    connection = sys._getframe(1).f_locals["connection"]  # of `serve`
    connection.send(Bomb(mark))


def test_nothing_that_a_worker_sends_is_unpickled(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a data worker died 5 times"):
        list(map_in_order(send_pickle, [str(tmp_path / "mark")], workers=1))
    assert not (tmp_path / "mark").exists()
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "mark"))))
    assert (tmp_path / "mark").exists()  # the bomb works


def test_a_worker_knows_what_was_blocked_before_and_after_it_started(tmp_path: Path, start_method: str) -> None:
    source = pictures(tmp_path)
    watchdog.blocklist[watchdog.key_of(source.describe(1))] = "made it crash"
    loader = Loader(source=source, seed=0, phase="p", batch=8, mean=[0.0], std=[1.0], workers=1, micro_batch=2)
    steps = loader.steps(0, 4)
    bad = [one.index for batch in next(steps) for one in batch.bad]
    watchdog.blocklist[watchdog.key_of(source.describe(3))] = "made it crash, too"
    assert set(bad) == {1}
    assert {one.index for step in steps for batch in step for one in batch.bad} == {1, 3}


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


def test_one_line_says_that_no_worker_protects_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_pool, "noted", False)
    epoch(Owned(), workers=0)
    source = pictures(tmp_path)
    epoch(source, workers=1)
    assert capsys.readouterr().err == ""
    epoch(source, workers=0)
    list(sequential(source, batch=4, mean=[0.0], std=[1.0]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no data workers: files are decoded in this process")


def test_a_run_that_was_paused_and_goes_on_gives_its_files_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.05)
    slot = watchdog.Slot(start_context())
    slot.write(5, -1)
    assert not slot.is_late  # the clock went on while everything stood still
    time.sleep(0.06)
    assert slot.is_late
    slot.write(5, -1)  # it has made progress
    assert not slot.is_late


def test_a_data_set_that_cannot_be_spawned_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_START_METHOD", "spawn")
    with pytest.raises(UsageError, match=r"cannot be sent to a worker that is spawned: .*data\.workers=0"):
        list(map_in_order(lambda x: x, range(3), workers=1))
    monkeypatch.setenv("BRIDLE_START_METHOD", "teleport")
    with pytest.raises(UsageError, match="'teleport': expected fork or spawn"):
        list(map_in_order(square_slowly, range(3), workers=1))


def test_workers_run_where_memory_cannot_be_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['resource'] = None")  # as on Windows
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_containment import epoch, pictures\n"
        "if __name__ == '__main__':\n"
        "    print(sum(len(batch.x) for batch in epoch(pictures(Path(sys.argv[1])), workers=1)))\n"
    )
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setenv("BRIDLE_START_METHOD", "spawn")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    here = Path(__file__).parent
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(here)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "16\n", "")
