"""`bridle index`: features and codes of a collection, kept up to date as files come, change and go.

    DIR/index.json            the model, which features, which segments and which generation count
    DIR/segment-0000/         items.jsonl, features.npz, codes.npz: what one command added, as `bridle embed` and
                              `bridle tokenize` write it
    DIR/generation-0000/      items.jsonl, vectors.npy, mean.npy and the arrays of `ngrams`: what a search reads,
                              made from all segments

A model without a tokenizer leaves out the codes. A command computes only files that are new or changed; an interrupted
one goes on where it stopped. A search reads the old generation until index.json names the new one.
"""

from __future__ import annotations

import filecmp
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, field_validator

from bridle.console import ProgressLine
from bridle.data.listing.address import local_path
from bridle.data.listing.columns import WHOLE, Span
from bridle.data.listing.items import Inputs, Item, Items, find_inputs
from bridle.data.listing.layouts import find_listing
from bridle.data.listing.manifest import MANIFESTS
from bridle.data.listing.table import as_tuple
from bridle.data.shards.tar_member import TarMember
from bridle.data.sources import Reader
from bridle.errors import BridleError, DataError, UsageError, quoted
from bridle.files import locked_folder, replacing, write_json
from bridle.infer.feature_spec import FeatureSpec
from bridle.infer.model import Model
from bridle.infer.read import one_line_errors, read_codes, read_features
from bridle.infer.write import Options, embed_inputs, tokenize_inputs
from bridle.search.ngrams import STAGES, Lines, Terms, terms_of, weigh

FORMAT = 1
INDEX, ITEMS, FEATURES, CODES = "index.json", "items.jsonl", "features.npz", "codes.npz"
VECTORS, MEAN = "vectors.npy", "mean.npy"
REBUILD = "give --overwrite to `bridle index` to rebuild it"
FOLDER_NAME = re.compile(r"(segment|generation)-\d{4,9}")


class IndexUpdate(NamedTuple):
    """What `bridle index` did."""

    out: Path
    files: int  # that can be found
    added: int
    removed: int  # no longer in the collection, or changed since
    failed: tuple[Path, ...]  # lists of files that could not be read


class IndexRecord(BaseModel):
    """index.json."""

    format: int = FORMAT
    model: str  # fingerprint
    features: FeatureSpec
    segments: list[str] = []
    generation: str | None = None
    run: str  # where a search finds the model
    base: str = ""  # relative paths are taken from this folder, wherever a search is started
    codes: bool = True  # does the model have a tokenizer?
    files: int = 0

    @field_validator("segments", "generation")
    @classmethod
    def _is_inside(cls, value: list[str] | str | None) -> list[str] | str | None:
        for name in value if isinstance(value, list) else [value]:
            if name is not None and FOLDER_NAME.fullmatch(name) is None:
                raise ValueError("a name leads out of the folder")
        return value

    def differences(self, other: IndexRecord) -> list[str]:
        """Names of the settings in which two indexes differ."""
        mine, theirs = ({"model": one.model, **one.features._asdict()} for one in (self, other))
        return [key for key in mine if mine[key] != theirs[key]]


class IndexedItem(NamedTuple):
    """An item as it was when it was indexed."""

    item: Item
    stamp: tuple[int, int]  # size and change time of its file
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.item.name

    def relative_to(self, base: Path) -> IndexedItem:
        """The same item with relative paths taken from `base` instead of the working directory."""
        location = self.item.location
        there = base / location if isinstance(location, Path) else location._replace(shard=base / location.shard)
        return self._replace(item=self.item._replace(location=there))

    def is_file(self, query: Path) -> bool:
        """Is the query this item, or a file with the same content?"""
        location, span = self.item
        if span != WHOLE:
            return False
        if isinstance(location, Path) and os.path.abspath(location) == os.path.abspath(query):
            return True
        size = self.stamp[0] if isinstance(location, Path) else location.size
        try:
            if size != os.stat(query).st_size:
                return False
            if isinstance(location, TarMember):
                return location.read() == query.read_bytes()
            return filecmp.cmp(location, query, shallow=False)
        except (OSError, DataError):
            return False


Labels = dict[tuple[str, Span], tuple[str, ...]]  # by absolute path and time span


def find_labels(named: Sequence[str], *, reader: Reader) -> tuple[Labels, list[str]]:
    """Labels of class folders, lists, manifests and shards, and notes for the user; files without any have none."""
    known: Labels = {}
    notes = list[str]()
    for name in named:
        path = local_path(name)
        if not path.is_dir() and not (path.is_file() and path.suffix.lower() in MANIFESTS):
            continue  # a single file, or a pattern
        try:
            listing = find_listing(path, extensions=reader.extensions)
        except BridleError as error:
            notes.append(f"no labels were found in {quoted(name)}: {error}")
            continue
        classes = listing.classes or ()
        for split in (listing.train, listing.test):
            if split is None or split.labels is None:
                continue
            spans = split.spans or (WHOLE for _ in split.labels)
            for location, label, span in zip(split.paths, split.labels, spans, strict=True):
                known[os.path.abspath(str(location)), span] = tuple(str(classes[n]) for n in as_tuple(label))
    return known, notes


