"""Checkpoints: safetensors and JSON, published rather than written, checked before they are trusted.

temporary folder -> tensors -> fsync -> manifest with SHA-256 -> rename -> read back -> move `latest` -> rotate. What
has no matching manifest does not count as a checkpoint. `latest` is for people; the newest that is whole is loaded.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bridle import failpoints, files
from bridle.errors import CheckpointError, NonFiniteError, quoted

MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
EXPORTED = "config.json"  # the state of an exported folder, which is read like a checkpoint
FORMAT = 1
SPARE = 1_000_000  # bytes beside the tensors


class CheckpointName(NamedTuple):
    """A checkpoint's folder name: pNNNN-iterR-PHASE-STEP[-end]. Names sort in the order in which they are made."""

    phase_index: int
    iteration: int
    phase: str
    step: int
    is_end: bool  # of the phase

    def __str__(self) -> str:
        end = "-end" if self.is_end else ""
        return f"p{self.phase_index:04}-iter{self.iteration}-{self.phase}-{self.step:08}{end}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """The parts of a name; None if it is not the name of a checkpoint."""
        found = re.fullmatch(r"p(\d+)-iter(\d+)-([a-z]+)-(\d{8})(-end)?", text)
        return found and cls(int(found[1]), int(found[2]), found[3], int(found[4]), found[5] is not None)

    @classmethod
    def of(cls, path: Path) -> CheckpointName:
        """The parts of the name of a checkpoint's folder."""
        found = cls.parse(path.name)
        assert found is not None, path
        return found


def is_count(value: object) -> bool:
    """0, 1, 2, …; True and False are numbers to Python alone."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# Checks of the values of a state; those without one are for people.
KINDS: dict[str, Callable[[Any], bool]] = {
    "iteration": is_count,
    "phase_index": is_count,
    "phase": lambda value: isinstance(value, str),
    "finished": lambda value: isinstance(value, bool),
    "progress": lambda value: isinstance(value, dict) and all(map(is_count, value.values())),
    "made_with": lambda value: isinstance(value, dict),
    "parts": lambda value: value is None or isinstance(value, list),
    "norms_start": lambda value: isinstance(value, list) and all(isinstance(row, list) for row in value),
}


class Loaded(NamedTuple):
    """A checkpoint as read back: tensors by file stem, the JSON state, and its folder."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path

    def group(self, stem: str) -> dict[str, Tensor]:
        """The tensors of one file."""
        if stem not in self.tensors:
            raise CheckpointError(f"{self.path}: its manifest names no {stem}.safetensors; get the folder again.")
        return self.tensors[stem]


class State(dict[str, Any]):
    """The JSON state of a checkpoint; CheckpointError where a key is missing or of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        super().__init__(values)
        self.file = file
        for key, is_right in KINDS.items():
            if key in values and not is_right(values[key]):
                got = quoted(values[key])
                raise CheckpointError(f"{file}: damaged or made by other software (its {key!r} is {got}).")

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.file}: damaged or made by other software (it does not say {key!r}).")


def publish(
    root: Path,
    name: str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    keep_finished: bool = False,
) -> Path:
    """Save a checkpoint under `root/name`. Older ones inside phases beyond `keep` are removed afterwards, and all those
    inside finished phases unless `keep_finished`.
    """
    _refuse_non_finite(name, tensors)
    needed = size_of(tensors) + SPARE
    final = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        files.require_space(root, needed, what="a checkpoint")
        with files.replacing_folder(final) as temporary:
            write_folder(temporary, tensors, state)
        if (damage := find_damage(final)) is not None:
            raise CheckpointError(f"{damage} It was written just now: do not trust this disk. Nothing was removed.")
        failpoints.hit("checkpoint.before_latest")
        files.write_json(root / LATEST, {"checkpoint": name})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{final}: the checkpoint could not be written ({getattr(error, 'strerror', None) or error}); needed "
            f"{needed:,} bytes, free {files.free_bytes(root):,} bytes. Earlier checkpoints are "
            "untouched; free some space and run the same command again."
        ) from error
    failpoints.hit("checkpoint.before_rotate")
    _rotate(root, name, keep, keep_finished)
    return final


def write_folder(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write all files of a checkpoint into an empty folder, the manifest last."""
    for stem, group in tensors.items():
        whole = {key: value.detach().cpu().contiguous() for key, value in group.items()}
        save_file(whole, folder / f"{stem}.safetensors")
        failpoints.hit("checkpoint.half_written")
    files.write_json(folder / STATE, {"format": FORMAT, **state})
    failpoints.hit("checkpoint.before_manifest")
    listed = {path.name: files.fingerprint(path) for path in sorted(folder.iterdir())}
    files.write_json(folder / MANIFEST, {"format": FORMAT, "files": listed})
    failpoints.hit("checkpoint.before_rename")


