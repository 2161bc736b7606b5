"""Names of data: two sources of one name hold the same items, files that changed have another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridle import distributed
from bridle.data.arrays.memory import TensorSource
from bridle.data.file_source import FileSource
from bridle.data.shards.tar_member import TarMember
from bridle.data.sources import Source, Splits
from bridle.data.subset import Subset
from bridle.files import stamp


def content_digest(parts: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 of arrays with their names, types and shapes."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = np.ascontiguousarray(parts[name])
        digest.update(f"{name} {part.dtype.str} {part.shape}\n".encode())
        digest.update(part.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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
    while isinstance(source, Subset):
        chosen, source = source.indices, source.source
        indices = [chosen[i] for i in indices]
    digest.update(json.dumps([type(source).__name__, labels if labels is None else list(labels)]).encode())
    if isinstance(source, TensorSource):
        digest.update(content_digest({"x": source.x[indices].numpy()}).encode())
        return digest.hexdigest()
    if not isinstance(source, FileSource):  # somebody's Dataset
        return None
    stamps: dict[Path, tuple[int, int]] = {}
    for i in indices:
        location = source.paths[i]
        file = location.shard if isinstance(location, TarMember) else location
        if file not in stamps:
            stamps[file] = stamp(file)
        digest.update(f"{location!r} {None if source.spans is None else source.spans[i]} {stamps[file]}\n".encode())
    return digest.hexdigest()
