"""Mutated configs and files: whatever comes, the answer is a value or an error of ours, within seconds.

Everything is a function of (kind, seed). Trials run in worker processes, so that a crash or a hang is counted and not
the end; `Outcome.held` says what was promised.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from forked import SERVER

from bridle.config import load_config, read_config, recipe_names
from bridle.data.loading import watchdog
from bridle.data.loading.worker_pool import map_in_order
from bridle.errors import BridleError
from soak.specimens import SLOW, Specimen
from soak.specimens import SPECIMENS as MEDIA
from soak.stored import STORED

TOKENS = (
    *("null", "-1", "1e999", ".nan", "[]", "{}", "[1, 2, 3]", "'", '"', "!!python/name:os.system", "&a", "*a", "\x00"),
    *("9" * 400, "true", "é", "\u202e", "- ", ": ", "? ", "<<: *a", "16", "0", "0.5", "[[", "}}", "#", "%", "|", ">"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308, float("nan"), float("-inf")),
    *("", "x", "é\u202e\0", "../../etc/passwd", "/dev/zero", "<script>", "9" * 400, [], {}, [1, 2], {"a": 1}, [[[[]]]]),
)


class Outcome(NamedTuple):
    """What became of the trials of one kind."""

    kind: str
    count: Counter[str]  # type: ignore[assignment]  # used, refused, contained, slow, or the name of an error that is not ours

    @property
    def tried(self) -> int:
        return sum(self.count.values())

    @property
    def held(self) -> int:
        return self.count["used"] + self.count["refused"]


def fuzz(kind: str, count: int, *, workers: int = 2, first: int = 0) -> Outcome:
    """Try `count` mutations of a kind of file, or of configs (kind "config"), or of overrides (kind "override")."""
    with tempfile.TemporaryDirectory() as folder:
        before, watchdog.limits = watchdog.limits, watchdog.limits._replace(timeout=SLOW + 1)
        if kind in SPECIMENS:
            good_files(kind)  # made once, before the workers are forked
        try:
            trials = map_in_order(partial(trial, kind, folder), range(first, first + count), workers=workers)
            return Outcome(kind, Counter(trials))
        finally:
            watchdog.limits = before


def fuzz_apart(kind: str, count: int, *, first: int, report: Path) -> Outcome:
    """The same in a process of its own, because forks of a process with threads are not to be trusted."""
    process = SERVER.Process(target=_fuzz_apart, args=(kind, count, first, str(report)))
    process.start()
    process.join()
    return Outcome(kind, Counter(json.loads(report.read_text())))


def _fuzz_apart(kind: str, count: int, first: int, report: str) -> None:
    os.dup2(os.open(f"{report}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # what decoders mutter
    Path(report).write_text(json.dumps(fuzz(kind, count, workers=1, first=first).count))


def trial(kind: str, folder: str, seed: int) -> str:
    chance = random.Random(f"{kind} {seed}")
    attempt: Callable[[], Any]
    if kind == "override":
        attempt = partial(load_config, chance.choice(recipe_names()), [mutated_override(chance)])
    elif kind == "config":
        path = Path(folder) / f"{seed}.yaml"
        path.write_bytes(mutated_config(chance))
        attempt = partial(read_config, path)
    else:
        place = Path(folder) / f"{seed}"
        lay_out(place, mutated_files(kind, chance))
        sign = SPECIMENS[kind].sign
        if sign is not None and chance.random() < 0.5:
            sign(place)
        attempt = partial(SPECIMENS[kind].read, place)
    began = time.monotonic()
    try:
        with watchdog.watched(f"{folder} {kind} {seed}"):
            attempt()
        said = "used"
    except BridleError as error:
        said = "contained" if "made its decoder crash" in str(error) or "timed out" in str(error) else "refused"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:80]} (seed {seed})"
    slow = time.monotonic() - began > SLOW
    shutil.rmtree(Path(folder) / f"{seed}", ignore_errors=True)
    return "slow" if slow else said


def lay_out(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def mutated(content: bytes, chance: random.Random) -> bytes:
    """One to eight changes: flipped bits, random bytes, cuts, repeats, extreme numbers; often near the beginning."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(min(len(data), 200) if chance.random() < 0.5 else len(data)) if data else 0
        match chance.randrange(7):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at] = chance.randrange(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + chance.randrange(1, 64)]
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 64))
            case 5:
                data[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f")
                )
            case _:
                data[at:at] = data[at : at + 256]
    return bytes(data)


