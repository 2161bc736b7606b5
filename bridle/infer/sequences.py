"""`bridle sequences`: codes as integers that any language model can be trained on, and back again, without loss.

Shapes: a file has T tokens of M codes (T, M) with sizes K_1 … K_M; its ids are (L,).

Every stage has its own range of ids, so that a code is never mistaken for one of another stage:

    id(m, c) = 5 + K_1 + … + K_{m−1} + c,      0 pad, 1 bos, 2 eos, 3 sep, 4 empty

    interleaved   c_1(0) c_2(0) … c_M(0) c_1(1) …            all codes of a token, then the next one      L = T·M
    delayed       c_1(0) ∅ ∅ | c_1(1) c_2(0) ∅ | …           stage m comes m − 1 steps later              L = (T+M−1)·M
    stage1        c_1(0) c_1(1) …                            the first stage alone                        L = T

In the delayed pattern the M ids of a step belong to M different tokens, so that a model may predict them at once; ∅ is
`empty`. Tokens come in the order of the codes file: along time, or row by row. A file is bos … eos; packed files have
a `sep` between them. The folder that is written, whole or not at all, needs no bridle to be read:

    vocabulary.json                 what the ids mean: pattern, offsets, special ids, size; the model and its rates
    sequences.jsonl or .parquet     one row per file: `file`, `input_ids` (bos … eos), in the order of the codes
    blocks.npy                      with a context: (n, context) ids of all files packed, to be mapped by numpy
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from bridle.console import ProgressLine
from bridle.errors import DataError, UsageError, quoted
from bridle.files import replacing_folder, write_json
from bridle.infer.formats import require_pyarrow
from bridle.infer.read import CodesFile, Count, one_line_errors, read_codes
from bridle.machine import StopRequest

FORMAT = 1
Pattern = Literal["interleaved", "delayed", "stage1"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
Array = NDArray[Any]
Ids = NDArray[np.int64]
PutRow = Callable[[str, Ids], object]

PAD, BOS, EOS, SEP, EMPTY = range(5)
SPECIAL = {"pad": PAD, "bos": BOS, "eos": EOS, "sep": SEP, "empty": EMPTY}
VOCABULARY, BLOCKS = "vocabulary.json", "blocks.npy"
REMEDY = "write it again with `bridle sequences`"
GROUP = 1000  # rows of a Parquet row group
FROM_HEADER = {"run", "model", "geometry", "grid", "tokens_per_second", "bits_per_token", "bits_per_second"}


class Vocabulary(NamedTuple):
    """What the ids mean."""

    sizes: tuple[int, ...]  # of the codebooks that are written
    pattern: Pattern

    @property
    def offsets(self) -> tuple[int, ...]:
        """The id of code 0 of each stage."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=len(SPECIAL)))

    @property
    def size(self) -> int:
        """Ids in all: what a model's embedding needs."""
        return len(SPECIAL) + sum(self.sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id, of two bytes or more."""
        return np.promote_types(np.uint16, np.min_scalar_type(self.size - 1))

    def encode(self, codes: Array) -> Ids:
        """(T, M) codes -> (L,) ids, without bos and eos."""
        M = len(self.sizes)
        if codes.ndim != 2 or codes.shape[1] != M:
            raise UsageError(f"expected codes of shape (T, {M}), got {codes.shape}.")
        if codes.size and bool((codes.max(0) >= np.array(self.sizes)).any()):
            raise DataError(f"a code is not below its codebook's size; the sizes are {list(self.sizes)}.")
        ids = codes.astype(np.int64) + np.array(self.offsets)
        return (_delayed(ids) if self.pattern == "delayed" else ids).reshape(-1)

    def decode(self, ids: Array) -> Array:
        """(L,) ids, with or without bos, eos and trailing pad -> (T, M) codes; DataError for ids that do not fit."""
        rows = _stripped(np.asarray(ids, dtype=np.int64))
        M = len(self.sizes)
        if len(rows) % M:
            raise DataError(f"a sequence of {len(rows)} ids is cut off: every token has {M} codes.")
        steps = rows.reshape(-1, M)  # (T, M), delayed (T + M − 1, M)
        found = _undelayed(steps) if self.pattern == "delayed" else steps
        codes = found - np.array(self.offsets)
        wrong = (codes < 0) | (codes >= np.array(self.sizes))
        if wrong.any():
            token, stage = (int(number) for number in np.argwhere(wrong)[0])
            raise DataError(f"id {found[token, stage]} at token {token} is no code of stage {stage + 1}.")
        smallest: Array = codes.astype(np.min_scalar_type(max(self.sizes) - 1))
        return smallest


def make_vocabulary(sizes: Sequence[int], pattern: str) -> Vocabulary:
    """The vocabulary of codebooks of these sizes; `stage1` keeps the first."""
    if pattern not in PATTERNS:
        raise UsageError(f"--pattern {quoted(pattern)}: expected one of {', '.join(PATTERNS)}.")
    return Vocabulary(tuple(sizes[:1] if pattern == "stage1" else sizes), pattern)


def framed(ids: Ids) -> Ids:
    """The ids of a file between bos and eos."""
    return np.concatenate([[BOS], ids, [EOS]])


def packed(rows: Iterable[Ids], *, context: int) -> Iterator[Ids]:
    """Files one after the other with `sep` between them, cut into blocks of `context` ids; the last is padded."""
    waiting = np.zeros(0, dtype=np.int64)
    for number, row in enumerate(rows):
        waiting = np.concatenate([waiting, row] if number == 0 else [waiting, [SEP], row])
        whole = len(waiting) // context * context
        yield from waiting[:whole].reshape(-1, context)
        waiting = waiting[whole:]
    if len(waiting):
        yield np.concatenate([waiting, np.full(context - len(waiting), PAD)])


def _stripped(ids: Ids) -> Ids:
    """The ids without bos, eos and the padding behind."""
    real = np.flatnonzero(ids != PAD)
    ids = ids[: real[-1] + 1] if len(real) else ids[:0]
    if len(ids) and ids[0] == BOS:
        ids = ids[1:]
    return ids[:-1] if len(ids) and ids[-1] == EOS else ids


def _delayed(ids: Ids) -> Ids:
    """(T, M) -> (T + M − 1, M): column m moves down by m."""
    T, M = ids.shape
    out = np.full((T + M - 1 if T else 0, M), EMPTY, dtype=np.int64)
    for m in range(M):
        out[m : m + T, m] = ids[:, m]
    return out


def _undelayed(steps: Ids) -> Ids:
    """(T + M − 1, M) -> (T, M)."""
    S, M = steps.shape
    T = S - M + 1 if S else 0
    if T < 1 and S:
        raise DataError(f"a delayed sequence of {S} steps is cut off: it takes {M} steps to hold one token.")
    found = np.stack([steps[m : m + T, m] for m in range(M)], axis=1)
    if not np.array_equal(_delayed(found), steps):
        raise DataError("a delayed sequence is damaged: an id stands where the pattern leaves a gap.")
    return found


class SequencesRecord(BaseModel):
    """vocabulary.json; what it says of the model is kept as it is."""

    model_config = ConfigDict(extra="allow")

    format: Count
    pattern: Pattern
    codebook_sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    special: dict[str, int]
    vocab_size: int
    context: int | None
    files: Count
    ids: Count
    blocks: Count

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.codebook_sizes, self.pattern)

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = self.vocabulary
        if (self.offsets, self.special, self.vocab_size) != (own.offsets, SPECIAL, own.size):
            raise ValueError("its offsets or special ids are not those of its codebook sizes")
        return self


def write_sequences(
    paths: Sequence[str | Path],
    out: Path,
    *,
    pattern: str = "interleaved",
    context: int | None = None,
    file_format: str = "jsonl",
    overwrite: bool = False,
    progress: ProgressLine | None = None,
) -> SequencesRecord:
    """Write the codes of some files of codes as sequences to the folder `out`; returns what vocabulary.json says."""
    if file_format not in WRITE_ROWS:
        raise UsageError(f"--format {quoted(file_format)}: expected one of {', '.join(WRITE_ROWS)}.")
    if context is not None and context < 2:
        raise UsageError(f"--context {context}: a block needs at least 2 ids.")
    if not paths:
        raise UsageError("no file of codes is named; write one with `bridle tokenize`.")
    stored = [read_codes(path) for path in paths]
    header = stored[0].header
    for other in stored[1:]:
        if (other.header.model, other.header.codebook_sizes) != (header.model, header.codebook_sizes):
            raise UsageError(
                f"{quoted(other.path)} has another model or other codebook sizes than {quoted(stored[0].path)}; codes "
                "of different models cannot share ids. Write them to folders of their own."
            )
    vocabulary = make_vocabulary(header.codebook_sizes, pattern)
    if out.exists() and not overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    if out.exists() and not (out / VOCABULARY).is_file():
        raise UsageError(f"{quoted(out)} is no folder of sequences and is not replaced; give another --out.")
    with replacing_folder(out) as temporary:
        files, ids, blocks = _write(stored, temporary, vocabulary, context, file_format, progress or ProgressLine())
        record = SequencesRecord(
            format=FORMAT,
            pattern=vocabulary.pattern,
            codebook_sizes=vocabulary.sizes,
            offsets=vocabulary.offsets,
            special=SPECIAL,
            vocab_size=vocabulary.size,
            context=context,
            files=files,
            ids=ids,
            blocks=blocks,
            **header.model_dump(mode="json", include=FROM_HEADER, exclude_unset=True),
        )
        write_json(temporary / VOCABULARY, record.model_dump(mode="json"))
    return record


def _write(
    stored: Sequence[CodesFile],
    folder: Path,
    vocabulary: Vocabulary,
    context: int | None,
    file_format: str,
    progress: ProgressLine,
) -> tuple[int, int, int]:
    """Write rows and blocks; returns the numbers of files, ids and blocks."""
    total, done, ids = sum(map(len, stored)), 0, 0
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest().listening())
        put = stack.enter_context(WRITE_ROWS[file_format](folder / f"sequences.{file_format}", vocabulary))

        def rows() -> Iterator[Ids]:
            nonlocal done, ids
            for name, found in itertools.chain.from_iterable(stored):
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
    return done, ids, blocks


def _write_blocks(path: Path, blocks: Iterator[Ids], context: int, dtype: np.dtype[Any]) -> int:
    """(n, context) in numpy's format; n is known at the end, so the header is written twice, in the same room."""
    described, count = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}, 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**described, "shape": (10**12, context)})
        room = file.tell()
        for block in blocks:
            file.write(block.astype(dtype).tobytes())
            count += 1
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**described, "shape": (count, context)})
        if file.tell() != room:
            raise OSError(f"{path.name}: the final header is longer than the one before it")
    return count