def load_latest(root: Path) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that is whole, and a message for each damaged one that was passed over."""
    messages: list[str] = []
    for path in reversed(checkpoint_folders(root)):
        try:
            return load(path), messages
        except CheckpointError as error:
            messages.append(f"{error} Using the previous checkpoint instead.")
    if messages:
        messages[-1] = messages[-1].replace("Using the previous checkpoint instead.", "None is left: starting anew.")
    return None, messages


def load(path: Path) -> Loaded:
    """Read one checkpoint after checking every file against the manifest. Runs no code."""
    if (damage := find_damage(path)) is not None:
        raise CheckpointError(damage)
    listed = _manifest_files(path)
    try:
        tensors = {Path(file).stem: load_file(path / file) for file in listed if file.endswith(".safetensors")}
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged or incomplete ({error}).") from error
    file = path / (STATE if STATE in listed else EXPORTED)
    return Loaded(tensors, State(read_state_file(file), file), path)


def find_damage(path: Path, *, sizes_only: bool = False) -> str | None:
    """What is wrong with a checkpoint, as a sentence; None if every file is as the manifest says."""
    try:
        for file, wanted in _manifest_files(path).items():
            if Path(file).name != file:
                return f"{path / MANIFEST}: damaged (it names a file outside its folder)."
            if (path / file).stat().st_size != wanted["bytes"]:
                return f"{path / file}: damaged (its size is not the one in the manifest)."
            if not sizes_only and files.fingerprint(path / file) != wanted:
                return f"{path / file}: damaged (its SHA-256 is not the one in the manifest)."
    except CheckpointError as error:
        return str(error)
    except (KeyError, TypeError, OSError) as error:
        return f"{path}: damaged or incomplete ({error})."
    return None


def _manifest_files(path: Path) -> dict[str, Any]:
    manifest = read_state_file(path / MANIFEST)
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path / MANIFEST}: damaged (it lists no files).")
    return dict(manifest["files"])


def checkpoint_folders(root: Path) -> list[Path]:
    """All published checkpoints, oldest first; their names sort by phase and step."""
    named = (path for path in root.glob("p*") if CheckpointName.parse(path.name) is not None)
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())  # a link leads to another run


def write_json(path: Path, value: object) -> None:
    """Write a JSON file of a run, whole or not at all."""
    with files.writing(path):
        failpoints.hit("results.write")
        files.write_json(path, value)


def read_state_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; CheckpointError if it is damaged or of another format."""
    value = files.read_json(path, remedy="it is damaged or incomplete")
    if value.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a bridle checkpoint file of format {FORMAT}.")
    return value


def _refuse_non_finite(name: str, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    for stem, group in tensors.items():
        for key, value in group.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise NonFiniteError(f"checkpoint {name} not saved: {stem}.{key} holds values that are not finite.")


def size_of(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Bytes of all tensors."""
    return sum(value.numel() * value.element_size() for group in tensors.values() for value in group.values())


def require_space_for_run(root: Path, *, model: int, ends: int, keep: int) -> None:
    """Before the first step: room for the checkpoints of a whole run, less what is already there.

    A checkpoint inside a phase holds the weights and AdamW's two averages of them: `keep` of these stay, one more is
    being written, and the end of every phase stays without averages. The tokenizer of later iterations is not counted.
    """
    there = sum(file.stat().st_size for path in checkpoint_folders(root) for file in path.iterdir())
    files.require_space(
        root, max(0, (keep + 1) * 3 * model + ends * model + SPARE - there), what="this run's checkpoints"
    )


def _rotate(root: Path, newest: str, keep: int, keep_finished: bool) -> None:
    """Remove old checkpoints inside phases; ends of phases and the newest stay.

    A damaged one counts neither as kept nor as the end of a phase, so that the last good ones stay.
    """
    whole = [path for path in checkpoint_folders(root) if find_damage(path, sizes_only=True) is None]
    names = {path: CheckpointName.of(path) for path in whole}
    # A finished phase needs no steps from inside it any more to go on.
    finished = set[int]() if keep_finished else {name.phase_index for name in names.values() if name.is_end}
    inside = [path for path, name in names.items() if not name.is_end and path.name != newest]
    room = keep if newest.endswith("-end") else keep - 1
    for position, path in enumerate(reversed(inside)):
        if position >= room or names[path].phase_index in finished:
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed now is looked at again next time
            failpoints.hit("checkpoint.inside_rotate")
