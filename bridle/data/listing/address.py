"""Addresses of data: what is not a folder or file of this machine becomes one, once.

    s3://…, gs://…, memory://…             any file system of fsspec; copied to the cache, again only where it changed
    s3://…/train-{000..012}.tar            only these files; such patterns of shards may also be local
    hf://datasets/NAME, NAME:CONFIG        a data set of the hub; `datasets.load_dataset` prepares it in its own cache
    a folder of .parquet files             likewise, because their pages are compressed

Files are copied before training begins: samples are drawn from all of them from the first step on, and clients of
object stores do not survive the fork of worker processes.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bridle.console import counting
from bridle.data.listing.manifest import MANIFESTS, manifest_rows, path_of
from bridle.data.listing.table_on_disk import cache_home
from bridle.data.shards.scan import SHARDS
from bridle.errors import DataError, UsageError, first_line, needs, quoted
from bridle.files import locked, replacing, sha256_of_json, stamp, write_json

HUB = re.compile(r"hf://datasets/([^/:@]+(?:/[^/:@]+)?)(?::([^/]+))?/?")
BESIDE = (".parquet", ".md", ".json", ".yaml", ".txt")  # files in a folder of Parquet files
BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hub"}  # by protocol
COPIES = 8  # files copied at the same time


def local_path(address: str | os.PathLike[str]) -> Path:
    """The file, folder or pattern of this machine that an address stands for, after copying what is elsewhere."""
    text = os.fspath(address)
    if "://" not in text:
        path = Path(text)
        return prepared(str(path.absolute())) if path.is_dir() and holds_parquet(path) else path
    if (named := HUB.fullmatch(text)) is not None:
        return prepared(*named.groups())
    if text.lower().endswith(MANIFESTS):
        return local_manifest(text, None)[0]
    if "{" in text:
        above, names = split_pattern(text)
        return copied(above, only=expanded(names)) / names
    folder = copied(text)
    return prepared(str(folder)) if folder.is_dir() and holds_parquet(folder) else folder


def local_manifest(manifest: str, root: str | None) -> tuple[Path, Path | None]:
    """A manifest and the folder its paths start at (None: its own); the files that it names are copied where needed."""
    file, base = Path(manifest), root
    if "://" in manifest:
        folder, _, name = manifest.rpartition("/")
        file, base = copied(folder, only=(name, "classes.txt")) / name, root or folder
    if base is None or "://" not in base or not file.is_file():
        return file, None if base is None else Path(base)
    names = {posixpath.normpath(path_of(values, where)) for values, where in manifest_rows(file)}
    return file, copied(base, only=names)


# --- patterns of shards -----------------------------------------------------------------------------------------------


def is_pattern(path: Path) -> bool:
    """Is it one shard, or the names of several, like train-{000..012}.tar?"""
    return path.suffix.lower() in SHARDS and (path.is_file() or ("{" in str(path) and not path.exists()))


def shard_paths(pattern: Path) -> tuple[Path, list[Path]]:
    """The files that a pattern names, and the folder above its first brace; UsageError if one does not exist."""
    folder, names = split_pattern(pattern.as_posix())
    root = Path(folder or ("/" if pattern.is_absolute() else "."))
    paths = [root / name for name in expanded(names)]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise UsageError(f"{quoted(missing)} does not exist; check the pattern {quoted(pattern)}.")
    return root, paths


def split_pattern(text: str) -> tuple[str, str]:
    """The folder above the first brace, and the rest."""
    above = text.partition("{")[0].rpartition("/")[0]
    return above, text[len(above) :].lstrip("/")


def expanded(pattern: str) -> list[str]:
    """Every name that a pattern stands for: {000..012} counts, {a,b} lists."""
    texts, choices = [], []
    end = 0
    for found in BRACES.finditer(pattern):
        texts.append(pattern[end : found.start()])
        first, last, listed = found.groups()
        counted = [] if first is None else range(int(first), int(last) + 1)
        choices.append([f"{n:0{len(first)}d}" for n in counted] if listed is None else listed.split(","))
        end = found.end()
    return ["".join(map("".join, zip(texts, one, strict=True))) + pattern[end:] for one in product(*choices)]


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def holds_parquet(folder: Path) -> bool:
    """Does a folder hold Parquet files, itself or one level below, and nothing else that could be data?"""
    found = False
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        parquet = any(entry.glob("*.parquet")) if entry.is_dir() else entry.suffix == ".parquet"
        if not parquet and (entry.is_dir() or entry.suffix not in BESIDE):
            return False
        found = found or parquet
    return found


def prepared(name: str, config: str | None = None) -> Path:
    """The folder of Arrow files that `datasets.load_dataset` makes of a name on the hub or of a folder."""
    with needs("datasets"):
        import datasets
    try:
        splits = datasets.load_dataset(name, config)
    except Exception as error:  # of the network, of Parquet files, or of its own checks
        told = f"{quoted(name)} cannot be loaded by datasets: {quoted(error)}"
        raise DataError(f"{told} Check the name; hf://datasets/NAME:CONFIG chooses one of several.") from error
    files = [Path(file["filename"]) for split in splits.values() for file in split.cache_files]
    if not files:
        raise DataError(f"{quoted(name)} has no rows.")
    return files[0].parent


# --- other file systems -----------------------------------------------------------------------------------------------


def copied(address: str, *, only: Collection[str] | None = None) -> Path:
    """Copy a file, or the files below a folder, to the cache unless the same are there; returns the local path.

    `only` names some of them relative to the folder. Files that vanished at the address are removed from the cache.
    """
    system, path = open_address(address)
    if "file" in ((system.protocol,) if isinstance(system.protocol, str) else system.protocol):
        return Path(path)
    there = remote_files(address, system, path)
    wanted = {name: facts for name, facts in there.items() if only is None or name in only}
    place = copy_place(address)
    place.parent.mkdir(parents=True, exist_ok=True)
    state_file = place.with_name(f".{place.name}.json")
    with locked(place.with_name(f".{place.name}.lock")):  # other processes wait, then find everything copied
        state = read_state(state_file)
        for name in [name for name in state if name not in there and (only is None or name in only)]:
            (place / name).unlink(missing_ok=True)
            del state[name]
        new = [name for name, facts in wanted.items()
               if state.get(name) != facts.key or not facts.has_size_of(place / name)]  # fmt: skip

        def copy(name: str) -> str:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            with replacing(place / name) as part:
                try:
                    system.get_file(wanted[name].path, str(part))
                    if not wanted[name].has_size_of(part):
                        raise OSError(f"only {stamp(part)[0]} of {wanted[name].size} bytes came")
                except Exception as error:  # of whatever client the file system has
                    told = f"{quoted(address)}: {quoted(name)} cannot be copied to {quoted(place)}: "
                    raise DataError(f"{told}{type(error).__name__}: {first_line(error)}.") from error
            return name

        try:
            with counting("copied", "files") as tell, ThreadPoolExecutor(COPIES) as pool:
                for done, name in enumerate(pool.map(copy, new), start=1):
                    state[name] = wanted[name].key
                    tell(done, len(new))
        finally:
            if new:
                write_json(state_file, state)
    return place


class RemoteFile(NamedTuple):
    """A file of another file system."""

    path: str
    size: int | None
    key: str  # changes with the file

    def has_size_of(self, path: Path) -> bool:
        """Is a local file there, and as long where that is known?"""
        there = stamp(path)[0]
        return there >= 0 if self.size is None else there == self.size


def open_address(address: str) -> tuple[Any, str]:
    """File system and path of an address."""
    try:
        import fsspec

        system, path = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:  # no such protocol, or its package is missing
        extra = EXTRAS.get(address.partition("://")[0]) if isinstance(error, ImportError) else None
        hint = f' Its client comes with `pip install "bridle[{extra}]"`.' if extra else ""
        raise UsageError(f"{quoted(address)} cannot be opened: {first_line(error)}.{hint}") from error
    return system, str(path)


def remote_files(address: str, system: Any, path: str) -> dict[str, RemoteFile]:
    """The files at an address by their name relative to it; a single file is called ""."""
    try:
        found: Mapping[str, Mapping[str, Any]] = system.find(path, detail=True)
    except Exception as error:  # of whatever client the file system has
        told = f"{quoted(address)} cannot be listed: {type(error).__name__}: {first_line(error)}"
        raise DataError(f"{told}. Check the address and your credentials.") from error
    if not found:
        raise UsageError(f"{quoted(address)} holds no files; check the address.")
    files = {}
    for full, facts in found.items():
        name = "" if full == path else full[len(path.rstrip("/")) :].lstrip("/")
        if ".." not in name.split("/"):  # an object may be called anything, but is not written outside the cache
            key = sha256_of_json(sorted((word, str(value)) for word, value in facts.items()))
            files[name] = RemoteFile(full, facts.get("size"), key)
    return files


def copy_place(address: str) -> Path:
    """Where copies of an address lie: under its own name in the cache."""
    parts = [re.sub(r"[^\w.@=+-]", "_", part) for part in re.split(r"[:/]+", address) if part.strip(".")]
    return cache_home() / "files" / Path(*parts)


def read_state(file: Path) -> dict[str, str]:
    """By name, the state at the address of what was copied."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # copy again
        return {}
    return state if isinstance(state, dict) else {}
