"""`bridle index`: features and codes of a collection, kept up to date as files come, change and go.

    DIR/index.json                   the model, how features are pooled, which segments and which generation count
    DIR/segment-0000/                list.jsonl, features.npz, codes.npz: what one command added, as `bridle embed` and
                                     `bridle tokenize` write it
    DIR/generation-0000/             items.jsonl, vectors.npy, mean.npy and the arrays of `grams`: what a search reads,
                                     made from all segments

A model without a tokenizer leaves out the codes. A command embeds only files it has not seen, or that changed; an
interrupted one goes on where it stopped. A search reads the old generation until index.json names the new one.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bridle.console import ProgressLine
from bridle.errors import DataError, UsageError, quoted
from bridle.files import locked_folder, write_json
from bridle.infer.inputs import Inputs, Items, find_inputs
from bridle.infer.model import Model, Pooling
from bridle.infer.read import read_codes, read_features
from bridle.infer.write import Options, embed_inputs, tokenize_inputs
from bridle.search.corpus import Entry, find_labels, read_entries, write_entries
from bridle.search.ngrams import STAGES, Grams, Lines, Terms, terms_of, weigh

FORMAT = 1
INDEX, LIST, FEATURES, CODES = "index.json", "list.jsonl", "features.npz", "codes.npz"
ITEMS, VECTORS, MEAN = "items.jsonl", "vectors.npy", "mean.npy"
NAME = re.compile(r"(segment|generation)-\d{4,9}")


class Indexed(NamedTuple):
    """What `bridle index` did."""

    out: Path
    files: int  # that can be found
    added: int
    removed: int  # no longer in the collection, or changed since
    failed: tuple[Path, ...]  # lists of files that could not be read


class Place(NamedTuple):
    """Where an item's features and codes are."""

    segment: Path
    entry: Entry


Wanted = dict[str, Entry]  # the items of a collection as it is now, by name


def update_index(
    model: Model,
    run: str | Path,
    named: Sequence[str],
    out: Path,
    *,
    pool: Pooling | None = None,
    axis: int | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
) -> Indexed:
    """Make the index of a collection, or bring it up to date; without `pool` as the run's probe pools."""
    progress = progress or ProgressLine()
    kept: Pooling = pool or ("axis" if model.config.probe.pool == "axis" else "mean")
    settings = {"format": FORMAT, "model": model.fingerprint, "pool": kept, "axis": axis}
    _require_place(out)
    out.mkdir(parents=True, exist_ok=True)
    with locked_folder(out):
        if options.overwrite:
            _clear(out)
        index: dict[str, Any] = {**settings, "segments": [], "generation": None}
        if (out / INDEX).is_file():
            index = read_index(out)
        _require_same(out, index, settings)
        inputs = find_inputs(named, reader=model.reader, stdin=io.BytesIO())
        labels = find_labels(named, reader=model.reader)
        for note in (*inputs.notes, *labels.notes):
            progress.note(note)
        wanted = {item.name: Entry(item, item.stamp(), labels.of(item)) for item in inputs.items}
        while fresh := _not_seen(out, index, wanted):
            name = f"segment-{len(index['segments']):04}"
            _fill_segment(model, out / name, fresh, kept, axis, options._replace(overwrite=False), progress)
            index = {**index, "segments": [*index["segments"], name]}
            write_json(out / INDEX, index)
        # Relative names are seen from this folder, wherever a search is started.
        origin = {"run": _run_name(run), "base": os.getcwd(), "codes": model.own_tokenizer is not None}
        return _publish(model, out, {**index, **origin}, wanted)


def _run_name(run: str | Path) -> str:
    """The run as a later search finds it, from whatever folder that is started in."""
    return os.path.abspath(run) if Path(run).exists() else str(run)  # a released model has only a name


def read_index(folder: Path) -> dict[str, Any]:
    """index.json, checked."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{quoted(folder)} is not an index (no {INDEX}); make one with `bridle index RUN CORPUS`.")
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] > FORMAT:
            raise DataError(f"{quoted(folder)} has format {index['format']}, this bridle reads up to {FORMAT}.")
        used = [*index["segments"], *([] if index["generation"] is None else [index["generation"]])]
        if not all(_is_ours(name) for name in used):
            raise ValueError("a name leads out of the folder")
        if index["generation"] is not None and (missing := {"run", "pool", "axis", "model"} - index.keys()):
            raise ValueError(f"no {sorted(missing)[0]}")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{quoted(folder / INDEX)} is damaged ({type(error).__name__}: {quoted(error)}); give --overwrite to "
            "`bridle index` to make it anew."
        ) from error
    return index


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def _require_place(out: Path) -> None:
    """An index is never mixed with a folder of something else."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {quoted(out)} is a file; give a folder for the index.")
    ours = ("segment-", "generation-", INDEX, "run.lock", ".")
    if out.is_dir() and any(not path.name.startswith(ours) for path in out.iterdir()):
        raise UsageError(f"--out {quoted(out)} holds other files; give a new folder for the index.")


