"""Checkpoints that were damaged: every flipped bit and every cut is found, the one before is used, and it says so."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from bridle.runs.checkpoint import checkpoint_folders, load_latest, publish
from soak.tally import Tally

Damage = tuple[str, bytes]  # what was done, and what came of it


def flipped(content: bytes, bits: Iterable[int]) -> Iterator[Damage]:
    """The content with one bit changed, for each of `bits`."""
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(changed)


def cut(content: bytes, lengths: Iterable[int]) -> Iterator[Damage]:
    """The first bytes of the content, for each of `lengths`."""
    for length in lengths:
        yield f"cut to {length} bytes", content[:length]


def one_bit_of_every_byte(content: bytes, *, seed: int = 0) -> Iterator[Damage]:
    """And every truncation."""
    chance = random.Random(seed)
    yield from flipped(content, (8 * byte + chance.randrange(8) for byte in range(len(content))))
    yield from cut(content, range(len(content)))


def everything(content: bytes) -> Iterator[Damage]:
    """Every bit and every truncation."""
    yield from flipped(content, range(8 * len(content)))
    yield from cut(content, range(len(content)))


def some(content: bytes, *, count: int, seed: int = 0) -> Iterator[Damage]:
    """`count` random bits and as many truncations."""
    chance = random.Random(seed)
    yield from flipped(content, (chance.randrange(8 * len(content)) for _ in range(count)))
    yield from cut(content, (chance.randrange(len(content)) for _ in range(count)))


def damage_file(root: Path, file: str, changes: Iterable[Damage]) -> Tally:
    """Damage `file` of the newest checkpoint below `root` in each of these ways; then it is as it was."""
    before, newest = checkpoint_folders(root)[-2:]
    path = newest / file
    content = path.read_bytes()
    tried, wrong = 0, list[str]()
    for what, damaged in changes:
        tried += 1
        path.write_bytes(damaged)
        loaded, messages = load_latest(root)
        told = len(messages) == 1 and newest.name in messages[0] and "Using the previous checkpoint" in messages[0]
        if loaded is not None and loaded.path == before and told:
            continue
        if not (file == "manifest.json" and says_the_same(damaged, content) and not messages):
            wrong.append(f"{file}, {what}: used {None if loaded is None else loaded.path.name}, said {messages}")
    path.write_bytes(content)
    return Tally(tried, tried - len(wrong), wrong[:5])


def says_the_same(damaged: bytes, content: bytes) -> bool:
    """White space of JSON is no content: with a tab in place of a space it says the same."""
    try:
        return bool(json.loads(damaged) == json.loads(content))
    except ValueError:
        return False


def save_small(root: Path) -> None:
    """Two checkpoints of a few numbers."""
    for step in (1, 2):
        tensors = {"model": {"w": torch.full((5,), float(step))}, "optimizer": {"m": torch.arange(5.0)}}
        publish(root, f"p0000-iter1-encoder-{step:08}", tensors, {"progress": {"step": step}}, keep=2)


def damage_copy(
    make: Callable[[Path], object], root: Path, file: str, change: Callable[[bytes], Iterable[Damage]]
) -> Tally:
    """The same with checkpoints that `make(root)` puts there and that are removed afterwards."""
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    make(root)
    found = damage_file(root, file, change((checkpoint_folders(root)[-1] / file).read_bytes()))
    shutil.rmtree(root)
    return found