def write_items(file: Path, items: Iterable[IndexedItem]) -> None:
    """Write one line per item; what is not ASCII is escaped, so that any path survives."""
    with replacing(file) as temporary, temporary.open("w", encoding="ascii") as out:
        for item, stamp, labels in items:
            location, (start, end) = item
            line: dict[str, object] = {"stamp": stamp, "labels": labels}
            if isinstance(location, TarMember):
                line |= {"path": os.fspath(location.shard), "member": location[1:]}
            else:
                line |= {"path": os.fspath(location)}
            line |= {} if item.span == WHOLE else {"start": start, "end": end}
            out.write(json.dumps(line) + "\n")


def read_items(file: Path) -> Iterator[IndexedItem]:
    """The items that `write_items` wrote; ValueError, KeyError or TypeError where a line is not one of them."""
    with file.open(encoding="ascii") as lines:
        for line in lines:
            found = json.loads(line)
            path = Path(str(found["path"]))
            name, offset, size = found.get("member", ("", 0, 0))
            location = TarMember(path, str(name), int(offset), int(size)) if "member" in found else path
            end = found.get("end")
            span = (float(found["start"]), None if end is None else float(end)) if "start" in found else WHOLE
            bytes_, changed = found["stamp"]
            yield IndexedItem(Item(location, span), (int(bytes_), int(changed)), tuple(map(str, found["labels"])))


Wanted = dict[str, IndexedItem]  # the items of a collection as it is now, by name


def update_index(
    model: Model,
    run: str | Path,
    named: Sequence[str],
    out: Path,
    *,
    spec: FeatureSpec | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    progress: ProgressLine | None = None,
) -> IndexUpdate:
    """Make the index of a collection, or bring it up to date; features are by default those of the run's probe."""
    progress, spec = progress or ProgressLine(), spec or model.probe_spec
    _require_usable(out)
    out.mkdir(parents=True, exist_ok=True)
    with locked_folder(out):
        if options.overwrite:
            (out / INDEX).unlink(missing_ok=True)
            for path in (*out.glob("segment-*"), *out.glob("generation-*")):
                shutil.rmtree(path)
        origin = os.path.abspath(run) if Path(run).exists() else str(run)  # a released model has only a name
        fresh = IndexRecord(model=model.fingerprint, features=spec, run=origin)
        index = read_index(out) if (out / INDEX).is_file() else fresh
        if changed := index.differences(fresh):
            raise UsageError(
                f"{quoted(out)} was made with another {', '.join(changed)}; give --overwrite to rebuild it, or "
                "another --out."
            )
        inputs = find_inputs(named, reader=model.reader, stdin=io.BytesIO())
        labels, notes = find_labels(named, reader=model.reader)
        for note in (*inputs.notes, *notes):
            progress.note(note)
        wanted = {
            item.name: IndexedItem(item, item.stamp(), labels.get((os.path.abspath(item.path), item.span), ()))
            for item in inputs.items
        }
        while new := _not_indexed(out, index, wanted):
            name = f"segment-{len(index.segments):04}"
            _fill_segment(model, out / name, new, spec, options._replace(overwrite=False), progress)
            index = index.model_copy(update={"segments": [*index.segments, name]})
            write_json(out / INDEX, index.model_dump(mode="json"))
        has_codes = model.own_tokenizer is not None
        index = index.model_copy(update={"run": origin, "base": os.getcwd(), "codes": has_codes})
        return _publish(model, out, index, wanted)


def read_index(folder: Path) -> IndexRecord:
    """index.json, checked."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{quoted(folder)} is not an index (no {INDEX}); make one with `bridle index RUN CORPUS`.")
    with one_line_errors(folder / INDEX, REBUILD):
        index = IndexRecord.model_validate_json((folder / INDEX).read_bytes())
    if index.format > FORMAT:
        raise DataError(f"{quoted(folder)} has format {index.format}, this bridle reads up to {FORMAT}.")
    return index


def _require_usable(out: Path) -> None:
    """Raise UsageError if something else than an index is there."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {quoted(out)} is a file; give a folder for the index.")
    ours = ("segment-", "generation-", INDEX, "run.lock", ".")
    if out.is_dir() and any(not path.name.startswith(ours) for path in out.iterdir()):
        raise UsageError(f"--out {quoted(out)} holds other files; give a new folder for the index.")


def _not_indexed(out: Path, index: IndexRecord, wanted: Wanted) -> Wanted:
    """The items that no segment was made for, as they are now."""
    known = {item.name: item.stamp for name in index.segments for item in read_items(out / name / ITEMS)}
    return {name: item for name, item in wanted.items() if known.get(name) != item.stamp}


