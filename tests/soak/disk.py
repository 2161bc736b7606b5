"""A disk that is full at some share of a checkpoint, by a limit on the size of files."""

from __future__ import annotations

import resource
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bridle.errors import CheckpointError
from bridle.runs.checkpoint import load_latest, publish
from soak.tally import Tally, judged

SIZE = 50_000  # numbers of each tensor


def name(step: int) -> str:
    return f"p0000-iter1-encoder-{step:08}"


def save(root: Path, step: int) -> None:
    tensors = {"model": {"w": torch.full((SIZE,), float(step))}, "optimizer": {"m": torch.arange(float(SIZE))}}
    publish(root, name(step), tensors, {"progress": {"step": step}}, keep=1)


def save_under_limit(root: Path, limit: int, told: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(root, 2)
        told.send("saved")
    except CheckpointError as error:
        told.send(f"{error.exit_code} {error}")


def fill_disk(share: float) -> Tally:
    """The previous checkpoint loads, the message names all, no stump is left."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save(root, 1)
        largest = max(file.stat().st_size for file in (root / name(1)).iterdir())
        before = sorted(root.rglob("*"))
        ours, theirs = get_context("fork").Pipe()
        child = get_context("fork").Process(target=save_under_limit, args=(root, int(share * largest), theirs))
        child.start()
        child.join(60)
        said = ours.recv()
        loaded, messages = load_latest(root)
        promised = {
            "exit code 74": said.startswith("74 "),
            "the path": str(root / name(2)) in said,
            "needed and free bytes": f"needed {2 * SIZE * 4 + 1_000_000:,} bytes, free " in said,
            "no stump": sorted(root.rglob("*")) == before,
            "the previous one loads": loaded is not None and loaded.state["progress"]["step"] == 1 and not messages,
        }
    wrong = [what for what, held in promised.items() if not held]
    return judged(wrong, name=f"{share:.0%} ({said})")
