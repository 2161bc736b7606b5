"""Errors that a user can cause and mend: one line that says what failed, where, why, and what to do.

Each class carries the process exit code the command line uses; see docs/design.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BridleError(Exception):
    """Base of every error whose message is meant for the user; shown without a traceback."""

    exit_code = 1


class UsageError(BridleError):
    """A wrong path, a command on the wrong kind of directory, arguments that do not fit together."""

    exit_code = 2


class ConfigError(BridleError):
    """A recipe, file or override that cannot be turned into a run."""

    exit_code = 2


class DataError(BridleError):
    """A file or data set that cannot be used."""

    exit_code = 65


class NonFiniteError(BridleError):
    """Numbers that are not finite where only finite ones may go on."""

    exit_code = 65


class CheckpointError(BridleError):
    """A checkpoint or other run file that is missing, damaged, or cannot be written."""

    exit_code = 74


class RankError(BridleError):
    """Another process of the same job is gone, does not answer, or holds other numbers than this one."""

    exit_code = 74


class Interrupted(BaseException):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state.

    Like KeyboardInterrupt not an Exception: a handler for damaged files or for other people's code must not take it for
    one of theirs.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def quoted(text: object, limit: int = 120) -> str:
    """Untrusted text for a message: quoted, escaped, and capped at `limit` characters."""
    shown = repr(str(text))
    return shown if len(shown) <= limit else shown[: limit - 2] + "…'"


def first_line(error: BaseException) -> str:
    """The first line of an error's text that holds anything, else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn an import that fails inside the block into a UsageError with the command that installs the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        raise UsageError(f'{name} is not installed; install it with `pip install "bridle[{extra}]"`.') from error