def _fill_segment(
    model: Model, folder: Path, new: Wanted, spec: FeatureSpec, options: Options, progress: ProgressLine
) -> None:
    """Write features and codes of new items; a segment that an earlier command began is finished as it was."""
    begun = list(read_items(folder / ITEMS)) if (folder / ITEMS).is_file() else None
    if begun is None or any(item.name not in new or new[item.name].stamp != item.stamp for item in begun):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun = list(new.values())
        write_items(folder / ITEMS, begun)
    inputs = Inputs(Items(one.item for one in begun))
    features, codes = folder / FEATURES, folder / CODES
    try:
        if not features.exists():
            progress.note(f"features of {len(begun):,} files")
            embed_inputs(model, inputs, features, spec=spec, options=options, progress=progress)
        if not codes.exists() and model.own_tokenizer is not None:
            progress.note(f"codes of {len(begun):,} files")
            tokenize_inputs(model, inputs, codes, options=options, progress=progress)
    except DataError:
        # None of them can be read, which must not keep earlier segments from being searched.
        if options.strict or folder.name == "segment-0000" or not any(folder.glob("*.quarantine.jsonl")):
            raise


def _publish(model: Model, out: Path, index: IndexRecord, wanted: Wanted) -> IndexUpdate:
    """Write a new generation from all segments, for the collection as it is now."""
    old = [] if index.generation is None else list(read_items(out / index.generation / ITEMS))
    before = {(item.name, item.stamp) for item in old}
    living = {segment: items for segment in index.segments if (items := _living(out / segment, index, wanted))}
    items = list(itertools.chain.from_iterable(living.values()))
    now = {(item.name, item.stamp) for item in items}
    if not items:
        raise DataError(f"{quoted(out)}: no file of the collection can be read; see the quarantine lists in it.")
    number = 0 if index.generation is None else int(index.generation.rpartition("-")[2]) + 1
    folder = out / f"generation-{number:04}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_items(folder / ITEMS, items)
    names = {out / segment: {item.name for item in own} for segment, own in living.items()}
    _write_vectors(folder, names, len(items))
    if index.codes:
        for name, values in weigh(_terms(model, names))._asdict().items():
            np.save(folder / f"{name}.npy", values)
    index = index.model_copy(update={"generation": folder.name, "files": len(items)})
    write_json(out / INDEX, index.model_dump(mode="json"))
    for path in out.glob("generation-*"):
        if path != folder:
            shutil.rmtree(path)
    listed = (sorted((out / segment).glob("*.quarantine.jsonl"))[:1] for segment in index.segments)
    failed = tuple(itertools.chain.from_iterable(listed))
    return IndexUpdate(out, len(items), len(now - before), len(before - now), failed)


def _living(folder: Path, index: IndexRecord, wanted: Wanted) -> list[IndexedItem]:
    """Items of a segment that are still in the collection and have features and codes, with today's labels."""
    if not (folder / FEATURES).exists() or (index.codes and not (folder / CODES).exists()):
        return []  # none of its items could be read
    readable = set(read_features(folder / FEATURES).files)
    if index.codes:
        readable &= set(read_codes(folder / CODES).files)
    kept = (item for item in read_items(folder / ITEMS) if item.name in wanted and item.name in readable)
    return [wanted[item.name] for item in kept if wanted[item.name].stamp == item.stamp]


def _write_vectors(folder: Path, names: dict[Path, set[str]], count: int) -> None:
    """vectors.npy (N, D): pooled features less their mean, scaled to length one; mean.npy (D,)."""

    def features() -> Iterator[NDArray[np.float32]]:
        for segment, wanted in names.items():
            yield from (found.z for name, found in read_features(segment / FEATURES) if name in wanted)

    total: NDArray[np.float64] | None = None
    for z in features():
        total = z.astype(np.float64) if total is None else total + z
    assert total is not None  # there is at least one item
    mean = (total / count).astype(np.float32)
    np.save(folder / MEAN, mean)
    vectors = np.lib.format.open_memmap(folder / VECTORS, mode="w+", dtype=np.float32, shape=(count, len(mean)))
    for n, z in enumerate(features()):
        vectors[n] = unit(z - mean)
    vectors.flush()


def unit(z: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scaled to length one; zeros stay zeros."""
    return (z / max(float(np.linalg.norm(z)), 1e-12)).astype(np.float32)


def _terms(model: Model, names: dict[Path, set[str]]) -> Iterator[Terms]:
    lines = lines_of(model)
    for segment, wanted in names.items():
        for name, found in read_codes(segment / CODES):
            if name in wanted:
                yield terms_of(found.codes, found.positions, lines)


def lines_of(model: Model) -> Lines:
    """The grid lines that n-grams of this model's codes follow: time, or the rows of a picture."""
    axis = 0 if model.reader.timed else model.geometry.rank - 1
    return Lines(model.geometry.grid, axis, tuple(model.config.quantizer.sizes[:STAGES]))
