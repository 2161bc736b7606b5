"""Held-out items for measuring a detokenizer: spread over all of them, unreadable ones left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from conftest import SMALL
from PIL import Image
from run_folders import write_run

from bridle.config import load_config
from bridle.data.embedded.sets import digits
from bridle.evaluate.reconstruction.measure import split_for_measuring
from bridle.infer.detokenizer_command import detokenizer_run
from bridle.runs.reconstruction import Reconstruction
from bridle.runs.results import read_record


def test_items_are_spread_over_the_whole_split() -> None:
    held = split_for_measuring(digits())
    last = len(held.test) - 1
    assert held.spread(3) == [0, round(last / 2), last]
    assert held.spread(10**6) == list(range(last + 1))


def test_an_unreadable_held_out_file_does_not_undo_the_training(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 4)):
        for number in range(count):
            folder = tmp_path / "data" / split / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "data/test/a/2.png").write_bytes(b"not a picture")
    size = ["geometry.input=[8,8]", "geometry.patch=[4,4]", f"data.root={tmp_path / 'data'}"]
    folder = write_run(tmp_path / "run", load_config("image", [*SMALL, *size]))
    short = ["detokenizer.steps=2", "detokenizer.warmup_steps=1", "detokenizer.batch=4", "max_steps=null"]
    found = read_record(Reconstruction, detokenizer_run(folder, short))
    assert (found.items, found.held_out) == (3, "test")
