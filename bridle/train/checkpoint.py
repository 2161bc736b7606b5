"""Checkpoints: safetensors and JSON, published rather than written, checked before they are trusted.

temporary folder -> tensors -> fsync -> manifest with SHA-256 -> rename -> move `latest` -> rotate. A folder without a
matching manifest does not count as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridle.errors import CheckpointError, NonFiniteError

MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
FORMAT = 1


class Loaded(NamedTuple):
    """A checkpoint as read back: tensors by file stem, the JSON state, and its folder."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


def publish(
    root: Path, name: str, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, keep: int
) -> Path:
    """Save a checkpoint under `root/name`; older ones inside a phase beyond `keep` are removed afterwards."""
    _refuse_non_finite(name, tensors)
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    _require_space(root, tensors)
    temporary, final = root / f".tmp-{name}", root / name
    try:
        temporary.mkdir()
        for stem, group in tensors.items():
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in group.items()},
                temporary / f"{stem}.safetensors",
            )
        write_json(temporary / STATE, {"format": FORMAT, **state})
        files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / MANIFEST, {"format": FORMAT, "files": files})
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(root)
        write_json(root / LATEST, {"checkpoint": name})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: the checkpoint could not be written ({getattr(error, 'strerror', None) or error}); needed "
            f"{_bytes(tensors):,} bytes, free {shutil.disk_usage(root).free:,}. Earlier checkpoints are untouched."
        ) from error
    _rotate(root, name, keep)
    return final


def load_latest(root: Path) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that is whole, and a message for each damaged one that was passed over."""
    messages: list[str] = []
    for path in reversed(checkpoint_folders(root)):
        try:
            return load(path), messages
        except CheckpointError as error:
            messages.append(f"{error} Using the previous checkpoint instead.")
    return None, messages


def load(path: Path) -> Loaded:
    """Read one checkpoint after checking every file against the manifest. Runs no code."""
    manifest = _read_json(path / MANIFEST)
    try:
        files = dict(manifest["files"])
        for file, wanted in files.items():
            if Path(file).name != file or _fingerprint(path / file) != wanted:
                raise CheckpointError(f"{path / file}: damaged (its SHA-256 is not the one in the manifest).")
        tensors = {Path(file).stem: load_file(path / file) for file in files if file.endswith(".safetensors")}
    except (KeyError, TypeError, AttributeError, ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged or incomplete ({error}).") from error
    return Loaded(tensors, _read_json(path / STATE), path)


def checkpoint_folders(root: Path) -> list[Path]:
    """All published checkpoints, oldest first; their names sort by phase and step."""
    return sorted(path for path in root.glob("*") if path.is_dir() and not path.name.startswith("."))


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old content or the new, never half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a bridle checkpoint file of format {FORMAT}.")
    return value


def _refuse_non_finite(name: str, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    for stem, group in tensors.items():
        for key, value in group.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise NonFiniteError(f"checkpoint {name} not saved: {stem}.{key} holds values that are not finite.")


def _bytes(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    return sum(value.numel() * value.element_size() for group in tensors.values() for value in group.values())


def _require_space(root: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    needed, free = _bytes(tensors) + 1_000_000, shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"{root}: not enough space for a checkpoint: needed {needed:,} bytes, free {free:,} bytes. "
            "Earlier checkpoints are untouched; free some space and run the same command again."
        )


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rotate(root: Path, newest: str, keep: int) -> None:
    """Remove old checkpoints inside phases; ends of phases (names ending in -end) and the newest stay."""
    inside = [path for path in checkpoint_folders(root) if not path.name.endswith("-end") and path.name != newest]
    room = keep if newest.endswith("-end") else keep - 1
    # A finished phase needs no steps from inside it any more.
    finished = {path.name.rsplit("-", 2)[0] for path in checkpoint_folders(root) if path.name.endswith("-end")}
    for position, path in enumerate(reversed(inside)):
        if position >= room or path.name.rsplit("-", 1)[0] in finished:
            shutil.rmtree(path)
