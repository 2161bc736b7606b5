"""`bridle sequences`: files of codes as a folder that `datasets` and `transformers` users read without bridle.

    vocabulary.json                 what the ids mean: pattern, offsets, special ids, size; the model and its rates
    sequences.jsonl or .parquet     one row per file: `file`, `input_ids` (bos … eos), in the order of the codes
    blocks.npy                      with a context: (n, context) ids of all files packed, to be mapped by numpy

The folder is there whole or not at all: it is written under another name beside its place, then renamed.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridle.console import ProgressLine
from bridle.errors import DataError, UsageError, quoted
from bridle.files import replacing_folder, write_json
from bridle.infer.read import DAMAGE, CodesFile, read_codes
from bridle.infer.sequences import Array, Ids, Vocabulary, framed, make_vocabulary, packed, read_vocabulary
from bridle.machine import StopRequest
from bridle.runs.checkpoint import is_count

FORMAT = 1
VOCABULARY, BLOCKS = "vocabulary.json", "blocks.npy"
FORMS = ("jsonl", "parquet")
GROUP = 1000  # rows of a Parquet row group
FROM_HEADER = ("run", "model", "geometry", "grid", "tokens_per_second", "bits_per_token", "bits_per_second")
Put = Callable[[str, Ids], None]


class Written(NamedTuple):
    """What `write_sequences` left behind."""

    out: Path
    vocabulary: Vocabulary
    files: int
    ids: int
    blocks: int


def write_sequences(
    paths: Sequence[str | Path],
    out: Path,
    *,
    pattern: str = "interleaved",
    context: int | None = None,
    form: str = "jsonl",
    overwrite: bool = False,
    progress: ProgressLine | None = None,
) -> Written:
    """The codes of some files of codes as sequences in the folder `out`."""
    if form not in FORMS:
        raise UsageError(f"--format {quoted(form)}: expected one of {', '.join(FORMS)}.")
    if context is not None and context < 2:
        raise UsageError(f"--context {context}: a block needs at least 2 ids.")
    stored = [read_codes(path) for path in paths]
    _require_alike(stored)
    vocabulary = make_vocabulary(stored[0].header.codebook_sizes, pattern)
    _require_place(out, overwrite=overwrite)
    with replacing_folder(out) as temporary:
        counts = _write(stored, temporary, vocabulary, context, form, progress or ProgressLine())
        header = stored[0].header.model_dump(mode="json", include=set(FROM_HEADER))
        described = {"format": FORMAT, **vocabulary.described(), "context": context, **counts._asdict(), **header}
        write_json(temporary / VOCABULARY, described)
    return Written(out, vocabulary, *counts)


class Counts(NamedTuple):
    files: int
    ids: int
    blocks: int


def _require_alike(stored: Sequence[CodesFile]) -> None:
    """Ids of different models mean different things."""
    if not stored:
        raise UsageError("no file of codes is named; write one with `bridle tokenize`.")
    first = stored[0]
    for other in stored[1:]:
        for key in ("model", "codebook_sizes"):
            if getattr(other.header, key) != getattr(first.header, key):
                raise UsageError(
                    f"{quoted(other.path)} has another {key.replace('_', ' ')} than {quoted(first.path)}; codes of "
                    "different models cannot share ids. Write them to folders of their own."
                )


def _require_place(out: Path, *, overwrite: bool) -> None:
    """Only a folder of sequences is ever replaced."""
    if out.exists() and not overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    if out.exists() and not (out / VOCABULARY).is_file():
        raise UsageError(f"{quoted(out)} is no folder of sequences and is not replaced; give another --out.")


def _write(
    stored: Sequence[CodesFile],
    folder: Path,
    vocabulary: Vocabulary,
    context: int | None,
    form: str,
    progress: ProgressLine,
) -> Counts:
    total, done, ids = sum(map(len, stored)), 0, 0
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest().listening())
        put = stack.enter_context((_jsonl if form == "jsonl" else _parquet)(folder, vocabulary))

        def rows() -> Iterator[Ids]:
            nonlocal done, ids
            for one in stored:
                for name, found in one:
                    row = framed(vocabulary.encode(found.codes[:, : len(vocabulary.sizes)]))
                    put(name, row)
                    done, ids = done + 1, ids + len(row)
                    progress.show(f"{done}/{total} files · {ids:,} ids", f"{done}/{total}", final=done == total)
                    stop.leave("nothing was written.")
                    yield row

        blocks = 0
        if context is not None:
            blocks = _write_blocks(folder / BLOCKS, packed(rows(), context=context), context, vocabulary.dtype)
        else:
            collections.deque(rows(), maxlen=0)  # every row is put as it comes by
    return Counts(done, ids, blocks)


def _write_blocks(path: Path, blocks: Iterator[Ids], context: int, dtype: np.dtype[Any]) -> int:
    """(n, context) in numpy's format; n is known at the end, so the header is written twice, in the same room."""

    def head(count: int) -> dict[str, Any]:
        return {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count, context)}

    count = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, head(10**12))
        room = file.tell()
        for block in blocks:
            file.write(block.astype(dtype).tobytes())
            count += 1
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, head(count))
        if file.tell() != room:
            raise OSError(f"{path.name}: the header does not fit its place")
    return count