@cache
def recipe_texts() -> tuple[str, ...]:
    folder = Path(load_config.__code__.co_filename).parent / "recipes"
    return tuple(path.read_text() for path in sorted(folder.glob("*.yaml")))


def mutated_config(chance: random.Random) -> bytes:
    """A recipe with words replaced, lines doubled, moved or cut, and now and then plain damage."""
    lines = chance.choice(recipe_texts()).splitlines()
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        at = chance.randrange(len(lines))
        match chance.randrange(6):
            case 0:
                key, colon, _ = lines[at].partition(":")
                lines[at] = f"{key}{colon} {chance.choice(TOKENS)}"
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2:
                lines[at] = " " * chance.randrange(9) + lines[at].lstrip()
            case 3:
                place = chance.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:place] + chance.choice(TOKENS) + lines[at][place:]
            case 4:
                lines[at] = f"{mutated_override(chance).replace('=', ': ', 1)}"
            case _:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
    content = "\n".join(lines).encode()
    return mutated(content, chance) if chance.random() < 0.2 else content


@cache
def all_keys() -> tuple[str, ...]:
    found: list[str] = []

    def walk(value: Any, path: str) -> None:
        for key, entry in value.items():
            here = f"{path}{key}"
            found.append(here)
            if isinstance(entry, dict):
                walk(entry, f"{here}.")

    walk(load_config("digits-tiny").model_dump(), "")
    return tuple(found)


def mutated_override(chance: random.Random) -> str:
    key = chance.choice(all_keys())
    if chance.random() < 0.2:
        place = chance.randrange(len(key))
        key = key[:place] + chance.choice(TOKENS) + key[place + 1 :]
    return f"{key}={chance.choice(TOKENS)}"


SPECIMENS: dict[str, Specimen] = {**MEDIA, **STORED}
KINDS = tuple(SPECIMENS)


@cache
def good_files(kind: str) -> dict[str, bytes]:
    """The files of a specimen by name."""
    return SPECIMENS[kind].files()


def mutated_files(kind: str, chance: random.Random) -> dict[str, bytes]:
    """The same with one of them changed; JSON often so that it still is JSON."""
    files, spared = good_files(kind), SPECIMENS[kind].spared
    name = chance.choice([name for name in files if not name.endswith(spared or ("\0",))])
    content = files[name]
    if name.endswith((".json", ".jsonl")) and chance.random() < 0.7:
        return {**files, name: mutated_json(content, chance)}
    return {**files, name: mutated(content, chance)}


def mutated_json(content: bytes, chance: random.Random) -> bytes:
    """One value, key or entry of a line of JSON replaced, removed or added."""
    lines = content.decode().splitlines() if content.count(b"\n{") else [content.decode()]
    at = chance.randrange(len(lines))
    value = json.loads(lines[at])
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = list(places_in(value))
        if not places:
            break
        inside, key = chance.choice(places)
        match chance.randrange(4):
            case 0 if isinstance(inside, dict):
                del inside[key]
            case 1 if isinstance(inside, dict):
                inside[chance.choice(("", "x", "../x", "format", "__metadata__"))] = inside.pop(key)
            case _:
                inside[key] = copy.deepcopy(chance.choice(VALUES))
    lines[at] = json.dumps(value)
    return "\n".join(lines).encode()


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(dictionary or list, key) of everything inside a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield value, key
        yield from places_in(entry)
