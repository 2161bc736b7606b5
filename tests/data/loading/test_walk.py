"""The walk of a wav from the training step down to its decoder, as docs/design.md tells it."""

from __future__ import annotations

import json
import re
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import SMALL

import bridle
from bridle import api
from bridle.config import load_config
from bridle.data.loading import watchdog

PACKAGE = Path(bridle.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
LONGEST = 12  # frames


def frames_above(frame: FrameType | None, first: str) -> list[tuple[str, str]]:
    """File and function of all frames from the innermost call of function `first` down to `frame`."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        file = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        found.append((file, frame.f_code.co_name))
        if found[-1][1] == first:
            return found[::-1]
        frame = frame.f_back
    return []


def test_the_walk_of_a_wav_is_the_documented_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):
        soundfile.write(tmp_path / f"{i}.wav", 0.1 * np.random.default_rng(i).standard_normal(48_000), 16_000)
    asked: list[list[tuple[str, str]]] = []
    decoded = tmp_path / "decoded.json"
    send, read = Connection.send, soundfile.SoundFile.read

    def noted_send(self: Connection, item: Any) -> None:
        asked.append(frames_above(sys._getframe(1), "fit"))
        send(self, item)

    def noted_read(self: Any, *arguments: Any, **more: Any) -> Any:
        if watchdog.slot is not None:  # in a worker
            decoded.write_text(json.dumps([*frames_above(sys._getframe(1), "serve"), ("soundfile", "read")]))
        return read(self, *arguments, **more)

    monkeypatch.setattr(Connection, "send", noted_send)
    monkeypatch.setattr(soundfile.SoundFile, "read", noted_read)
    changes = [f"data.root={tmp_path}", "geometry.input=[32, 64]", "probe.enabled=false", "max_steps=1"]
    config = load_config("audio", [*SMALL, *changes, "data.mean=[0.0]", "data.std=[1.0]", "schedule.iterations=1"])
    api.pretrain(config, out=tmp_path / "run")
    walks = [walk for walk in asked if ("data/loading/loader.py", "steps") in walk]  # not those of codebook starts
    assert walks and all(walk == walks[0] for walk in walks)
    walk = [("main", *frame) for frame in walks[0]] + [("worker", *frame) for frame in json.loads(decoded.read_text())]
    assert walk == documented()
    assert len(walk) <= LONGEST


def documented() -> list[tuple[str, ...]]:
    """Process, file and function of each row of the table."""
    section = DESIGN.read_text().split("## The walk of a sample")[1].split("\n## ")[0]
    return re.findall(r"^\| (main|worker) \| `?([\w/.]+)`? \| `(\w+)` \|", section, re.MULTILINE)
