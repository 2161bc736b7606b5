"""What one Arrow file of Hugging Face `datasets` holds: cells of pictures, recordings or clips, with their labels.

`save_to_disk` and `load_dataset` write Arrow streams without compression, in which the bytes of a cell lie as they are.
So a cell is read by offset as a member of a tar file is, and nothing but this scan needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from bridle.data.arrays.memory import Y_KEYS
from bridle.data.listing.manifest import fold_of
from bridle.data.shards.scan import DAMAGE, Contents, Label, ShardRow, ShardSample, label_of
from bridle.errors import DataError, needs, quoted

ENDINGS = {"Image": ".png", "Audio": ".wav", "Video": ".mp4"}  # by the type of a column, for cells without a file name
LABELS = ("ClassLabel", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "string")
LISTS = ("Sequence", "List", "LargeList")
MALFORMED = (LookupError, AttributeError, TypeError, NotImplementedError, RecursionError)  # of a damaged schema
Feature = Mapping[str, Any]  # a column as the schema describes it


class ArrowColumns(NamedTuple):
    """Which columns of a dataset are read."""

    input: str
    ending: str  # of cells without a file name
    label: str | None
    classes: tuple[str, ...] | None  # names of the class numbers
    multilabel: bool
    folded: bool  # is there a column `fold` of whole numbers
    notes: tuple[str, ...]


def scan_arrow(shard: Path, *, extensions: Sequence[str], columns: Sequence[str] | None = None) -> Contents:
    """The samples of an Arrow file in the order of its rows.

    `columns` names the input and the label; without it they are found by type and name. DataError without such columns,
    or where cells hold paths of files instead of their content.
    """
    with needs("datasets"):
        import pyarrow

    whole = pyarrow.memory_map(str(shard)).read_buffer()
    try:
        return scan_stream(pyarrow.ipc.open_stream(whole), whole, shard, extensions, columns)
    except MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def scan_stream(
    reader: Any, whole: Any, shard: Path, extensions: Sequence[str], columns: Sequence[str] | None
) -> Contents:
    """The samples of an Arrow stream in the memory `whole`, up to its end or to where it is damaged."""
    known = json.loads((reader.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    chosen = choose_columns(known, shard, extensions, columns)
    samples: list[ShardSample] = []
    damage: tuple[str, ...] = ()
    rows = 0
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)  # of a damaged file, offsets may point anywhere
        except StopIteration:
            break
        except (*DAMAGE, OSError) as error:
            damage = (f"{quoted(shard)} is damaged after row {rows}: {quoted(error)}.",)
            break
        samples += batch_samples(batch, chosen, first=rows, whole=whole, shard=shard, extensions=extensions)
        rows += batch.num_rows
    empty = rows - len(samples)
    notes = (f"{empty} row(s) of {quoted(shard)} hold nothing; left aside.",) if empty else ()
    return Contents(samples, chosen.multilabel, (*chosen.notes, *notes), damage, chosen.classes)


def choose_columns(
    known: Mapping[str, Feature], shard: Path, extensions: Sequence[str], given: Sequence[str] | None
) -> ArrowColumns:
    """The column of inputs of a wanted kind, and that of labels."""
    kinds = {name: kind_of(feature) for name, feature in known.items()}
    inputs = [name for name, kind in kinds.items() if ENDINGS.get(kind) in extensions]
    labels = [name for name in known if label_feature(known[name]) is not None]
    wanted, *label = (*(given or inputs[:1]), None)[:2]
    if wanted not in inputs or (given and label[0] not in (None, *labels)):
        has = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "no columns of Hugging Face datasets"
        raise DataError(
            f"{quoted(shard)} has {quoted(has)}; expected a column of type Image, Audio or Video as this model reads "
            "it, and one of whole numbers or text for labels. data.columns=[INPUT,LABEL] names them; any other dataset "
            "can be given from Python: bridle.pretrain(dataset=…)."
        )
    found = label[0] if given else next((name for name in Y_KEYS if name in labels), None)
    if found is None and not given:  # a single column of classes is not ambiguous
        classes = [name for name in labels if "names" in (label_feature(known[name]) or {})]
        found = classes[0] if len(classes) == 1 else None
    names = None if found is None else (label_feature(known[found]) or {}).get("names")
    multilabel = found is not None and kinds[found] in LISTS
    folded, ending = kinds.get("fold") in LABELS[1:-1], ENDINGS[kinds[str(wanted)]]
    note = f"none of the columns {', '.join(labels)} is taken for labels; data.columns=[{wanted},LABEL] names one."
    notes = (note,) if labels and found is None and not given else ()
    return ArrowColumns(str(wanted), ending, found, names and tuple(names), multilabel, folded, notes)


def kind_of(feature: object) -> str:
    """The type of a column: Image, ClassLabel, …, or that of its plain values."""
    if not isinstance(feature, Mapping) or "_type" not in feature:
        return "nested"
    return str(feature["dtype"] if feature["_type"] == "Value" else feature["_type"])


def label_feature(feature: Feature) -> Feature | None:
    """What describes one label of a column, also of lists of labels; None for other columns."""
    one = feature.get("feature", {}) if kind_of(feature) in LISTS else feature
    return one if kind_of(one) in LABELS else None


def batch_samples(
    batch: Any, chosen: ArrowColumns, *, first: int, whole: Any, shard: Path, extensions: Sequence[str]
) -> Iterator[ShardSample]:
    """The samples of a record batch; `first` counts the rows before it."""
    column = batch.column(chosen.input)
    offsets, sizes, filled = cell_places(column.field("bytes"), whole, shard)
    paths = column.field("path").to_pylist()
    labels = [None] * len(paths) if chosen.label is None else batch.column(chosen.label).to_pylist()
    folds = batch.column("fold").to_pylist() if chosen.folded else [None] * len(paths)
    for at, (path, label, fold) in enumerate(zip(paths, labels, folds, strict=True)):
        if not filled[at] and path:
            raise DataError(
                f"row {first + at} of {quoted(shard)} holds the path {quoted(path)} instead of a file's content; point "
                "data.root to those files, or write it with content: DATASET.save_to_disk(FOLDER)."
            )
        if filled[at]:
            where = f"{quoted(shard)} row {first + at}"
            name = cell_name(path, first + at, chosen.ending, extensions)
            row = ShardRow(labels_of(label, where), fold=fold_of({"fold": fold}, where))
            yield ShardSample(name, int(offsets[at]), int(sizes[at]), row)


def cell_places(column: Any, whole: Any, shard: Path) -> tuple[Any, Any, Any]:
    """Offset and size in the file of each cell of a binary column, and whether it holds anything."""
    filled = column.is_valid().to_numpy(zero_copy_only=False)
    if not filled.any():
        return filled, filled, filled
    _, ends, content = column.buffers()
    numbers = np.frombuffer(ends, np.int64 if str(column.type) == "large_binary" else np.int32)
    numbers = numbers[column.offset : column.offset + len(column) + 1].astype(np.int64)
    start = content.address - whole.address
    if not 0 <= start <= whole.size - content.size:
        raise DataError(f"{quoted(shard)} is compressed; write it again with DATASET.save_to_disk(FOLDER).")
    return start + numbers[:-1], np.diff(numbers), filled


def cell_name(path: str | None, row: int, ending: str, extensions: Sequence[str]) -> str:
    """The number of the row, and the name of the file that the cell was made of."""
    name = PurePosixPath((path or "").replace("\\", "/").replace("\0", "_")).name
    return f"{row:08d}-{name}" if name.lower().endswith(tuple(extensions)) else f"{row:08d}{ending}"


def labels_of(value: object, where: str) -> tuple[Label, ...] | None:
    """The label or labels of a row; None where there is none, for which datasets also write -1."""
    if value is None or value == -1:
        return None
    return tuple(label_of(one, where) for one in (value if isinstance(value, list) else [value]))
