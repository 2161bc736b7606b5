"""A sample inside a tar file, read where it lies: its bytes, a file-like view of them, or an address for FFmpeg.

`Location` is where the bytes of a sample are, whatever holds them: readers take both, and both can be shown as text.
"""

from __future__ import annotations

import os
import stat
from io import SEEK_CUR, SEEK_END, SEEK_SET, FileIO, RawIOBase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from bridle.errors import DataError, quoted
from bridle.files import stamp


class TarMember(NamedTuple):
    """Where the bytes of one sample lie."""

    shard: Path
    name: str  # inside the shard
    offset: int
    size: int

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """For messages: the name as if the shard were a folder."""
        return self.shard / self.name

    @property
    def suffix(self) -> str:
        """The ending of the name, as of a path."""
        return PurePosixPath(self.name).suffix

    def open(self) -> TarMemberFile:
        """The bytes as a file; DataError if the shard ends before they do."""
        try:
            handle = os.open(self.shard, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise DataError(f"{quoted(self)} cannot be read: {error.strerror or error}.") from error
        there = os.fstat(handle).st_size
        if self.offset + self.size > there:  # asked before memory is taken: a damaged header may claim any size
            os.close(handle)
            raise DataError(
                f"{quoted(self)} should end at byte {self.offset + self.size} of its shard, which has {there}; "
                "the shard is truncated. Copy it again."
            )
        return TarMemberFile(handle, self.offset, self.size)

    def read(self) -> bytes:
        """All bytes."""
        try:
            with self.open() as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{quoted(self)} cannot be read: {error.strerror or error}.") from error

    def address(self) -> str:
        """What FFmpeg calls these bytes; DataError if they are not all there."""
        self.open().close()
        return f"subfile,,start,{self.offset},end,{self.offset + self.size},,:{os.path.abspath(self.shard)}"


Location = Path | TarMember


def open_regular(path: Location) -> FileIO | TarMemberFile:
    """A file, and nothing else: opening a pipe would wait for somebody to write into it."""
    if isinstance(path, TarMember):
        return path.open()
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{quoted(path)} is not a file.")
    return FileIO(handle)  # without a buffer, because a decoder goes on with the bare handle


def byte_count(location: Location) -> int:
    """Bytes of a file or member; -1 if the file is not there."""
    return location.size if isinstance(location, TarMember) else stamp(location)[0]


class TarMemberFile(RawIOBase):
    """Some bytes of a file as a file of their own, for decoders that seek; owns the handle."""

    def __init__(self, handle: int, offset: int, size: int) -> None:
        self.handle, self.offset, self.size, self.at = handle, offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = SEEK_SET) -> int:
        base = {SEEK_SET: 0, SEEK_CUR: self.at, SEEK_END: self.size}[whence]
        self.at = max(base + at, 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = min(len(target), max(self.size - self.at, 0))
        os.lseek(self.handle, self.offset + self.at, os.SEEK_SET)  # Windows has no pread; the handle is nobody else's
        read = os.read(self.handle, count)
        target[: len(read)] = read
        self.at += len(read)
        return len(read)

    def close(self) -> None:
        if not self.closed:
            os.close(self.handle)
        super().close()
