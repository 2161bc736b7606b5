"""Files that are there whole or not at all: the only module that renames, syncs, hashes or locks files.

A file is written under a temporary name beside its target, synced, then renamed; a folder likewise. A reader sees the
old content or the new one. Functions raise OSError unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bridle.errors import BridleError, CheckpointError, UsageError, quoted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"  # of a folder that one command may write at a time
LARGEST_JSON = 64_000_000  # bytes; code norms of the largest codebooks fit
STALE_SECONDS = 3600.0  # age at which a temporary file of an ended process is removed
RERUN = "delete it and run the same command again"
CONTINUE = (
    "Checkpoints saved before are untouched; free some space or mend permissions, then run the same command again."
)


# --- atomic writing ---------------------------------------------------------------------------------------------------


def temporary_sibling(path: Path, *, unique: bool = False) -> Path:
    """Hidden path beside `path` for content that is not complete. With `unique` it names host and process."""
    owner = f".{host_name()}.{os.getpid()}" if unique else ""
    return path.with_name(f".{path.name}{owner}.tmp")


@contextlib.contextmanager
def replacing(path: Path, *, unique: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write a file to; at the end of the block it is synced and renamed to `path`.

    An exception in the block leaves `path` as it was and nothing else. Pass `unique` where several processes may write
    the same file at the same time.
    """
    temporary = temporary_sibling(path, unique=unique)
    try:
        yield temporary
        publish_file(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise


def publish_file(temporary: Path, path: Path) -> None:
    """Sync a complete file and rename it to `path`."""
    sync(temporary)
    temporary.replace(path)


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: Path, value: object) -> None:
    """Replace a file by `value` as JSON."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False))


@contextlib.contextmanager
def replacing_folder(path: Path, *, unique: bool = False, keep: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; at the end of the block it is synced and takes the name `path`.

    An older folder of that name is removed once the new one is there, or stays instead of it with `keep`. An exception
    in the block leaves it as it was. Pass `unique` where several processes may publish the same folder.
    """
    temporary = temporary_sibling(path, unique=unique)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for content in temporary.rglob("*"):
            sync(content)
        sync(temporary)
        _publish_folder(temporary, path, unique=unique, keep=keep)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish_folder(temporary: Path, path: Path, *, unique: bool, keep: bool) -> None:
    aside = temporary.with_suffix(".old")
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if path.exists() and not keep:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        if not (path.is_dir() and (unique or keep)):  # else another process was quicker
            if aside.exists():
                aside.rename(path)
            raise
    sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is safe on the disk; Windows cannot do it for folders."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(path: Path) -> None:
    """Remove unique temporary files and folders of `path` that ended processes of this host left an hour ago."""
    ours = re.compile(rf"{re.escape(f'.{path.name}.{host_name()}.')}(\d+)\.(tmp|old)")
    for left in path.parent.iterdir() if path.parent.is_dir() else ():
        found = ours.fullmatch(left.name)
        # Containers may share host name and folder, but not process ids: what is young may be another one's.
        if found is not None and not is_running(int(found[1])) and _age(left) > STALE_SECONDS:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0


def is_running(pid: int) -> bool:
    """Is there a process of this id? True where that cannot be known."""
    if os.name == "nt":  # where os.kill would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process, or a number that is no process id
        return True
    return True


def host_name() -> str:
    """This host's name, in characters that suit a file name."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json(path: Path, *, error: type[BridleError] = CheckpointError, remedy: str = RERUN) -> dict[str, Any]:
    """The object in a JSON file; `error` with the reason and the remedy where there is none."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"larger than {LARGEST_JSON:,} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else quoted(problem)
        raise error(f"{path}: cannot be read ({reason}); {remedy}.") from problem
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, got {type(value).__name__}; {remedy}.")
    return value


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a .jsonl file, after its last whole row."""
    with path.open("ab+") as file:
        end = file.tell()
        file.seek(max(end - 1, 0))
        if file.read(1) not in (b"", b"\n"):  # a crash or a full disk cut the last row short
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json_line(row).encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl file up to the first line that is none: the last one, if a crash cut it short."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deep
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def json_line(row: Mapping[str, Any]) -> str:
    """A row as a line of a .jsonl file."""
    return json.dumps(row, allow_nan=False) + "\n"


# --- checksums --------------------------------------------------------------------------------------------------------


def stamp(path: Path) -> tuple[int, int]:
    """Size and change time (ns) of a file, which show whether it is still the same; (-1, 0) if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """SHA-256 of a value as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fingerprint(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file, as manifests hold them."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


# --- locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock file `path` during the block. Where another process holds it: UsageError(busy), or wait.

    The operating system releases the lock when the process ends, however it ends. The file stays: whoever opened it
    just before a removal would lock a file that others do not see.
    """
    with path.open("a+") as file:
        try:
            _lock(file, wait=busy is None)
        except OSError:
            raise UsageError(busy) from None
        _held.append(file)
        try:
            yield
        finally:
            if file in _held:
                _held.remove(file)


def locked_folder(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a folder that one bridle command may write at a time."""
    return locked(
        folder / LOCK, busy=f"{folder}: another bridle command is running in this directory; wait for it to end."
    )


def _lock(file: IO[str], *, wait: bool) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    import msvcrt

    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)


_held: list[IO[str]] = []  # open lock files of this process


def _close_inherited() -> None:
    """Close lock files in a forked process: a decoder that hangs there must not keep the run locked."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


# --- space ------------------------------------------------------------------------------------------------------------


def free_bytes(path: Path) -> int:
    """Free space on the disk of `path`, which need not exist."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def require_space(folder: Path, needed: int, *, what: str) -> None:
    """CheckpointError if the disk of `folder` has less than `needed` bytes for `what`."""
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"{folder}: not enough space for {what}: needed {needed:,} bytes, free {free:,} bytes. "
            "Earlier checkpoints are untouched; free some space and run the same command again."
        )


@contextlib.contextmanager
def writing(path: Path, *, remedy: str = CONTINUE) -> Iterator[None]:
    """Inside the block an OSError becomes a CheckpointError: where, why, how much space there is, and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}); free on that disk: {free_bytes(path.parent):,} "
            f"bytes. {remedy}"
        ) from error
