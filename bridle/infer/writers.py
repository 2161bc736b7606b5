"""One file of codes or features, written block by block: .npz, .safetensors or .parquet; see `codes`."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bridle.errors import UsageError, quoted
from bridle.files import replacing
from bridle.infer.columns import Parts
from bridle.infer.parquet import require_pyarrow, write_parquet

FORMAT = 1
SUFFIXES = (".npz", ".safetensors", ".parquet")
SAFE_NAMES = {"u1": "U8", "u2": "U16", "u4": "U32", "i4": "I32", "i8": "I64", "f4": "F32", "f8": "F64"}


class Block(NamedTuple):
    """An array to be written, as bytes that come one after the other."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    content: Iterable[bytes]


def require_format(out: Path) -> None:
    """UsageError for a result that could not be written, before anything is computed."""
    if out.suffix not in SUFFIXES:
        raise UsageError(
            f"--out {quoted(out)}: expected a name that ends in {', '.join(SUFFIXES)}, or one without an ending, which "
            "becomes a folder of parts."
        )
    if out.suffix == ".parquet":
        require_pyarrow()


def write_result(out: Path, parts: Parts, header: Mapping[str, Any], *, pooled: bool) -> None:
    """Everything the parts hold as one file, which is there whole or not at all."""
    writers = {".npz": _write_npz, ".safetensors": _write_safetensors, ".parquet": write_parquet}
    with replacing(out) as temporary, temporary.open("wb") as file:
        writers[out.suffix](file, parts, json.dumps(header), pooled)


def _blocks(parts: Parts, pooled: bool) -> list[Block]:
    """The arrays of a result but for the names."""
    blocks = [Block(c.name, np.dtype(c.dtype), c.shape(parts.rows), parts.blocks(c)) for c in parts.columns]
    if not pooled:
        starts = np.cumsum([0, *(entry.rows for entry in parts.readable())], dtype="<i8")
        blocks.append(Block("starts", starts.dtype, starts.shape, [starts.tobytes()]))
    return blocks


def _write_npz(file: IO[bytes], parts: Parts, header: str, pooled: bool) -> None:
    text = Block("header", np.dtype(f"<U{len(header)}"), (), [header.encode("utf-32-le")])
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for block in [*_blocks(parts, pooled), _names_block([entry.name for entry in parts.readable()]), text]:
            # ZipInfo's own date is 1980: the same content gives the same bytes.
            with archive.open(zipfile.ZipInfo(f"{block.name}.npy"), "w", force_zip64=True) as member:
                descr = np.lib.format.dtype_to_descr(block.dtype)
                described = {"descr": descr, "fortran_order": False, "shape": block.shape}
                np.lib.format.write_array_header_1_0(member, described)
                for content in block.content:
                    member.write(content)


def _names_block(names: list[str]) -> Block:
    """File names as numpy stores text, made one at a time: the longest one sets the size of all."""
    longest = max(map(len, names), default=1)
    content = (name.encode("utf-32-le").ljust(4 * longest, b"\0") for name in names)
    return Block("files", np.dtype(f"<U{longest}"), (len(names),), content)


def _write_safetensors(file: IO[bytes], parts: Parts, header: str, pooled: bool) -> None:
    names = [entry.name for entry in parts.readable()]
    described: dict[str, Any] = {"__metadata__": {"files": json.dumps(names), "header": header}}
    at = 0
    # The format wants offsets without gaps and readers want aligned numbers: wide types first.
    ordered = sorted(_blocks(parts, pooled), key=lambda block: -block.dtype.itemsize)
    for block in ordered:
        end = at + math.prod(block.shape) * block.dtype.itemsize
        kind = SAFE_NAMES[block.dtype.str[1:]]
        described[block.name] = {"dtype": kind, "shape": list(block.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described).encode()
    text = text.ljust(8 * math.ceil(len(text) / 8))
    file.write(len(text).to_bytes(8, "little") + text)
    for block in ordered:
        for content in block.content:
            file.write(content)