@contextmanager
def _jsonl(path: Path, vocabulary: Vocabulary) -> Iterator[PutRow]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda name, row: file.write(json.dumps({"file": name, "input_ids": row.tolist()}) + "\n")


@contextmanager
def _parquet(path: Path, vocabulary: Vocabulary) -> Iterator[PutRow]:
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    ids = pyarrow.list_(pyarrow.from_numpy_dtype(vocabulary.dtype))
    schema = pyarrow.schema([("file", pyarrow.string()), ("input_ids", ids)])
    waiting: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetWriter(path, schema) as file:

        def put(name: str, row: Ids) -> None:
            waiting.append({"file": name, "input_ids": row.astype(vocabulary.dtype)})
            if len(waiting) == GROUP:
                flush()

        def flush() -> None:
            if waiting:
                file.write_table(pyarrow.Table.from_pylist(waiting, schema))
            waiting.clear()

        yield put
        flush()


WRITE_ROWS = {"jsonl": _jsonl, "parquet": _parquet}


class SequencesFile:
    """A folder of sequences: iterates over (name, codes (T, M)); `vocabulary` encodes and decodes more of them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / VOCABULARY).is_file():
            raise UsageError(f"{quoted(folder)} holds no {VOCABULARY}; write the folder with `bridle sequences`.")
        with one_line_errors(self.folder, REMEDY):
            self.record = SequencesRecord.model_validate_json((self.folder / VOCABULARY).read_bytes())
        if self.record.format > FORMAT:
            raise DataError(f"{quoted(self.folder)} has format {self.record.format}, not {FORMAT}; use a newer bridle.")
        self.vocabulary = self.record.vocabulary

    def __len__(self) -> int:
        return self.record.files

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        for name, ids in self.rows():
            yield name, self.vocabulary.decode(ids)

    def rows(self) -> Iterator[tuple[str, Ids]]:
        """Name and ids of each file, bos and eos included."""
        count = 0
        with one_line_errors(self.folder, REMEDY):
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
        with one_line_errors(self.folder, REMEDY):
            found: Array = np.load(self.folder / BLOCKS, mmap_mode="r", allow_pickle=False)
            if found.shape != (self.record.blocks, self.record.context):
                raise ValueError(f"{BLOCKS} has not the size {VOCABULARY} says")
        return found

    def _stored(self) -> Iterator[Mapping[str, Any]]:
        if (self.folder / "sequences.parquet").is_file():
            require_pyarrow()
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(self.folder / "sequences.parquet") as file:
                for batch in file.iter_batches(GROUP):
                    yield from batch.to_pylist()
            return
        with (self.folder / "sequences.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def read_sequences(folder: str | Path) -> SequencesFile:
    """What `bridle sequences` wrote: `for name, codes in bridle.read_sequences(folder)`."""
    return SequencesFile(folder)
