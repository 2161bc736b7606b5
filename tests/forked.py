"""`bridle …` in a process of its own, forked from one server that has torch loaded: a start costs milliseconds.

For tests that are about what a command does. Those about how a process begins start a real one.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("bridle.api", "bridle.cli", "bridle.evaluate.finetune", "bridle.evaluate.evaluator", "bridle.report.tables"),
        *("torch._dynamo", "torch.utils.tensorboard.writer", "sklearn.linear_model", "sklearn.datasets", "rich.table"),
        *("av", "soundfile", "PIL.Image", "matplotlib.figure", "sklearn.metrics", "sklearn.neighbors"),
    ]
)
LIMIT = 300.0  # seconds for one command; a busy machine is no hang


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None  # None: it hung and was killed
    out: str
    err: str


def bridle(
    *words: str | Path,
    cwd: Path | None = None,
    stdin: str = "",
    columns: int = 160,
    limit: float = LIMIT,
    before: Callable[[], None] | None = None,
) -> Ended:
    """Run `bridle WORDS`; `before` is called in its process first."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        process = SERVER.Process(
            target=_command, args=([str(word) for word in words], str(cwd or Path.cwd()), columns, streams, before)
        )
        process.start()
        process.join(limit)
        hung = process.is_alive()
        if hung:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        said = [path.read_text() if path.exists() else "" for path in streams[1:]]
        return Ended(None if hung else process.exitcode, *said)


def _command(words: list[str], cwd: str, columns: int, streams: list[Path], before: Callable[[], None] | None) -> None:
    """In the forked process."""
    import torch

    from bridle.cli import main

    os.setpgid(0, 0)  # signals to this command reach it and its workers, and nobody else
    os.chdir(cwd)
    os.environ["COLUMNS"] = str(columns)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    sys.argv = ["bridle", *words]
    code: int | str | None = 0
    try:
        if before:
            before()
        main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
