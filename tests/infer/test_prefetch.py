"""Decoding ahead: the same events in the same order, bounded, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import Plane, plane_model, signal_model, write_signal

from bridle.data.listing.items import Item, Items
from bridle.data.loading import watchdog
from bridle.data.loading.worker_process import start_context
from bridle.data.sources import Window
from bridle.errors import UsageError
from bridle.infer import prefetch
from bridle.infer.prefetch import Call, Ended, Placed, Reached, Reading, events_of_items


class Numbers:
    """Makes `length` windows of a file called `length.wav`, window n filled with n; each leaves a dot in the log."""

    extensions = (".wav",)
    frame_seconds = None
    timed = False

    def __init__(self, log: Path | None = None, kill_at: int | None = None, fired: Path | None = None) -> None:
        self.log, self.kill_at, self.fired = log, kill_at, fired

    def windows(self, path: Path) -> Iterator[Window]:
        for number in range(int(path.stem)):
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(".")
            if self.kill_at == number and self.fired is not None and not self.fired.exists():
                self.fired.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield Window(torch.full((1, 4, 4), float(number)), None, 4 * number)


def items_of(*lengths: int) -> Items:
    return Items(Item(Path(f"{length}.wav")) for length in lengths)


def events_of(items: Items, reader: Numbers, workers: int) -> list[tuple[int, float | None]]:
    """Item and content of every window; None for the end of an item."""
    return [
        (event.item, float(event.window.x[0, 0, 0]) if isinstance(event, Placed) else None)
        for event in events_of_items(items, reader, workers=workers)
    ]


@pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (2, "fork"), (5, "fork"), (2, "spawn")])
def test_workers_tell_the_same_in_the_same_order(workers: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_START_METHOD", method)
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 3 * 64)  # three windows of 4×4 float32
    items = items_of(5, 1, 0, 7, 2)
    expected = [(i, None if w is None else float(w)) for i, n in enumerate((5, 1, 0, 7, 2)) for w in [*range(n), None]]
    assert events_of(items, Numbers(), 0) == events_of(items, Numbers(), workers) == expected


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost_or_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 3 * 64)
    items, reader = items_of(4, 30, 3), Numbers(log=tmp_path / "log", kill_at=20, fired=tmp_path / "fired")
    assert events_of(items, reader, 1) == events_of(items, Numbers(), 0)
    assert (tmp_path / "fired").exists()
    # What was sent before is skipped by item; of the long file windows are decoded a second time.
    assert len((tmp_path / "log").read_text()) <= 37 + 21


def test_a_piece_is_the_same_from_wherever_reading_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 3 * 64)
    items = items_of(5, 4, 6)
    straight, reached, pieces = Reading(items, Numbers(), 0, 1, ahead=True), [Reached()], []
    while piece := straight(Call(len(pieces), reached[-1])):
        pieces.append([(event.item, isinstance(event, Ended)) for event in piece])
        reached.append(prefetch._after(piece, reached[-1]))
    assert reached[-1] == Reached(len(pieces), 3, 0)
    for number, piece in enumerate(pieces):
        for known in reached[: number + 1]:
            again = Reading(items, Numbers(), 0, 1, ahead=True)(Call(number, known))
            assert [(event.item, isinstance(event, Ended)) for event in again] == piece


def test_workers_stay_a_few_pieces_ahead_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PIECE_BYTES", 2 * 64)
    events = events_of_items(items_of(1000, 1000), Numbers(log=tmp_path / "log"), workers=2)
    next(events)
    time.sleep(0.5)
    decoded = len((tmp_path / "log").read_text())
    events.close()
    assert decoded <= 2 * 3 * 2  # two workers, three pieces each, two windows in a piece


def test_a_file_is_not_late_while_nobody_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "slot", watchdog.Slot(start_context()))

    class Watched(Numbers):
        def windows(self, path: Path) -> Iterator[Window]:
            with watchdog.watched(path):
                yield from super().windows(path)

    reading = Reading(items_of(9), Watched(), 0, 1, ahead=False)
    reading(Call(0, Reached()))
    assert watchdog.slot is not None
    assert (watchdog.slot.key, watchdog.slot.timeout) == (watchdog.NONE, watchdog.NONE)
    assert reading.open_file == (watchdog.key_of(Path("9.wav")), 120 * 10**9)
    while reading(Call(reading.pieces, Reached())):
        pass
    assert reading.open_file == (watchdog.NONE, watchdog.NONE)


def test_rows_of_files_are_the_same_bit_for_bit_with_workers(tmp_path: Path) -> None:
    model = signal_model()
    paths = [tmp_path / f"{number}.npy" for number in range(5)]
    for number, path in enumerate(paths):
        write_signal(path, 10 + 17 * number)
    alone, helped = (list(model.encode_files(paths, batch=3, workers=workers)) for workers in (0, 2))
    for one, other in zip(alone, helped, strict=True):
        assert np.array_equal(one.z, other.z)
        assert one.name == other.name
    with pytest.raises(UsageError, match="workers is -1"):
        list(model.encode_files(paths, workers=-1))


def test_times_of_a_part_are_those_of_its_file(tmp_path: Path) -> None:
    class Parts(Plane):
        def windows(self, path: Path, span: tuple[float, float | None] = (0.0, None)) -> Iterator[Window]:
            assert span in [(10.0, 14.0), (0.0, None)]
            yield from self.list

    import io

    import bridle
    from bridle.console import ProgressLine
    from bridle.infer.write import tokenize_inputs

    (tmp_path / "list.csv").write_text("path,start,end\na.wav,10,14\na.wav,,\n")
    (tmp_path / "a.wav").touch()
    model = plane_model(Parts([Window(torch.zeros(1, 4, 6), None, 0)]))
    quiet = ProgressLine(io.StringIO())
    tokenize_inputs(model, [str(tmp_path / "list.csv")], tmp_path / "c.npz", progress=quiet)
    (name, part), (_, whole) = bridle.read_codes(tmp_path / "c.npz")
    assert name == f"{tmp_path}/a.wav#t=10,14"
    assert part.times is not None and whole.times is not None
    assert part.times.tolist() == [10.0, 10.0, 11.0, 11.0]
    assert whole.times.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert part.positions.tolist() == whole.positions.tolist()
