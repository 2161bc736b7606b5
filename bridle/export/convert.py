"""`bridle convert`: a pickled checkpoint from elsewhere as safetensors. The only module that opens a pickle.

It is opened with torch's restricted reader, which builds tensors, dictionaries, lists, numbers and text and nothing
else. A file that asks for any other class is refused before that class is touched.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bridle.errors import DataError, UsageError, first_line, quoted
from bridle.files import replacing
from bridle.models.vit_names import first_names

# Where weights lie.
USUAL = ("model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params")
WRAPPERS = ("module.", "_orig_mod.", "model._orig_mod.")  # what training in parallel or compiled puts before a name
LARGEST = 64 * 2**30  # bytes; the largest published ViT is a tenth of it
DEEPEST = 32  # dictionaries in dictionaries
SWELL = 4  # tensors may claim this many times the size of the file, as views of each other do


class Converted(NamedTuple):
    """What was taken from a file, and what was not."""

    tensors: int
    bytes: int
    key: str  # of the dictionary that held the weights; "" is the file itself
    prefix: str  # what was cut from every name
    dropped: tuple[str, ...]

    def describe(self) -> str:
        """One line for people."""
        where = f" from {quoted(self.key)}" if self.key else ""
        words = [f"{self.tensors} tensors, {self.bytes / 1e6:.1f} MB{where}"]
        words += [f"{quoted(self.prefix)} cut from their names"] if self.prefix else []
        words += [f"left out: {first_names(self.dropped)}"] if self.dropped else []
        return "; ".join(words)


def convert_file(path: Path, out: Path, *, key: str | None = None, overwrite: bool = False) -> Converted:
    """Write the tensors of a checkpoint as safetensors; `key` says where in the file they are (dots go deeper)."""
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {quoted(out)}: expected a name that ends in .safetensors.")
    if out.exists() and not overwrite:
        raise UsageError(f"{quoted(out)} exists; give --overwrite to replace it, or another --out.")
    content = read_pickle(path)
    found, key = find_weights(content, path, key)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    require_plain(tensors, path)
    prefix = next((p for p in WRAPPERS if all(name.startswith(p) for name in tensors)), "")
    # Copies: views of one storage would otherwise be refused, or be written with everything around them.
    written = {name.removeprefix(prefix): value.detach().clone().contiguous() for name, value in tensors.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out, unique=True) as temporary:
        save_file(written, temporary, metadata={"format": "pt"})
    beside = [] if not key else [name for name in map(str, content) if name != key.partition(".")[0]]
    dropped = (*beside, *(name for name in found if name not in tensors))
    return Converted(len(written), out.stat().st_size, key, prefix, dropped)


def read_pickle(path: Path) -> Any:
    """The content of a checkpoint, as far as it is made of plain things; DataError if it is not."""
    if not path.is_file():
        raise UsageError(f"{quoted(path)} does not exist or is not a file; give a checkpoint of torch.")
    if path.suffix == ".safetensors":
        raise UsageError(f"{quoted(path)} is safetensors already; read it with `bridle import`.")
    if path.stat().st_size > LARGEST:
        raise UsageError(f"{quoted(path)} has {path.stat().st_size:,} bytes, more than the {LARGEST:,} that are read.")
    try:
        # Settings of argparse lie in many checkpoints; they hold values and run nothing.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error)) or re.search(r"([\w]+(?:\.[\w]+)+)", str(error))
        what = f" ({quoted(asked.group(1))})" if asked else ""
        raise DataError(
            f"{quoted(path)} holds more than tensors and plain values{what}, or is no checkpoint of torch; opening it "
            "could run a program, so it is refused. Ask its maker for safetensors or a plain state dict."
        ) from error
    except Exception as error:  # damaged archives and streams fail in many ways
        raise DataError(
            f"{quoted(path)} cannot be read as a checkpoint of torch ({type(error).__name__}: "
            f"{quoted(first_line(error))}); it may be cut short: get it again."
        ) from error


def find_weights(content: Any, path: Path, key: str | None) -> tuple[Mapping[str, Any], str]:
    """The dictionary that holds the weights, by dotted name, and where it was."""
    if key is not None:
        for part in key.split("."):
            content = content.get(part) if isinstance(content, Mapping) else None
        found = dict(flattened(content))
        if not any(isinstance(value, Tensor) for value in found.values()):
            raise UsageError(f"--key {quoted(key)}: {quoted(path)} has no tensors there.")
        return found, key
    if not isinstance(content, Mapping):
        raise DataError(f"{quoted(path)} holds a {type(content).__name__}, not a dictionary; nothing to convert.")
    for usual in ("", *USUAL):
        inner = content.get(usual) if usual else content
        if isinstance(inner, Mapping) and any(isinstance(value, Tensor) for value in inner.values()):
            return dict(flattened(inner)), usual
    keys = first_names([*map(str, content)])
    raise DataError(
        f"{quoted(path)} has no tensors under the usual keys; its keys are {keys}: give the right one with --key."
    )


def flattened(content: Any, prefix: str = "", within: tuple[int, set[int]] | None = None) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries by dotted name; DataError where one is met twice: that may never end."""
    if not isinstance(content, Mapping):
        return
    depth, met = within or (0, set[int]())
    if depth > DEEPEST or id(content) in met:
        raise DataError(
            f"the dictionary at {quoted(prefix)} is nested in itself, met twice, or more than {DEEPEST} deep; name the "
            "one that holds the weights with --key."
        )
    met.add(id(content))
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.", (depth + 1, met))
        else:
            yield f"{prefix}{name}", value


def require_plain(tensors: Mapping[str, Tensor], path: Path) -> None:
    """DataError for tensors that are sparse, quantised, complex, or claim more than the file can hold."""
    strided = {name: value for name, value in tensors.items() if value.layout == torch.strided}
    odd = [n for n in tensors if n not in strided or strided[n].is_quantized or strided[n].is_complex()]
    if odd:
        raise DataError(
            f"{quoted(path)}: {first_names(odd)} are sparse, quantised or complex; only plain tensors can be converted."
        )
    claimed, size = sum(value.numel() * value.element_size() for value in tensors.values()), path.stat().st_size
    if claimed > SWELL * size + 2**20:
        raise DataError(
            f"{quoted(path)} has {size:,} bytes, but its tensors claim {claimed:,}; it is damaged or made to fill the "
            "memory."
        )
