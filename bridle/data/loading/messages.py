"""What a worker sends back: one JSON text and raw arrays. Nothing is unpickled, because a file may have taken it over.

    value      None, bool, int, float, str         as in JSON
               list, tuple, slice                   {"list": […]}, {"tuple": […]}, {"slice": […]}
               errors                               {"error": [class, text]}, {"oserror": [number, text, file]}
               tensors                              {"tensor": [dtype, shape]}
               NamedTuples                          {"record": [name, *fields]}, of classes that the receiver names

Contents of tensors lie in memory that both processes see, one after the other, or follow the JSON through the
connection.
"""

from __future__ import annotations

import builtins
import json
import mmap
from collections.abc import Callable, Sequence
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bridle import errors
from bridle.errors import BridleError

LARGEST = 2**31 - 2  # bytes of one tensor
LONGEST = 2**28  # bytes of the JSON
DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)  # of a message

Record = type[tuple[Any, ...]]  # a NamedTuple class


def send(connection: Connection, number: int, value: Any, buffer: mmap.mmap | None, *, failed: bool = False) -> None:
    """Send result `number`, its tensors through `buffer` where they fit. TypeError if it cannot be sent."""
    arrays: list[NDArray[Any]] = []
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


def pack(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """`value` as JSON can hold it; the content of tensors is added to `arrays`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            arrays.append(np.ascontiguousarray(value.detach().numpy()))
            return {"tensor": [arrays[-1].dtype.name, list(value.shape)]}
        case Exception():
            if isinstance(value, OSError) and value.errno is not None:
                packed = {"oserror": [value.errno, value.strerror, value.filename and str(value.filename)]}
            else:
                packed = {"error": [type(value).__name__, str(value)]}
            return packed
        case tuple() if hasattr(value, "_fields"):
            return {"record": [type(value).__name__, *(pack(field, arrays) for field in value)]}
        case list() | tuple():
            return {type(value).__name__: [pack(part, arrays) for part in value]}
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
    raise TypeError(f"a worker cannot send back {type(value).__name__}")


def receive(
    connection: Connection, buffers: dict[int, mmap.mmap | None], records: Sequence[Record], *, pin_memory: bool
) -> tuple[int, bool, Any]:
    """Number, failed or not, and value of the next result; `buffers` are those of the results that are due.

    Raises one of MALFORMED for what `send` would not send, EOFError or OSError if the sender is gone.
    """
    number, failed, shared, packed = json.loads(connection.recv_bytes(LONGEST))
    due = buffers[number]
    buffer = due if shared else None
    if buffer is not None:
        buffer.seek(0)
    known = {record.__name__: record for record in records}

    def tensor(dtype: str, shape: Sequence[int]) -> Tensor:
        read = torch.from_numpy(read_array(connection, buffer, dtype, shape))
        return read.pin_memory() if pin_memory else read

    make: dict[str, Callable[..., Any]] = {
        "list": lambda *parts: list(map(unpack, parts)),
        "tuple": lambda *parts: tuple(map(unpack, parts)),
        "record": lambda name, *fields: known[name](*map(unpack, fields)),
        "tensor": tensor,
        "slice": slice,
        "oserror": OSError,
        "error": error_of,
    }

    def unpack(packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        ((kind, content),) = packed.items()
        return make[kind](*content)

    value = unpack(packed)
    if failed and not isinstance(value, Exception):
        raise ValueError("a failure without an error")
    return number, bool(failed), value


def read_array(connection: Connection, buffer: mmap.mmap | None, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """The next array, copied into memory of its own: from where `buffer` stands or, without one, the connection."""
    if dtype not in DTYPES or min(shape, default=0) < 0 or prod(shape) * np.dtype(dtype).itemsize > LARGEST:
        raise ValueError(f"an array of {dtype}, shape {shape}")
    array = np.empty(shape, dtype)
    content = array.reshape(-1).view(np.uint8)
    if content.size == 0:
        return array
    if buffer is None:
        if connection.recv_bytes_into(content.data) != content.size:
            raise ValueError("an array is shorter than it should be")
        return array
    content[:] = np.frombuffer(buffer, np.uint8, content.size, buffer.tell())
    buffer.seek(content.size, 1)
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
