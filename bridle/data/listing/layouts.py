"""Which files make up a data set, for every layout a folder or a list can have.

    folders    ROOT/train/CLASS/…, ROOT/test/CLASS/…, see `folders`
    lists      ROOT/train.csv and ROOT/val.csv or test.csv; each line a path and its class, a space or comma between
    esc50      ROOT/audio/… and ROOT/meta/esc50.csv (filename, fold, target, category)
    audioset   ROOT/class_labels_indices.csv, ROOT/*_segments.csv and clips below ROOT, see `audioset`
    shards     ROOT/*.tar, see `bridle.data.shards.reader`
    a manifest of columns or records, see `manifest`

No file of the data itself is opened here: what is missing or damaged shows when it is loaded, with its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bridle.data.listing.address import is_pattern, local_manifest, local_path
from bridle.data.listing.audioset import find_audioset, has_audioset
from bridle.data.listing.folders import existing_folder, files_below, find_folders
from bridle.data.listing.manifest import LARGE, index_places, read_manifest, read_table, text_lines
from bridle.data.listing.table import DataListing, Line, Numbering, Table, hold_out, is_count, read_label_file
from bridle.data.listing.table_on_disk import FORMAT, indexed
from bridle.data.shards.reader import find_shards
from bridle.data.shards.scan import SHARDS
from bridle.errors import ConfigError, DataError, quoted
from bridle.files import sha256_of_json, stamp

ESC50 = Path("meta") / "esc50.csv"
ENDS_IN_CLASS = re.compile(r"(.+?)\s*[,\s]\s*(\d+)")  # a path and a class number
HEADER_WORDS = {
    *("path", "file", "filename", "file_name", "filepath", "name", "image", "video", "clip", "audio"),
    *("label", "labels", "class", "category", "target", "id", "split", "fold", "youtube_id", "time_start", "time_end"),
}


def find_data(
    *,
    root: str | None,
    manifest: str | None,
    layout: str,
    extensions: Sequence[str],
    test_fold: int | None = None,
    segments: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> DataListing:
    """List the files with one of `extensions`, or such members of shards; `layout` may be "auto", then the root's
    content tells. What is elsewhere is copied to this machine first (see `address`)."""
    if manifest is not None:
        require_no_columns(columns, manifest)
        file, base = local_manifest(manifest, root)
        return read_manifest(file, base=base and existing_folder(base), test_fold=test_fold)
    if root is None:
        raise ConfigError("data.root: give the folder of your data with data.root=PATH, or a list with data.manifest=.")
    folder = local_path(root)
    if not is_pattern(folder):
        existing_folder(folder)
        layout = tell_layout(folder) if layout == "auto" else layout
    if layout == "shards" or is_pattern(folder):
        return find_shards(folder, extensions=extensions, test_fold=test_fold, columns=columns)
    require_no_columns(columns, folder)
    if layout == "esc50":
        return find_esc50(folder, extensions=extensions, test_fold=test_fold)
    if test_fold is not None:
        raise ConfigError(f"data.test_fold: {test_fold} given, but data of the layout {layout!r} has no folds.")
    if layout == "audioset":
        return find_audioset(folder, extensions=extensions, segments=segments)
    if layout == "lists":
        return find_lists(folder, extensions=extensions)
    return find_folders(folder, extensions=extensions)


def require_no_columns(columns: Sequence[str] | None, place: str | Path) -> None:
    """ConfigError if columns are named of data that has none."""
    if columns is not None:
        raise ConfigError(f"data.columns: {list(columns)} given, but {quoted(place)} is no Hugging Face dataset.")


def find_listing(path: Path, *, extensions: Sequence[str]) -> DataListing:
    """The data set of a folder in whatever layout, or of a manifest."""
    root, manifest = (None, str(path)) if path.is_file() and not is_pattern(path) else (str(path), None)
    return find_data(root=root, manifest=manifest, layout="auto", extensions=extensions)


def tell_layout(root: Path) -> str:
    """The layout of a folder by what it holds: esc50, audioset, lists, shards or folders."""
    if (root / ESC50).is_file():
        return "esc50"
    if has_audioset(root):
        return "audioset"
    if (root / "train.csv").is_file():
        return "lists"
    if any(any(root.glob(f"{place}*{ending}")) for place in ("", "train/") for ending in SHARDS):
        return "shards"
    return "folders"


def holds_shards(path: Path) -> bool:
    """Is it a folder of shards, or a pattern of their names?"""
    return is_pattern(path) or (path.is_dir() and tell_layout(path) == "shards")


def find_lists(root: Path, *, extensions: Sequence[str]) -> DataListing:
    """ROOT/train.csv and ROOT/test.csv or val.csv, paths relative to ROOT; ROOT/classes.txt may name the classes."""
    if not (root / "train.csv").is_file():
        raise DataError(f"{quoted(root)} has no train.csv; each line of it should be a path and its class.")
    held_out = next((name for name in ("test", "val") if (root / f"{name}.csv").is_file()), None)
    splits = ["train"] if held_out is None else ["train", held_out]
    files = [root / f"{split}.csv" for split in splits]
    build = partial(parse_lists, root, splits, extensions)
    if sum(file.stat().st_size for file in files) < LARGE:
        return build()
    states = [stamp(file) for file in (*files, root / "classes.txt")]
    key = sha256_of_json([FORMAT, "lists", states, sorted(extensions)])
    return indexed(places=index_places(files[0]), key=key, root=root, build=build)


def parse_lists(root: Path, splits: Sequence[str], extensions: Sequence[str]) -> DataListing:
    """Read every line."""
    table = Table(root=root, file=root / "train.csv", numbering=read_label_file(root))
    for split in splits:
        file, empty = root / f"{split}.csv", True
        for name, label, where in list_rows(file, extensions):
            table.add(name, labels=None if label is None else [label], split=split, where=where)
            empty = False
        if empty:
            raise DataError(f"{quoted(file)} lists no files; fill it or remove it.")
    return table.finish()


def list_rows(file: Path, extensions: Sequence[str]) -> Iterator[tuple[str, str | None, Line]]:
    """Path, class (None where the line is only a path) and place of each line."""
    endings = tuple(extension.lower() for extension in extensions)
    # A comma behind a known ending is the one that parts path and class, whatever else the two hold.
    known = re.compile(rf"(.+?(?:{'|'.join(map(re.escape, endings))}))[\"']?\s*,\s*(.+)", re.IGNORECASE)
    for number, line in enumerate(map(str.strip, text_lines(file)), start=1):
        if not line or line.startswith("#") or (number == 1 and _is_header(line, file)):
            continue
        where = Line(file, number)
        if line.strip("\"'").lower().endswith(endings):
            yield line.strip("\"'"), None, where
            continue
        if parted := known.fullmatch(line) or ENDS_IN_CLASS.fullmatch(line):
            name, label = parted.groups()
        else:
            name, _, label = line.rpartition("," if "," in line else " ")
        if not name:
            raise DataError(f"{where} is {quoted(line)}; expected a path and its class, or only a path.")
        yield name.strip(" ,\"'"), label.strip(" \"'"), where


def _is_header(line: str, file: Path) -> bool:
    """Whether a first line names columns. More than two are not a list but a manifest."""
    words = re.split(r"[,\s]+", line.lower().replace('"', ""))
    if not set(words) <= HEADER_WORDS or len(words) < 2:
        return False
    if len(words) > 2:
        raise DataError(
            f"{quoted(file)} begins with the columns {quoted(line)}; a list has a path and its class in each line. "
            "Give a table with columns path, label and split as data.manifest=FILE."
        )
    return True


def find_esc50(root: Path, *, extensions: Sequence[str], test_fold: int | None) -> DataListing:
    """The clips of meta/esc50.csv, whatever sound format they are stored in; labels in the order of `target`."""
    file = root / ESC50
    if not file.is_file():
        raise DataError(f"{quoted(root)} has no meta/esc50.csv; set data.root to the folder with audio/ and meta/.")
    rows = list(read_table(file, required=("filename", "fold", "target", "category")))  # two thousand
    for row in rows:
        for column in ("fold", "target"):
            if not is_count(row.values[column]):
                raise DataError(f"{row.where}: {column} is {quoted(row.values[column])}; expected a whole number.")
    targets = {int(row.values["target"]): row.values["category"] for row in rows}
    numbering = Numbering([targets[target] for target in sorted(targets)], file=file)
    if len(numbering.numbers) < len(targets):
        raise DataError(f"{quoted(file)}: two targets have the same category; every class needs its own name.")
    names = files_below(root / "audio", extensions).names
    stored = {Path(name).stem: name for name in reversed(names)} | {name: name for name in names}
    table = Table(root=root / "audio", file=file, numbering=numbering)
    missing = 0
    for row in rows:
        name = row.values["filename"]
        on_disk = stored.get(name) or stored.get(Path(name).stem)
        missing += on_disk is None
        label = targets[int(row.values["target"])]
        table.add(on_disk or name, labels=[label], fold=int(row.values["fold"]), where=row.where)
    notes = [f"{missing} of the {len(rows)} clips in {quoted(file)} are not in {quoted(root / 'audio')}."]
    return hold_out(table.finish(*(notes if missing else ())), test_fold, file, declared=True)
