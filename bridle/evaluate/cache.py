"""Features kept on disk, so that a second evaluation of the same model on the same data reads no item again.

RUN/cache/KEY.safetensors holds x, y and valid of one set of items. KEY names everything the numbers depend on: the
weights, what makes features of them, and the data, by path, size and time of change of every file (or the numbers
themselves, where they are in memory). A changed file, other weights or another pooling has another key. A file begins
with a SHA-256 of its content; one that does not fit is told, and computed again. The folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from bridle import distributed
from bridle.data.memory import TensorSource
from bridle.data.part import Part
from bridle.data.sources import Source, Splits
from bridle.evaluate.features import NO_FEATURES, Array, Features

FORMAT = 1
SUFFIX = ".safetensors"
HEADER = 1024  # bytes of a file beside its numbers, at most
STALE_SECONDS = 3600.0  # after which a half-written file was left by a process that is gone


class FeatureCache:
    """A folder of features, of at most `limit` bytes: what was used longest ago goes first."""

    def __init__(self, folder: Path, *, limit: int, tell: Callable[[str], None]) -> None:
        self.folder, self.limit, self.tell = folder, limit, tell

    def get(self, key: str, make: Callable[[], Features]) -> Features:
        """The features under `key`, as they were kept or made now."""
        path = self.folder / f"{key}{SUFFIX}"
        found: list[Features | None] = []

        def look() -> bool:
            found.append(self._read(path))
            return found[0] is not None

        if distributed.done_once(look):  # rank 0 reads for all: the others' features are empty anyway
            return (found[0] if found else None) or NO_FEATURES
        made = make()
        if distributed.rank() == 0:
            self._keep(path, made)
        return made

    def _read(self, path: Path) -> Features | None:
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="np") as file:
                told = (file.metadata() or {}).get("sha256")
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if told == content_digest(parts) and {"x", "y"} <= set(parts):
                with contextlib.suppress(OSError):  # somebody else's file: it can be read all the same
                    os.utime(path)  # used now
                return Features(parts["x"], parts["y"], parts.get("valid"))
            reason = "its SHA-256 is not the one it was written with"
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            reason = str(error)
        self.tell(f"{path}: damaged ({reason}); its features are computed again.")
        return None

    def _keep(self, path: Path, made: Features) -> None:
        """Publish by renaming; what cannot be kept costs time later and nothing else."""
        parts = {name: np.ascontiguousarray(part) for name, part in made._asdict().items() if part is not None}
        size = HEADER + sum(part.nbytes for part in parts.values())
        if size > self.limit:
            self.tell(f"features of {size / 2**20:,.0f} MB are not kept: more than probe.cache_mb; raise it if wanted.")
            return
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            save_file(parts, temporary, metadata={"sha256": content_digest(parts)})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):  # nothing to take away, or the disk is gone altogether
                temporary.unlink(missing_ok=True)
            self.tell(f"{self.folder}: features cannot be kept ({getattr(error, 'strerror', None) or error}).")

    def _make_room(self, size: int) -> None:
        for stale in self.folder.glob(f".tmp-*{SUFFIX}"):
            if time.time() - stale.stat().st_mtime > STALE_SECONDS:
                stale.unlink(missing_ok=True)
        kept = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob(f"[!.]*{SUFFIX}"))
        total = size + sum(own for _, own, _ in kept)
        for _, own, path in kept:
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= own


def make_key(what: Mapping[str, Any]) -> str:
    """Names features by all they depend on, the versions that computed them among it."""
    versions = {"format": FORMAT, "torch": torch.__version__, "bridle": importlib.metadata.version("bridle")}
    return hashlib.sha256(json.dumps({**versions, **what}, sort_keys=True).encode()).hexdigest()[:32]


def content_digest(parts: Mapping[str, Array]) -> str:
    """SHA-256 of arrays with their names, types and shapes."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = np.ascontiguousarray(parts[name])
        digest.update(f"{name} {part.dtype.str} {part.shape}\n".encode())
        digest.update(part.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def weights_digest(network: nn.Module) -> str:
    """SHA-256 of everything a network has learned."""
    return content_digest({name: value.detach().cpu().numpy() for name, value in network.state_dict().items()})


def splits_digest(splits: Splits) -> str | None:
    """Names a whole data set as it is now, folds too; None where some of it has no name (collective: rank 0 looks)."""

    def look() -> str | None:
        parts = [data_digest(source) for source in (splits.train, splits.test) if source is not None]
        if None in parts:
            return None
        folds = None if splits.folds is None else list(splits.folds)
        return hashlib.sha256(json.dumps([parts, folds]).encode()).hexdigest()[:32]

    return distributed.done_once(look)


def data_digest(source: Source) -> str | None:
    """Names the items of a source, their content and their labels; None where that takes reading them."""
    digest, indices = hashlib.sha256(), list(range(len(source)))
    labels = source.labels
    while isinstance(source, Part):
        kept, source = source.kept, source.source
        indices = [kept[i] for i in indices]
    digest.update(json.dumps([type(source).__name__, labels if labels is None else list(labels)]).encode())
    if isinstance(source, TensorSource):
        digest.update(content_digest({"x": source.x[indices].numpy()}).encode())
        return digest.hexdigest()
    places: Sequence[object] | None = getattr(source, "paths", None)
    if places is None:  # somebody's Dataset
        return None
    spans: Sequence[object] | None = getattr(source, "spans", None)
    stamps: dict[Path, str] = {}
    for i in indices:
        file = _file_of(places[i])
        if file is None:
            return None
        if file not in stamps:
            stamps[file] = _stamp(file)
        digest.update(f"{places[i]!r} {None if spans is None else spans[i]} {stamps[file]}\n".encode())
    return digest.hexdigest()


def _file_of(place: object) -> Path | None:
    """The file that holds an item: itself, or the shard it lies in."""
    file = place if isinstance(place, Path) else getattr(place, "shard", None)
    return file if isinstance(file, Path) else None


def _stamp(file: Path) -> str:
    """Size and time of change; a file that is not there is told by whoever reads it."""
    try:
        found = file.stat()
    except OSError:
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"