@contextmanager
def _jsonl(folder: Path, vocabulary: Vocabulary) -> Iterator[Put]:
    with (folder / "sequences.jsonl").open("w", encoding="utf-8") as file:

        def put(name: str, row: Ids) -> None:
            file.write(json.dumps({"file": name, "input_ids": row.tolist()}) + "\n")

        yield put


@contextmanager
def _parquet(folder: Path, vocabulary: Vocabulary) -> Iterator[Put]:
    arrow, parquet = _pyarrow()
    kind = arrow.uint16() if vocabulary.dtype == np.uint16 else arrow.uint32()
    schema = arrow.schema([("file", arrow.string()), ("input_ids", arrow.list_(kind))])
    names: list[str] = []
    rows: list[Ids] = []
    with parquet.ParquetWriter(folder / "sequences.parquet", schema) as file:

        def flush() -> None:
            if names:
                content = [arrow.array(names, arrow.string()), arrow.array(rows, arrow.list_(kind))]
                file.write_table(arrow.table(content, schema=schema))
            names.clear()
            rows.clear()

        def put(name: str, row: Ids) -> None:
            names.append(name)
            rows.append(row.astype(vocabulary.dtype))
            if len(names) == GROUP:
                flush()

        yield put
        flush()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError('Parquet needs pyarrow: pip install "bridle[parquet]", or use --format jsonl.') from None
    return pyarrow, pyarrow.parquet


class SequencesFile:
    """A folder of sequences: iterates over (name, codes (T, M)); `vocabulary` encodes and decodes more of them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / VOCABULARY).is_file():
            raise UsageError(f"{quoted(folder)} holds no {VOCABULARY}; write the folder with `bridle sequences`.")
        with self._explained():
            self.header: dict[str, Any] = json.loads((self.folder / VOCABULARY).read_text(encoding="utf-8"))
            if self.header["format"] > FORMAT:
                raise DataError(
                    f"{quoted(self.folder)} has format {quoted(self.header['format'])}, this bridle reads up to "
                    f"{FORMAT}; use a newer bridle."
                )
            self.vocabulary = read_vocabulary(self.header)
            if not is_count(self.header["files"]) or self.header["files"] > sys.maxsize:
                raise ValueError(f"{VOCABULARY} does not say of how many files it is")

    def __len__(self) -> int:
        return int(self.header["files"])

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        for name, ids in self.rows():
            yield name, self.vocabulary.decode(ids)

    def rows(self) -> Iterator[tuple[str, Ids]]:
        """Name and ids of each file, bos and eos included."""
        count = 0
        with self._explained():
            for row in self._stored():
                ids = np.asarray(row["input_ids"], dtype=np.int64)
                if ids.ndim != 1:
                    raise ValueError("input_ids is no list of numbers")
                yield str(row["file"]), ids
                count += 1
            if count != len(self):
                raise ValueError(f"{count} sequences, but {VOCABULARY} says {len(self)}")

    def blocks(self) -> Array:
        """The packed blocks (n, context), mapped and not read."""
        if not (self.folder / BLOCKS).is_file():
            raise UsageError(f"{quoted(self.folder)} has no packed blocks; write it with --context N.")
        with self._explained():
            found: Array = np.load(self.folder / BLOCKS, mmap_mode="r", allow_pickle=False)
            if found.shape != (self.header["blocks"], self.header["context"]):
                raise ValueError(f"{BLOCKS} has not the size {VOCABULARY} says")
        return found

    def _stored(self) -> Iterator[Mapping[str, Any]]:
        if (self.folder / "sequences.parquet").is_file():
            with _pyarrow()[1].ParquetFile(self.folder / "sequences.parquet") as file:
                for batch in file.iter_batches(GROUP):
                    yield from batch.to_pylist()
            return
        with (self.folder / "sequences.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Damage of any kind as one line."""
        try:
            yield
        except DAMAGE as error:
            raise DataError(
                f"{quoted(self.folder)} is damaged, cut short, or not written by bridle ({type(error).__name__}: "
                f"{quoted(error)}); write it again with `bridle sequences`."
            ) from error


def read_sequences(folder: str | Path) -> SequencesFile:
    """What `bridle sequences` wrote: `for name, codes in bridle.read_sequences(folder)`."""
    return SequencesFile(folder)