def _require_same(out: Path, index: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    changed = [key for key in settings if index.get(key) != settings[key]]
    if changed:
        raise UsageError(
            f"{quoted(out)} was made with another {', '.join(changed)}; give --overwrite to make it anew, or another "
            "--out."
        )


def _clear(out: Path) -> None:
    (out / INDEX).unlink(missing_ok=True)
    for path in (*out.glob("segment-*"), *out.glob("generation-*")):
        shutil.rmtree(path)


def _not_seen(out: Path, index: Mapping[str, Any], wanted: Wanted) -> Wanted:
    """The items that no segment was asked for, as they are now."""
    seen = {entry.name: entry.stamp for name in index["segments"] for entry in read_entries(out / name / LIST)}
    return {name: entry for name, entry in wanted.items() if seen.get(name) != entry.stamp}


def _fill_segment(
    model: Model,
    folder: Path,
    fresh: Wanted,
    pool: Pooling,
    axis: int | None,
    options: Options,
    progress: ProgressLine,
) -> None:
    """Features and codes of the fresh items; a segment that an earlier command began is finished as it was."""
    begun = list(read_entries(folder / LIST)) if (folder / LIST).is_file() else None
    if begun is None or any(entry.name not in fresh or fresh[entry.name].stamp != entry.stamp for entry in begun):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = list(fresh.values())
        write_entries(folder / LIST, begun)
    inputs = Inputs(Items(entry.item for entry in begun))
    features, codes = folder / FEATURES, folder / CODES
    try:
        if not features.exists():
            progress.note(f"features of {len(begun):,} files")
            embed_inputs(model, inputs, features, pool=pool, axis=axis, options=options, progress=progress)
        if not codes.exists() and model.own_tokenizer is not None:
            progress.note(f"codes of {len(begun):,} files")
            tokenize_inputs(model, inputs, codes, options=options, progress=progress)
    except DataError:
        # None of them can be read: that must not stand in the way of those that an earlier command indexed.
        if options.strict or folder.name == "segment-0000" or not _quarantines(folder):
            raise


def _quarantines(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.quarantine.jsonl"))


def _publish(model: Model, out: Path, index: dict[str, Any], wanted: Wanted) -> Indexed:
    """A new generation of what all segments hold of the collection as it is now."""
    before = {(entry.name, entry.stamp) for entry in _entries_before(out, index)}
    places = list(_living(out, index, wanted))
    now = {(place.entry.name, place.entry.stamp) for place in places}
    if not places:
        raise DataError(f"{quoted(out)}: no file of the collection can be read; see the quarantine lists in it.")
    name = _next_generation(index)
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).mkdir()
    write_entries(out / name / ITEMS, (place.entry for place in places))
    _write_vectors(out / name, places)
    if index["codes"]:
        _write_grams(out / name, weigh(_terms(model, places)))
    write_json(out / INDEX, {**index, "generation": name, "files": len(places)})
    for path in out.glob("generation-*"):
        if path.name != name:
            shutil.rmtree(path)
    failed = tuple(q for segment in index["segments"] for q in _quarantines(out / segment)[:1])
    return Indexed(out, len(places), len(now - before), len(before - now), failed)


def _next_generation(index: Mapping[str, Any]) -> str:
    last = index["generation"]
    return "generation-0000" if last is None else f"generation-{int(last.rpartition('-')[2]) + 1:04}"


def _entries_before(out: Path, index: Mapping[str, Any]) -> list[Entry]:
    return [] if index["generation"] is None else list(read_entries(out / index["generation"] / ITEMS))


def _living(out: Path, index: Mapping[str, Any], wanted: Wanted) -> Iterator[Place]:
    """Items of the collection that have features and codes, segment by segment, in the segments' order."""
    for name in index["segments"]:
        folder = out / name
        if not (folder / FEATURES).exists() or (index["codes"] and not (folder / CODES).exists()):
            continue  # none of its items could be read
        readable = set(read_features(folder / FEATURES).files)
        if index["codes"]:
            readable &= set(read_codes(folder / CODES).files)
        for entry in read_entries(folder / LIST):
            now = wanted.get(entry.name)
            if now is not None and now.stamp == entry.stamp and entry.name in readable:
                yield Place(folder, now)  # its labels are those of today


def _write_vectors(folder: Path, places: Sequence[Place]) -> None:
    """vectors.npy (N, D): pooled features less their mean, scaled to length one; mean.npy (D,)."""
    total: NDArray[np.float64] | None = None
    for z in _features(places):
        total = z.astype(np.float64) if total is None else total + z
    assert total is not None  # there is at least one place
    mean = (total / len(places)).astype(np.float32)
    np.save(folder / MEAN, mean)
    vectors = np.lib.format.open_memmap(folder / VECTORS, mode="w+", dtype=np.float32, shape=(len(places), len(mean)))
    for n, z in enumerate(_features(places)):
        vectors[n] = unit(z - mean)
    vectors.flush()


def unit(z: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scaled to length one; what has no length stays as it is."""
    return (z / max(float(np.linalg.norm(z)), 1e-12)).astype(np.float32)


def _features(places: Sequence[Place]) -> Iterator[NDArray[np.float32]]:
    for folder, names in _by_segment(places):
        for name, found in read_features(folder / FEATURES):
            if name in names:
                yield found.z


def _terms(model: Model, places: Sequence[Place]) -> Iterator[Terms]:
    lines = lines_of(model)
    for folder, names in _by_segment(places):
        for name, found in read_codes(folder / CODES):
            if name in names:
                yield terms_of(found.codes, found.positions, lines)


def lines_of(model: Model) -> Lines:
    """Where n-grams of this model's codes run: along time, or along the rows of a picture."""
    axis = 0 if model.reader.timed else model.geometry.rank - 1
    return Lines(model.geometry.grid, axis, tuple(model.config.quantizer.sizes[:STAGES]))


def _by_segment(places: Sequence[Place]) -> Iterator[tuple[Path, set[str]]]:
    for folder, group in itertools.groupby(places, key=lambda place: place.segment):
        yield folder, {place.entry.name for place in group}


def _write_grams(folder: Path, grams: Grams) -> None:
    for name, values in grams._asdict().items():
        np.save(folder / f"{name}.npy", values)
