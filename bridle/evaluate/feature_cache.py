"""Features kept on disk, so that a second evaluation of the same model on the same data reads no item again.

RUN/cache/KEY.safetensors holds x, y and valid of one set of items. KEY names everything the numbers depend on: the
weights, what makes features of them, and the data, by path, size and time of change of every file (or the numbers
themselves, where they are in memory). A changed file, other weights or another pooling has another key. A file begins
with a SHA-256 of its content; one that does not match is reported and computed again. The folder may be deleted.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from bridle import distributed
from bridle.data.digests import content_digest
from bridle.evaluate.features import NO_FEATURES, Features
from bridle.files import replacing, sha256_of_json

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
                stored = (file.metadata() or {}).get("sha256")
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if stored == content_digest(parts) and {"x", "y"} <= set(parts):
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            with replacing(path, unique=True) as temporary:
                save_file(parts, temporary, metadata={"sha256": content_digest(parts)})
        except (OSError, SafetensorError) as error:
            self.tell(f"{self.folder}: features cannot be kept ({getattr(error, 'strerror', None) or error}).")

    def _make_room(self, size: int) -> None:
        for stale in self.folder.glob(f".*{SUFFIX}.*.tmp"):
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
    return sha256_of_json({**versions, **what})[:32]


def weights_digest(network: nn.Module) -> str:
    """SHA-256 of everything a network has learned."""
    return content_digest({name: value.detach().cpu().numpy() for name, value in network.state_dict().items()})
