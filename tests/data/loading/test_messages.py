"""What workers send back: values arrive as they were, and what `send` would not send is refused."""

from __future__ import annotations

import json
import mmap
from multiprocessing import Pipe
from typing import Any, NamedTuple

import pytest
import torch

from bridle.data.loading.messages import MALFORMED, error_of, receive, send
from bridle.errors import DataError, UsageError


class Pair(NamedTuple):
    left: Any
    right: Any


def journey(value: Any, *, room: int | None = None, failed: bool = False) -> Any:
    """The value after its way through a connection, with `room` bytes of shared memory."""
    near, far = Pipe()
    buffer = None if room is None else mmap.mmap(-1, room)
    send(near, 7, value, buffer, failed=failed)
    number, did_fail, came = receive(far, {7: buffer}, (Pair,), pin_memory=False)
    assert (number, did_fail) == (7, failed)
    return came


VALUES = (
    *(None, True, 3, -0.1, "ä\udcff", [1, (2, None)], (), slice(2, 5), Pair(1, Pair("x", [2])), 2**80, float("inf")),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_arrive_as_they_were(value: Any) -> None:
    came = journey(value)
    assert came == value
    assert type(came) is type(value)


@pytest.mark.parametrize("room", [None, 4096, 8192])
def test_arrays_arrive_through_shared_memory_or_the_connection(room: int | None) -> None:
    sent = [
        torch.arange(6, dtype=torch.float32).reshape(2, 3).T,  # not contiguous
        torch.tensor(5),
        torch.zeros(0, 4, dtype=torch.bool),
        torch.rand(1000, dtype=torch.float64),  # 8,000 bytes: does not fit into 4,096
        torch.tensor([True, False]),
    ]
    for one, other in zip(sent, journey(sent, room=room), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_an_array_that_arrived_does_not_change_with_shared_memory() -> None:
    near, far = Pipe()
    buffer = mmap.mmap(-1, 4096)
    send(near, 0, torch.ones(8), buffer)
    came = receive(far, {0: buffer}, (), pin_memory=False)[2]
    buffer[:32] = bytes(32)
    assert came.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    "error",
    [DataError("no"), UsageError("no"), ValueError("no"), MemoryError("no"), FileNotFoundError(2, "no", "a.wav")],
)
def test_errors_keep_their_class_and_words(error: Exception) -> None:
    came = journey(error, failed=True)
    assert type(came) is type(error)
    assert str(came) == str(error)


def test_errors_of_others_are_told_in_words() -> None:
    assert str(error_of("LibraryError", "no")) == "LibraryError: no"
    assert isinstance(error_of("SystemExit", "3"), RuntimeError)  # nothing that ends the process
    assert isinstance(error_of("UnicodeDecodeError", "no"), RuntimeError)  # it wants more than a text


def test_what_cannot_be_sent_is_an_error_in_the_worker() -> None:
    near, _ = Pipe()
    with pytest.raises(TypeError, match="cannot send back set"):
        send(near, 0, [1, {2}], None)


MESSAGES = {
    "no JSON": b"\x80\x04\x95",
    "another number": [8, False, False, None],
    "an unknown record": [7, False, False, {"record": ["Popen", ["ls"]]}],
    "a record of other length": [7, False, False, {"record": ["Pair", 1]}],
    "an unknown kind": [7, False, False, {"eval": ["1"]}],
    "two kinds": [7, False, False, {"tuple": [], "list": []}],
    "objects": [7, False, True, {"tensor": ["object", [2]]}],
    "a negative size": [7, False, True, {"tensor": ["uint8", [-1]]}],
    "a huge array": [7, False, True, {"tensor": ["uint8", [2**40]]}],
    "more than there is room for": [7, False, True, {"tensor": ["uint8", [5000]]}],
    "a failure without an error": [7, True, False, 3],
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_a_message_that_makes_no_sense_is_refused(message: Any) -> None:
    near, far = Pipe()
    near.send_bytes(message if isinstance(message, bytes) else json.dumps(message).encode())
    with pytest.raises(MALFORMED):
        receive(far, {7: mmap.mmap(-1, 4096)}, (Pair,), pin_memory=False)
