"""What a worker sends back: one JSON text and raw arrays. Nothing is unpickled, because a file may have taken it over.

    value      None, bool, int, float, str         as in JSON
               list, tuple, slice, Path             {"list": […]}, {"tuple": […]}, {"slice": […]}, {"path": …}
               errors                               {"error": [class, text]}, {"oserror": [number, text, file]}
               tensors and numpy arrays             {"tensor": [dtype, shape]}, {"array": [dtype, shape]}
               NamedTuples                          {"record": [name, *fields]}, of classes that the receiver names

Arrays lie in memory that both processes see, one after the other, or follow the JSON through the connection.
"""

from __future__ import annotations

import builtins
import json
import mmap
from collections.abc import Callable, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle import errors
from bridle.errors import BridleError

LARGEST = 2**31 - 2  # bytes of one array
LONGEST = 2**28  # bytes of the JSON
DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)  # of a message

Record = type[tuple[Any, ...]]  # a NamedTuple class
Array = NDArray[Any]


def send(connection: Connection, number: int, value: Any, buffer: mmap.mmap | None, *, failed: bool = False) -> None:
    """Send result `number`, its arrays through `buffer` where they fit. TypeError if it cannot be sent."""
    arrays: list[Array] = []
    packed = pack(value, arrays)
    contents = [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
    shared = buffer is not None and sum(map(len, contents)) <= len(buffer)
    text = json.dumps([number, failed, shared, packed]).encode()
    if shared:
        assert buffer is not None
        buffer.seek(0)
        for content in contents:
            buffer.write(content)
    connection.send_bytes(text)
    for content in () if shared else contents:
        connection.send_bytes(content)


def receive(
    connection: Connection, buffers: dict[int, mmap.mmap | None], records: Sequence[Record], *, pin_memory: bool
) -> tuple[int, bool, Any]:
    """Number, failed or not, and value of the next result; `buffers` are those of the results that are due.

    Raises one of MALFORMED for what `send` would not send, EOFError or OSError if the sender is gone.
    """
    number, failed, shared, packed = json.loads(connection.recv_bytes(LONGEST))
    buffer = buffers[number]
    if shared and buffer is not None:
        buffer.seek(0)
    known = {record.__name__: record for record in records}
    unpacker = Unpacker(connection, buffer if shared else None, known, pin_memory=pin_memory)
    value = unpacker.value(packed)
    if failed and not isinstance(value, Exception):
        raise ValueError("a failure without an error")
    return number, bool(failed), value


def pack(value: Any, arrays: list[Array]) -> Any:
    """`value` as JSON can hold it; the content of tensors and arrays is added to `arrays`."""
    packed: Any
    match value:
        case None | bool() | int() | float() | str():
            packed = value.item() if isinstance(value, np.generic) else value
        case np.generic():
            packed = value.item()
        case Tensor() | np.ndarray():
            kind, plain = ("tensor", value.detach().numpy()) if isinstance(value, Tensor) else ("array", value)
            arrays.append(np.ascontiguousarray(plain))
            packed = {kind: [plain.dtype.name, list(plain.shape)]}
        case OSError(errno=int()):
            packed = {"oserror": [value.errno, value.strerror, value.filename and str(value.filename)]}
        case Exception():
            packed = {"error": [type(value).__name__, str(value)]}
        case tuple() if hasattr(value, "_fields"):
            packed = {"record": [type(value).__name__, *(pack(field, arrays) for field in value)]}
        case list() | tuple():
            packed = {type(value).__name__: [pack(part, arrays) for part in value]}
        case slice():
            packed = {"slice": [value.start, value.stop, value.step]}
        case Path():
            packed = {"path": str(value)}
        case _:
            raise TypeError(f"a worker cannot send back {type(value).__name__}")
    return packed


class Unpacker:
    """Rebuilds a value from its JSON, reading its arrays in the order they were sent."""

    def __init__(
        self, connection: Connection, buffer: mmap.mmap | None, records: dict[str, Record], *, pin_memory: bool
    ) -> None:
        self.connection, self.buffer, self.records, self.pin_memory = connection, buffer, records, pin_memory

    def value(self, packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((kind, content),) = packed.items()
        if kind == "record":
            return self.records[content[0]](*map(self.value, content[1:]))
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(self.value, content))
        if kind == "path":
            return Path(content)
        make: dict[str, Callable[..., Any]] = {
            "tensor": self.tensor,
            "array": self.array,
            "slice": slice,
            "oserror": OSError,
            "error": error_of,
        }
        return make[kind](*content)

    def tensor(self, dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.from_numpy(self.array(dtype, shape))
        return tensor.pin_memory() if self.pin_memory else tensor

    def array(self, dtype: str, shape: Sequence[int]) -> Array:
        """The next array, copied into memory of its own."""
        if dtype not in DTYPES or min(shape, default=0) < 0 or prod(shape) * np.dtype(dtype).itemsize > LARGEST:
            raise ValueError(f"an array of {dtype}, shape {shape}")
        array = np.empty(shape, dtype)
        if array.size == 0:
            return array
        content = array.reshape(-1).view(np.uint8)
        if self.buffer is None:
            if self.connection.recv_bytes_into(content.data) != content.size:
                raise ValueError("an array is shorter than it should be")
            return array
        at = self.buffer.tell()
        content[:] = np.frombuffer(self.buffer, np.uint8, content.size, at)
        self.buffer.seek(at + content.size)
        return array


def error_of(name: str, text: str) -> Exception:
    """An error of another process: of its own class if that is bridle's or Python's, else a RuntimeError."""
    for module, base in ((errors, BridleError), (builtins, Exception)):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, base):
            try:
                return kind(text)
            except TypeError:  # it wants more than a text
                break
    return RuntimeError(f"{name}: {text}")
